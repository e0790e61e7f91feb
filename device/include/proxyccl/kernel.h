// Defines PROXYCCL_EXPORT_KERNEL(name), which follows each kernel of a compiled source.
//
// The macro exports the kernel's parameter table, which gives the launcher the size and kind of each argument (a driver
// knows at most the sizes). On the host, the macro also exports the entry point that unpacks the arguments.
#pragma once

#include "proxyccl/integer_limits.h"
#include "proxyccl/platform.h"
#if PROXYCCL_ON_HOST
#include "proxyccl/host_cuda.h"
#endif

namespace proxyccl {

enum ParameterKind { kParameterBytes = 0, kParameterInteger = 1, kParameterFloat = 2, kParameterPointer = 3 };

template <class T>
struct ParameterKindOf {
  static constexpr uint32_t value = kParameterBytes;
};
template <class T>
struct ParameterKindOf<T*> {
  static constexpr uint32_t value = kParameterPointer;
};
#define PROXYCCL_PARAMETER(T, kind)         \
  template <>                               \
  struct ParameterKindOf<T> {               \
    static constexpr uint32_t value = kind; \
  };
PROXYCCL_PARAMETER(float, kParameterFloat)
PROXYCCL_PARAMETER(double, kParameterFloat)
PROXYCCL_PARAMETER(bool, kParameterInteger)
PROXYCCL_PARAMETER(char, kParameterInteger)
PROXYCCL_PARAMETER(signed char, kParameterInteger)
PROXYCCL_PARAMETER(unsigned char, kParameterInteger)
PROXYCCL_PARAMETER(short, kParameterInteger)
PROXYCCL_PARAMETER(unsigned short, kParameterInteger)
PROXYCCL_PARAMETER(int, kParameterInteger)
PROXYCCL_PARAMETER(unsigned, kParameterInteger)
PROXYCCL_PARAMETER(long, kParameterInteger)
PROXYCCL_PARAMETER(unsigned long, kParameterInteger)
PROXYCCL_PARAMETER(long long, kParameterInteger)
PROXYCCL_PARAMETER(unsigned long long, kParameterInteger)
#undef PROXYCCL_PARAMETER

// The kind of handle (handles.h, ProxycclHandleKind) that a parameter takes, by value or by pointer; 0 if the parameter
// takes no handle.
template <uint32_t>
struct IsNumber {
  using Type = void;
};
template <class T, class = void>
struct HandleKindOf {
  static constexpr uint32_t value = 0;
};
template <class T>
struct HandleKindOf<T, typename IsNumber<T::kHandleKind>::Type> {
  static constexpr uint32_t value = T::kHandleKind;
};
template <class T>
struct HandleKindOf<T*, void> : HandleKindOf<T> {};

// {number of parameters, then for each: size in bytes << 8 | HandleKindOf << 2 | ParameterKind}
template <class... Args>
struct ParameterTable {
  uint32_t entries[1 + sizeof...(Args)];
};
template <class... Args>
PROXYCCL_DEVICE constexpr ParameterTable<Args...> parameterTable(void (*)(Args...)) {
  return {{static_cast<uint32_t>(sizeof...(Args)), (static_cast<uint32_t>(sizeof(Args)) << 8 |
                                                    HandleKindOf<Args>::value << 2 | ParameterKindOf<Args>::value)...}};
}

}  // namespace proxyccl

#if PROXYCCL_ON_HOST
#define PROXYCCL_EXPORT_KERNEL(name)                                                               \
  extern "C" __attribute__((visibility("default"))) constexpr auto proxyccl_parameters_##name =    \
      ::proxyccl::parameterTable(&name);                                                           \
  extern "C" __attribute__((visibility("default"))) void proxyccl_entry_##name(void** arguments) { \
    ::proxyccl::host::callKernel(&name, arguments);                                                \
  }
#else
#define PROXYCCL_EXPORT_KERNEL(name) \
  extern "C" __device__ const auto proxyccl_parameters_##name = ::proxyccl::parameterTable(&name);
#endif
