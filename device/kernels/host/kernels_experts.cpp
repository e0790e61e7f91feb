#include "expert_combine.h"
#include "expert_dispatch.h"
#include "expert_quantize.h"

PROXYCCL_TYPED_KERNEL(expert_combine, expert_combine_float32, float)
PROXYCCL_TYPED_KERNEL(expert_scale, expert_scale_float32, float)
PROXYCCL_TYPED_KERNEL(expert_combine, expert_combine_float64, double)
PROXYCCL_TYPED_KERNEL(expert_scale, expert_scale_float64, double)
PROXYCCL_TYPED_KERNEL(expert_combine, expert_combine_float16, proxyccl::Half)
PROXYCCL_TYPED_KERNEL(expert_scale, expert_scale_float16, proxyccl::Half)
PROXYCCL_TYPED_KERNEL(expert_combine, expert_combine_bfloat16, proxyccl::BFloat16)
PROXYCCL_TYPED_KERNEL(expert_scale, expert_scale_bfloat16, proxyccl::BFloat16)
PROXYCCL_TYPED_KERNEL(expert_quantize, expert_quantize_float32, float)
PROXYCCL_TYPED_KERNEL(expert_quantize, expert_quantize_float64, double)
PROXYCCL_TYPED_KERNEL(expert_quantize, expert_quantize_float16, proxyccl::Half)
PROXYCCL_TYPED_KERNEL(expert_quantize, expert_quantize_bfloat16, proxyccl::BFloat16)
