// libamdhip64.so without an AMD GPU: forwards each HIP call to its counterpart in CUDA's driver API.
//
// Tests use it to run the HIP runtime's Python code, hip-python and the proxy engine on an NVIDIA GPU. HIP and CUDA
// have the same numbers for the status codes that the runtime checks; other codes are passed on unchanged.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "hip_api.h"

namespace {

// CUDA's types, as in cuda.h.
using CUdevice = int;
using CUcontext = void*;
enum { CUDA_ERROR_INVALID_VALUE = 1 };
enum { CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75 };
enum { CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76 };
enum { CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_POINTER_ATTRIBUTE_BUFFER_ID = 7 };
enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
enum { CU_MEMHOSTREGISTER_PORTABLE = 1, CU_MEMHOSTREGISTER_DEVICEMAP = 2 };
enum { CU_STREAM_NON_BLOCKING = 1, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };

void* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) {
    std::fprintf(stderr, "libamdhip64.so on CUDA: libcuda.so.1 or its %s is missing\n", name);
    std::abort();
  }
  return symbol;
}

// Looks up a driver function once, and calls it with exactly these argument types.
#define CU(name, ...)                                        \
  [&](auto... arguments) {                                   \
    using Function = int (*)(decltype(arguments)...);        \
    static void* const symbol = driver(#name);               \
    return reinterpret_cast<Function>(symbol)(arguments...); \
  }(__VA_ARGS__)

hipError_t as(int status) { return static_cast<hipError_t>(status); }

// Gets a device's primary context, which is retained until the process exits.
hipError_t primaryContext(int device, CUcontext* context) {
  static std::mutex mutex;
  static auto& contexts = *new std::vector<CUcontext>();
  std::lock_guard<std::mutex> lock(mutex);
  if (device < 0) return hipErrorInvalidDevice;
  if (contexts.size() <= static_cast<size_t>(device)) contexts.resize(static_cast<size_t>(device) + 1);
  CUcontext& held = contexts[static_cast<size_t>(device)];
  if (held == nullptr)
    if (const int status = CU(cuDevicePrimaryCtxRetain, &held, static_cast<CUdevice>(device))) return as(status);
  *context = held;
  return hipSuccess;
}

// Makes the first device current if the thread has no current device, as HIP does.
hipError_t needCurrent() {
  CUcontext context = nullptr;
  if (const int status = CU(cuCtxGetCurrent, &context)) return as(status);
  if (context != nullptr) return hipSuccess;
  if (const hipError_t status = primaryContext(0, &context)) return status;
  return as(CU(cuCtxSetCurrent, context));
}

}  // namespace

HIP_EXPORT hipError_t hipInit(unsigned flags) { return as(CU(cuInit, flags)); }
HIP_EXPORT hipError_t hipDriverGetVersion(int* version) {
  *version = 60'443'484;  // HIP 6.4
  return hipSuccess;
}
HIP_EXPORT hipError_t hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }
HIP_EXPORT const char* hipGetErrorString(hipError_t error) {
  const char* text = nullptr;
  return CU(cuGetErrorString, static_cast<int>(error), &text) == 0 ? text : "unknown error";
}

// -- devices ---

HIP_EXPORT hipError_t hipGetDeviceCount(int* count) { return as(CU(cuDeviceGetCount, count)); }
HIP_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp* properties, int device) {
  *properties = {};
  int major = 0, minor = 0;
  const int statuses[] = {
      CU(cuDeviceGetName, &properties->name[0], static_cast<int>(sizeof properties->name), device),
      CU(cuDeviceGetUuid_v2, static_cast<void*>(properties->uuid), device),
      CU(cuDeviceTotalMem_v2, &properties->totalGlobalMem, device),
      CU(cuDeviceGetAttribute, &properties->multiProcessorCount,
         static_cast<int>(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), device),
      CU(cuDeviceGetAttribute, &major, static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), device),
      CU(cuDeviceGetAttribute, &minor, static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), device),
  };
  for (const int status : statuses)
    if (status != 0) return as(status);
  std::snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "sm_%d%d", major, minor);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGetDevice(int* device) {
  return statusOf([&]() -> hipError_t {
    if (const hipError_t status = needCurrent()) return status;
    return as(CU(cuCtxGetDevice, device));
  });
}
HIP_EXPORT hipError_t hipSetDevice(int device) {
  return statusOf([&]() -> hipError_t {
    CUcontext context = nullptr;
    if (const hipError_t status = primaryContext(device, &context)) return status;
    return as(CU(cuCtxSetCurrent, context));
  });
}
HIP_EXPORT hipError_t hipDeviceSynchronize() { return as(CU(cuCtxSynchronize)); }
HIP_EXPORT hipError_t hipDeviceGetP2PAttribute(int* value, int, int device, int peer) {
  return as(CU(cuDeviceGetP2PAttribute, value, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, device, peer));
}
HIP_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  return as(CU(cuDeviceCanAccessPeer, can, device, peer));
}
HIP_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  return statusOf([&]() -> hipError_t {
    CUcontext context = nullptr;
    if (const hipError_t status = primaryContext(peer, &context)) return status;
    return as(CU(cuCtxEnablePeerAccess, context, flags));
  });
}

// -- memory ---

