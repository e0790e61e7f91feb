// libhiprtc.so without an AMD GPU: forwards HIPRTC's calls to NVRTC, which compiles to cubins.
//
// PROXYCCL_NVRTC names NVRTC's library if the loader does not find it under its usual name.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "hip_api.h"

namespace {

void* compiler(const char* name) {
  static void* library = [] {
    const char* path = std::getenv("PROXYCCL_NVRTC");
    return dlopen(path != nullptr ? path : "libnvrtc.so", RTLD_NOW | RTLD_LOCAL);
  }();
  void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) {
    std::fprintf(stderr, "libhiprtc.so on CUDA: NVRTC or its %s is missing; PROXYCCL_NVRTC names the library\n", name);
    std::abort();
  }
  return symbol;
}

// Looks up a function of NVRTC once, and calls it with exactly these argument types. NVRTC's status numbers are those
// of HIPRTC.
#define NVRTC(name, ...)                                                                \
  [&](auto... arguments) {                                                              \
    using Function = int (*)(decltype(arguments)...);                                   \
    static void* const symbol = compiler(#name);                                        \
    return static_cast<hiprtcResult>(reinterpret_cast<Function>(symbol)(arguments...)); \
  }(__VA_ARGS__)

}  // namespace

HIP_EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) { return NVRTC(nvrtcVersion, major, minor); }
HIP_EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  static void* const symbol = compiler("nvrtcGetErrorString");
  return reinterpret_cast<const char* (*)(int)>(symbol)(result);
}
HIP_EXPORT hiprtcResult hiprtcCreateProgram(hiprtcProgram* program, const char* source, const char* name, int headers,
                                            const char** sources, const char** names) {
  return NVRTC(nvrtcCreateProgram, program, source, name, headers, sources, names);
}
HIP_EXPORT hiprtcResult hiprtcDestroyProgram(hiprtcProgram* program) { return NVRTC(nvrtcDestroyProgram, program); }
HIP_EXPORT hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char** options) {
  return statusOf([&]() -> hiprtcResult {
    static const std::string kArchitecture = "--offload-arch=";
    std::vector<std::string> translated = {"-default-device"};
    for (int i = 0; i < count; ++i) {
      const std::string option = options[i];
      if (option.compare(0, kArchitecture.size(), kArchitecture) == 0) {
        translated.push_back("-arch=" + option.substr(kArchitecture.size()));
      } else if (option != "-O3") {  // NVRTC's only level
        translated.push_back(option);
      }
    }
    std::vector<const char*> pointers;
    for (const std::string& option : translated) pointers.push_back(option.c_str());
    return NVRTC(nvrtcCompileProgram, program, static_cast<int>(pointers.size()), pointers.data());
  });
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t* bytes) {
  return NVRTC(nvrtcGetProgramLogSize, program, bytes);
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char* log) {
  return NVRTC(nvrtcGetProgramLog, program, log);
}
HIP_EXPORT hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t* bytes) {
  return NVRTC(nvrtcGetCUBINSize, program, bytes);
}
HIP_EXPORT hiprtcResult hiprtcGetCode(hiprtcProgram program, char* code) { return NVRTC(nvrtcGetCUBIN, program, code); }
