// The part of the binary interface of HIP and HIPRTC (ROCm 6.4) that the libraries in this folder need. AMD's headers
// can't be included, because tests run without ROCm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#define HIP_EXPORT extern "C" __attribute__((visibility("default")))

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorInvalidImage = 200,
  hipErrorMapFailed = 205,
  hipErrorSharedObjectInitFailed = 303,
  hipErrorInvalidHandle = 400,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorPeerAccessAlreadyEnabled = 704,
  hipErrorHostMemoryAlreadyRegistered = 712,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorLaunchFailure = 719,
  hipErrorStreamCaptureImplicit = 906,
  hipErrorUnknown = 999,
};

using hipStream_t = void*;
using hipEvent_t = void*;
using hipModule_t = void*;
using hipFunction_t = void*;
using hipDeviceptr_t = void*;

inline const hipStream_t hipStreamPerThread = reinterpret_cast<hipStream_t>(2);

// hipDeviceProp_tR0600; only members that the runtime reads have names.
struct hipDeviceProp {
  char name[256];
  unsigned char uuid[16];
  char unused0[16];
  size_t totalGlobalMem;
  char unused1[92];
  int multiProcessorCount;
  char unused2[768];
  char gcnArchName[256];
  char unused3[56];
};
static_assert(offsetof(hipDeviceProp, totalGlobalMem) == 288 && offsetof(hipDeviceProp, multiProcessorCount) == 388 &&
              offsetof(hipDeviceProp, gcnArchName) == 1160 && sizeof(hipDeviceProp) == 1472);

enum hipMemoryType : int { hipMemoryTypeUnregistered = 0, hipMemoryTypeHost = 1, hipMemoryTypeDevice = 2 };
struct hipPointerAttribute_t {
  hipMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
  int isManaged;
  unsigned allocationFlags;
};
enum hipPointer_attribute : int { HIP_POINTER_ATTRIBUTE_BUFFER_ID = 7 };

struct hipIpcMemHandle_t {
  char reserved[64];
};

enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_OUT_OF_MEMORY = 1,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_COMPILATION = 6
};
using hiprtcProgram = void*;

inline hipError_t outOfMemory(hipError_t) { return hipErrorOutOfMemory; }
inline hiprtcResult outOfMemory(hiprtcResult) { return HIPRTC_ERROR_OUT_OF_MEMORY; }

// Returns the call's status, or HIP's out-of-memory status if the call throws for want of memory or threads.
template <class Call>
auto statusOf(Call&& call) noexcept -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception&) {
    return outOfMemory(decltype(call()){});
  }
}