HIP_EXPORT hipError_t hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned) {
  return as(CU(cuMemAlloc_v2, pointer, bytes));
}
HIP_EXPORT hipError_t hipFree(void* pointer) { return as(CU(cuMemFree_v2, pointer)); }
HIP_EXPORT hipError_t hipMemGetInfo(size_t* free, size_t* total) { return as(CU(cuMemGetInfo_v2, free, total)); }
HIP_EXPORT hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes, hipDeviceptr_t pointer) {
  return as(CU(cuMemGetAddressRange_v2, base, bytes, pointer));
}
HIP_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  unsigned kind = 0;
  if (CU(cuPointerGetAttribute, static_cast<void*>(&kind), static_cast<int>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE), pointer))
    return hipErrorInvalidValue;
  void* address = const_cast<void*>(pointer);
  *attributes = {kind == CU_MEMORYTYPE_DEVICE ? hipMemoryTypeDevice : hipMemoryTypeHost, 0, address, nullptr, 0, 0};
  return as(CU(cuPointerGetAttribute, static_cast<void*>(&attributes->device),
               static_cast<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL), pointer));
}
HIP_EXPORT hipError_t hipPointerGetAttribute(void* data, hipPointer_attribute attribute, hipDeviceptr_t pointer) {
  static_assert(HIP_POINTER_ATTRIBUTE_BUFFER_ID == static_cast<int>(CU_POINTER_ATTRIBUTE_BUFFER_ID));
  return as(CU(cuPointerGetAttribute, data, static_cast<int>(attribute), pointer));
}
HIP_EXPORT hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  return as(CU(cuIpcGetMemHandle, handle, pointer));
}
HIP_EXPORT hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle, unsigned) {
  return as(CU(cuIpcOpenMemHandle_v2, pointer, handle, static_cast<unsigned>(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)));
}
HIP_EXPORT hipError_t hipIpcCloseMemHandle(void* pointer) { return as(CU(cuIpcCloseMemHandle, pointer)); }
HIP_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned) {
  const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  return as(CU(cuMemHostRegister_v2, pointer, bytes, flags));
}
HIP_EXPORT hipError_t hipHostUnregister(void* pointer) { return as(CU(cuMemHostUnregister, pointer)); }
HIP_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer, void* pointer, unsigned flags) {
  return as(CU(cuMemHostGetDevicePointer_v2, device_pointer, pointer, flags));
}

HIP_EXPORT hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t dst, hipDeviceptr_t src, size_t bytes, hipStream_t stream) {
  return as(CU(cuMemcpyAsync, dst, src, bytes, stream));
}
HIP_EXPORT hipError_t hipMemcpyAsync(void* dst, const void* src, size_t bytes, int, hipStream_t stream) {
  return as(CU(cuMemcpyAsync, dst, src, bytes, stream));
}
HIP_EXPORT hipError_t hipMemsetD8Async(hipDeviceptr_t dst, unsigned char value, size_t bytes, hipStream_t stream) {
  return as(CU(cuMemsetD8Async, dst, value, bytes, stream));
}

// -- streams and events ---

HIP_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  return as(CU(cuStreamCreateWithPriority, stream, flags, priority));
}
HIP_EXPORT hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return as(CU(cuCtxGetStreamPriorityRange, least, greatest));
}
HIP_EXPORT hipError_t hipStreamGetPriority(hipStream_t stream, int* priority) {
  return as(CU(cuStreamGetPriority, stream, priority));
}
HIP_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) { return as(CU(cuStreamDestroy_v2, stream)); }
HIP_EXPORT hipError_t hipStreamQuery(hipStream_t stream) { return as(CU(cuStreamQuery, stream)); }
HIP_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) { return as(CU(cuStreamSynchronize, stream)); }
HIP_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  return as(CU(cuStreamWaitEvent, stream, event, flags));
}
HIP_EXPORT hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, int* status, uint64_t* id, void* graph,
                                                 void* nodes, void* count) {
  return as(CU(cuStreamGetCaptureInfo_v2, stream, status, id, graph, nodes, count));
}
HIP_EXPORT hipError_t hipThreadExchangeStreamCaptureMode(int* mode) {
  return as(CU(cuThreadExchangeStreamCaptureMode, mode));
}
HIP_EXPORT hipError_t hipStreamWriteValue32(hipStream_t stream, void* pointer, uint32_t value, unsigned flags) {
  return as(CU(cuStreamWriteValue32_v2, stream, pointer, value, flags));
}
HIP_EXPORT hipError_t hipStreamWriteValue64(hipStream_t stream, void* pointer, uint64_t value, unsigned flags) {
  return as(CU(cuStreamWriteValue64_v2, stream, pointer, value, flags));
}

HIP_EXPORT hipError_t hipStreamWaitValue64(hipStream_t stream, void* pointer, uint64_t value, unsigned flags,
                                           uint64_t mask) {
  if (mask != ~uint64_t{0}) return hipErrorInvalidValue;
  return as(CU(cuStreamWaitValue64_v2, stream, pointer, value, flags));
}

HIP_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  return as(CU(cuEventCreate, event, flags));
}
HIP_EXPORT hipError_t hipEventDestroy(hipEvent_t event) { return as(CU(cuEventDestroy_v2, event)); }
HIP_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return as(CU(cuEventRecord, event, stream));
}
HIP_EXPORT hipError_t hipEventQuery(hipEvent_t event) { return as(CU(cuEventQuery, event)); }
HIP_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) { return as(CU(cuEventSynchronize, event)); }
HIP_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t end) {
  return as(CU(cuEventElapsedTime, milliseconds, start, end));
}

// -- kernels ---

HIP_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  return as(CU(cuModuleLoadData, module, image));
}
HIP_EXPORT hipError_t hipModuleUnload(hipModule_t module) { return as(CU(cuModuleUnload, module)); }
HIP_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  return as(CU(cuModuleGetFunction, function, module, name));
}
HIP_EXPORT hipError_t hipModuleGetGlobal(hipDeviceptr_t* pointer, size_t* bytes, hipModule_t module, const char* name) {
  return as(CU(cuModuleGetGlobal_v2, pointer, bytes, module, name));
}
HIP_EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                            hipStream_t stream, void** parameters, void** extra) {
  return as(CU(cuLaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
               parameters, extra));
}
