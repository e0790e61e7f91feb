#include "host_library.h"

FOR_EACH_OPERATION(proxyccl::Half, float16)
FOR_EACH_OPERATION(proxyccl::BFloat16, bfloat16)
