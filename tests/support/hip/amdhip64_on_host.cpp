// libamdhip64.so without an AMD GPU: implements HIP's calls on the host runtime, which is linked in.
//
// Tests use it to run the HIP runtime's Python code, hip-python and the proxy engine without a GPU. There are
// HIP_ON_HOST_DEVICES devices (default 8), which all use this machine's memory. As in a real driver, each stream and
// allocation belongs to a device, a device's memory is limited, and other processes open memory by handles.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hip_api.h"
#include "runtime.h"

namespace {

constexpr size_t kDeviceBytes = size_t{16} << 30;
constexpr size_t kLargeFill = size_t{64} << 20;
constexpr size_t kPage = 4096;
constexpr int kVersion = 60'443'484;  // 6.4

int deviceCount() {
  static const int count = [] {
    const char* text = std::getenv("HIP_ON_HOST_DEVICES");
    return text != nullptr ? std::atoi(text) : 8;
  }();
  return count;
}

thread_local int current_device = 0;
thread_local int capture_mode = 0;

// -- memory ---

struct Allocation {
  size_t bytes;
  int device;
  int descriptor;  // -1 for memory of another process that this process maps
  uint64_t id;
};

std::mutex mutex;  // guards the variables below, which are never destroyed because threads outlive main
auto& allocations = *new std::map<uintptr_t, Allocation>();
auto& registered = *new std::map<uintptr_t, size_t>();  // host memory
auto& allocated = *new std::map<int, size_t>();         // by device
auto& priorities = *new std::map<void*, int>();         // by stream
auto& peers = *new std::set<std::pair<int, int>>();
auto& captured = *new std::map<hipStream_t, uint64_t>();  // the captures' numbers
uint64_t last_id = 0;

template <class Map>
typename Map::iterator containing(Map& ranges, const void* pointer) {
  auto found = ranges.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return found == ranges.begin() ? ranges.end() : std::prev(found);
}

std::map<uintptr_t, Allocation>::iterator allocationOf(const void* pointer) {
  auto found = containing(allocations, pointer);
  if (found == allocations.end() || reinterpret_cast<uintptr_t>(pointer) >= found->first + found->second.bytes)
    return allocations.end();
  return found;
}

std::map<uintptr_t, size_t>::iterator registeredOf(const void* pointer) {
  auto found = containing(registered, pointer);
  if (found == registered.end() || reinterpret_cast<uintptr_t>(pointer) >= found->first + found->second)
    return registered.end();
  return found;
}

// The contents of a 64-byte hipIpcMemHandle_t.
struct IpcHandle {
  uint64_t process;
  uint64_t descriptor;
  uint64_t filesystem, file;  // show whether another file has reused the descriptor
  uint64_t bytes;
  uint64_t id;
};
static_assert(sizeof(IpcHandle) <= sizeof(hipIpcMemHandle_t));

// -- streams ---

struct Stream {
  void* host = nullptr;
  int device;
  bool destroyed = false;  // the program destroyed the stream while work was queued
  bool of_thread = false;  // hipStreamPerThread

  explicit Stream(int device_) : device(device_) {
    if (proxyccl_host_stream_create(&host, 0) != 0) throw std::runtime_error("no thread for a stream");
  }
  ~Stream() { proxyccl_host_stream_destroy(host); }
};

auto& streams = *new std::map<Stream*, std::shared_ptr<Stream>>();

Stream* createStream() {
  auto stream = std::make_shared<Stream>(current_device);
  std::lock_guard<std::mutex> lock(mutex);
  return streams.emplace(stream.get(), stream).first->first;
}

// The stream's queued work continues after this call, and device synchronisations still wait for the work.
hipError_t destroyStream(Stream* handle) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = streams.find(handle);
    if (found == streams.end() || found->second->destroyed) return hipErrorInvalidHandle;
    stream = found->second;
    stream->destroyed = true;
  }
  auto end = [stream] {
    proxyccl_host_stream_synchronize(stream->host);
    std::lock_guard<std::mutex> lock(mutex);
    streams.erase(stream.get());
  };
  if (proxyccl_host_stream_query(stream->host) == PROXYCCL_HOST_NOT_READY)
    std::thread(end).detach();
  else
    end();
  return hipSuccess;
}

// The calling thread's hipStreamPerThread of each device.
struct ThreadStreams {
  std::map<int, Stream*> by_device;

  ~ThreadStreams() {
    for (auto& [device, stream] : by_device) destroyStream(stream);
  }
  Stream* get() {
    Stream*& stream = by_device[current_device];
    if (stream == nullptr) {
      stream = createStream();
      std::lock_guard<std::mutex> lock(mutex);
      stream->of_thread = true;
    }
    return stream;
  }
};
thread_local ThreadStreams thread_streams;

// Returns the current device's legacy default stream, and makes it wait for the work queued on per-thread default
// streams. Per-thread default streams do not wait for the legacy stream.
void* legacyStream() {
  static auto& by_device = *new std::map<int, Stream*>();
  std::vector<std::shared_ptr<Stream>> earlier;
  Stream* legacy;
  {
    std::lock_guard<std::mutex> lock(mutex);
    Stream*& made = by_device[current_device];
    if (made == nullptr) {
      auto stream = std::make_shared<Stream>(current_device);
      made = streams.emplace(stream.get(), stream).first->first;
    }
    legacy = made;
    for (auto& [pointer, stream] : streams)
      if (stream->of_thread && stream->device == current_device) earlier.push_back(stream);
  }
  for (auto& stream : earlier) {
    void* event;
    if (proxyccl_host_event_create(&event) != 0) throw std::bad_alloc();
    const bool ordered = proxyccl_host_event_record(event, stream->host) == 0 &&
                         proxyccl_host_stream_wait_event(legacy->host, event, 0) == 0;
    proxyccl_host_event_destroy(event);
    if (!ordered) throw std::bad_alloc();
  }
  return legacy->host;
}

void* hostStream(hipStream_t stream) {
  if (stream == hipStreamPerThread) return thread_streams.get()->host;
  if (stream == nullptr) return legacyStream();
  return static_cast<Stream*>(stream)->host;
}

// On a destroyed stream real drivers crash or return an error; this library always returns an error.
bool isDestroyed(hipStream_t stream) {
  if (stream == nullptr || stream == hipStreamPerThread) return false;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(static_cast<Stream*>(stream));
  return found == streams.end() || found->second->destroyed;
}

hipError_t synchronizeDevice(int device) {
  std::vector<std::shared_ptr<Stream>> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [pointer, stream] : streams)
      if (stream->device == device) waiting.push_back(stream);
  }
  int status = 0;
  for (auto& stream : waiting) {
    const int failed = proxyccl_host_stream_synchronize(stream->host);
    if (status == 0) status = failed;
  }
  return static_cast<hipError_t>(status);
}

// Returns the size of a shared object in memory, because hipModuleLoadData gets only its address.
size_t imageBytes(const void* image) {
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return 0;
  const char* begin = static_cast<const char*>(image);
  size_t bytes = header->e_shoff + size_t{header->e_shnum} * header->e_shentsize;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(begin + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i)
    if (sections[i].sh_type != SHT_NOBITS) bytes = std::max<size_t>(bytes, sections[i].sh_offset + sections[i].sh_size);
  return bytes;
}

}  // namespace

HIP_EXPORT hipError_t hipInit(unsigned) { return deviceCount() > 0 ? hipSuccess : hipErrorNoDevice; }
HIP_EXPORT hipError_t hipDriverGetVersion(int* version) {
  const char* text = std::getenv("HIP_ON_HOST_DRIVER_VERSION");  // for the test of a driver that is too old
  *version = text != nullptr ? std::atoi(text) : kVersion;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  *version = kVersion;
  return hipSuccess;
}
HIP_EXPORT const char* hipGetErrorString(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "no error";
    case hipErrorInvalidValue:
      return "invalid argument";
    case hipErrorOutOfMemory:
      return "out of memory";
    case hipErrorNoDevice:
      return "no ROCm-capable device is detected";
    case hipErrorInvalidDevice:
      return "invalid device ordinal";
    case hipErrorNotFound:
      return "named symbol not found";
    case hipErrorNotReady:
      return "device not ready";
    case hipErrorLaunchFailure:
      return "unspecified launch failure";
    default:
      return "unknown error";
  }
}

// -- devices ---

HIP_EXPORT hipError_t hipGetDeviceCount(int* count) {
  *count = deviceCount();
  return *count > 0 ? hipSuccess : hipErrorNoDevice;
}
HIP_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp* properties, int device) {
  if (device < 0 || device >= deviceCount()) return hipErrorInvalidDevice;
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "CPU as HIP device %d", device);
  std::memcpy(properties->uuid, "HIP on the host", 15);
  properties->uuid[15] = static_cast<unsigned char>(device);
  properties->totalGlobalMem = kDeviceBytes;
  properties->multiProcessorCount = 2;  // keeps grids small, because each GPU thread needs a stack
  std::strcpy(properties->gcnArchName, "gfx942:sramecc+:xnack-");
  return hipSuccess;
}
HIP_EXPORT hipError_t hipGetDevice(int* device) {
  *device = current_device;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= deviceCount()) return hipErrorInvalidDevice;
  current_device = device;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDeviceSynchronize() {
  return statusOf([&]() -> hipError_t { return synchronizeDevice(current_device); });
}
HIP_EXPORT hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  if (std::min(device, peer) < 0 || std::max(device, peer) >= deviceCount()) return hipErrorInvalidDevice;
  *can = device != peer;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipDeviceGetP2PAttribute(int* value, int, int device, int peer) {
  return hipDeviceCanAccessPeer(value, device, peer);
}
HIP_EXPORT hipError_t hipDeviceEnablePeerAccess(int peer, unsigned) {
  return statusOf([&]() -> hipError_t {
    if (peer < 0 || peer >= deviceCount() || peer == current_device) return hipErrorInvalidDevice;
    std::lock_guard<std::mutex> lock(mutex);
    return peers.emplace(current_device, peer).second ? hipSuccess : hipErrorPeerAccessAlreadyEnabled;
  });
}

// -- memory ---

HIP_EXPORT hipError_t hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned) {
  return statusOf([&]() -> hipError_t {
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes > kDeviceBytes - allocated[current_device]) return hipErrorOutOfMemory;
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    int descriptor;
    if (proxyccl_host_memory_create(&descriptor, rounded) != 0) return hipErrorOutOfMemory;
    if (proxyccl_host_memory_map(pointer, descriptor, rounded) != 0) {
      close(descriptor);
      return hipErrorOutOfMemory;
    }
    allocated[current_device] += rounded;
    allocations[reinterpret_cast<uintptr_t>(*pointer)] = {rounded, current_device, descriptor, ++last_id};
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipFree(void* pointer) {
  return statusOf([&]() -> hipError_t {
    int device;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
      if (found == allocations.end() || found->second.descriptor < 0) return hipErrorInvalidValue;
      device = found->second.device;
    }
    synchronizeDevice(device);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations.end()) return hipErrorInvalidValue;
    proxyccl_host_memory_unmap(pointer, found->second.bytes);
    close(found->second.descriptor);
    allocated[device] -= found->second.bytes;
    allocations.erase(found);
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipMemGetInfo(size_t* free, size_t* total) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes, hipDeviceptr_t pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocationOf(pointer);
  if (found == allocations.end()) return hipErrorNotFound;
  *base = reinterpret_cast<void*>(found->first);
  *bytes = found->second.bytes;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  void* address = const_cast<void*>(pointer);
  auto found = allocationOf(pointer);
  if (found != allocations.end()) {
    *attributes = {hipMemoryTypeDevice, found->second.device, address, nullptr, 0, 0};
    return hipSuccess;
  }
  if (registeredOf(pointer) == registered.end()) return hipErrorInvalidValue;
  *attributes = {hipMemoryTypeHost, current_device, address, address, 0, 0};
  return hipSuccess;
}
HIP_EXPORT hipError_t hipPointerGetAttribute(void* data, hipPointer_attribute attribute, hipDeviceptr_t pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocationOf(pointer);
  if (found == allocations.end() || attribute != HIP_POINTER_ATTRIBUTE_BUFFER_ID) return hipErrorInvalidValue;
  *static_cast<uint64_t*>(data) = found->second.id;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
  struct stat info;
  if (found == allocations.end() || found->second.descriptor < 0 || fstat(found->second.descriptor, &info) != 0)
    return hipErrorInvalidValue;
  const IpcHandle own = {static_cast<uint64_t>(getpid()),
                         static_cast<uint64_t>(found->second.descriptor),
                         info.st_dev,
                         info.st_ino,
                         found->second.bytes,
                         found->second.id};
  *handle = {};
  std::memcpy(handle->reserved, &own, sizeof own);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle, unsigned) {
  return statusOf([&]() -> hipError_t {
    IpcHandle theirs;
    std::memcpy(&theirs, handle.reserved, sizeof theirs);
    const std::string path = "/proc/" + std::to_string(theirs.process) + "/fd/" + std::to_string(theirs.descriptor);
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat info;
    if (descriptor < 0) return hipErrorInvalidHandle;
    const bool same = fstat(descriptor, &info) == 0 && info.st_dev == theirs.filesystem && info.st_ino == theirs.file &&
                      static_cast<uint64_t>(info.st_size) == theirs.bytes;
    const bool mapped = same && proxyccl_host_memory_map(pointer, descriptor, theirs.bytes) == 0;
    close(descriptor);
    if (!mapped) return same ? hipErrorMapFailed : hipErrorInvalidHandle;
    std::lock_guard<std::mutex> lock(mutex);
    allocations[reinterpret_cast<uintptr_t>(*pointer)] = {theirs.bytes, current_device, -1, ++last_id};
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipIpcCloseMemHandle(void* pointer) {
  return statusOf([&]() -> hipError_t {
    synchronizeDevice(current_device);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations.end() || found->second.descriptor >= 0) return hipErrorInvalidValue;
    proxyccl_host_memory_unmap(pointer, found->second.bytes);
    allocations.erase(found);
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned) {
  return statusOf([&]() -> hipError_t {
    std::lock_guard<std::mutex> lock(mutex);
    if (registeredOf(pointer) != registered.end()) return hipErrorHostMemoryAlreadyRegistered;
    registered[reinterpret_cast<uintptr_t>(pointer)] = bytes;
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  return registered.erase(reinterpret_cast<uintptr_t>(pointer)) ? hipSuccess : hipErrorHostMemoryNotRegistered;
}
HIP_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer, void* pointer, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  if (registeredOf(pointer) == registered.end()) return hipErrorInvalidValue;
  *device_pointer = pointer;
  return hipSuccess;
}

HIP_EXPORT hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t dst, hipDeviceptr_t src, size_t bytes, hipStream_t stream) {
  return statusOf(
      [&]() -> hipError_t { return static_cast<hipError_t>(proxyccl_host_copy(dst, src, bytes, hostStream(stream))); });
}
HIP_EXPORT hipError_t hipMemcpyAsync(void* dst, const void* src, size_t bytes, int, hipStream_t stream) {
  return statusOf(
      [&]() -> hipError_t { return static_cast<hipError_t>(proxyccl_host_copy(dst, src, bytes, hostStream(stream))); });
}
HIP_EXPORT hipError_t hipMemsetD8Async(hipDeviceptr_t dst, unsigned char value, size_t bytes, hipStream_t stream) {
  return statusOf([&]() -> hipError_t {
    // Zeroes large memory by returning its pages to the system, because tests may allocate gigabytes and use little.
    if (value == 0 && bytes >= kLargeFill && reinterpret_cast<uintptr_t>(dst) % kPage == 0) {
      if (const int status = proxyccl_host_stream_synchronize(hostStream(stream)))
        return static_cast<hipError_t>(status);
      const size_t whole = bytes / kPage * kPage;
      if (madvise(dst, whole, MADV_REMOVE) == 0) {
        dst = static_cast<char*>(dst) + whole;
        bytes -= whole;
      }
    }
    return static_cast<hipError_t>(proxyccl_host_set(dst, value, bytes, hostStream(stream)));
  });
}

// -- streams and events ---

HIP_EXPORT hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 1, *greatest = -1;
  return hipSuccess;
}
// Only stores the priority, for tests that query it.
HIP_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned, int priority) {
  return statusOf([&]() -> hipError_t {
    *stream = createStream();
    std::lock_guard<std::mutex> lock(mutex);
    priorities[*stream] = priority;
    return hipSuccess;
  });
}
HIP_EXPORT hipError_t hipStreamGetPriority(hipStream_t stream, int* priority) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = priorities.find(stream);
  *priority = found == priorities.end() ? 0 : found->second;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  return statusOf([&]() -> hipError_t { return destroyStream(static_cast<Stream*>(stream)); });
}
HIP_EXPORT hipError_t hipStreamQuery(hipStream_t stream) {
  return statusOf(
      [&]() -> hipError_t { return static_cast<hipError_t>(proxyccl_host_stream_query(hostStream(stream))); });
}
HIP_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  return statusOf(
      [&]() -> hipError_t { return static_cast<hipError_t>(proxyccl_host_stream_synchronize(hostStream(stream))); });
}
HIP_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  return statusOf([&]() -> hipError_t {
    return static_cast<hipError_t>(proxyccl_host_stream_wait_event(hostStream(stream), event, 0));
  });
}
// For tests: makes hipStreamGetCaptureInfo_v2 report that a capture with this number records the stream, or with 0 that
// no capture does. A reported capture does not change the execution of the stream's work.
HIP_EXPORT void hipOnHostCapture(hipStream_t stream, int capture) {
  std::lock_guard<std::mutex> lock(mutex);
  if (capture != 0)
    captured[stream] = capture;
  else
    captured.erase(stream);
}
HIP_EXPORT hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, int* status, uint64_t* id, void*, void*, void*) {
  std::lock_guard<std::mutex> lock(mutex);
  // As in HIP, the legacy default stream can't be used during a capture of a blocking stream. This library treats
  // all streams as blocking.
  if (stream == nullptr && !captured.empty()) return hipErrorStreamCaptureImplicit;
  const auto found = captured.find(stream);
  *status = found != captured.end();
  if (*status && id != nullptr) *id = found->second;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < 0 || *mode > 2) return hipErrorInvalidValue;
  std::swap(*mode, capture_mode);
  return hipSuccess;
}
HIP_EXPORT hipError_t hipStreamWriteValue32(hipStream_t stream, void* pointer, uint32_t value, unsigned flags) {
  return statusOf([&]() -> hipError_t {
    auto* word = static_cast<uint32_t*>(pointer);
    return static_cast<hipError_t>(proxyccl_host_write32(hostStream(stream), word, value, flags));
  });
}
HIP_EXPORT hipError_t hipStreamWriteValue64(hipStream_t stream, void* pointer, uint64_t value, unsigned flags) {
  return statusOf([&]() -> hipError_t {
    auto* word = static_cast<uint64_t*>(pointer);
    return static_cast<hipError_t>(proxyccl_host_write64(hostStream(stream), word, value, flags));
  });
}

HIP_EXPORT hipError_t hipStreamWaitValue64(hipStream_t stream, void* pointer, uint64_t value, unsigned flags,
                                           uint64_t mask) {
  return statusOf([&]() -> hipError_t {
    if (flags != 0 || mask != ~uint64_t{0}) return hipErrorInvalidValue;
    ProxycclStreamOperation wait = {};
    wait.kind = PROXYCCL_STREAM_WAIT;
    wait.address = reinterpret_cast<uint64_t>(pointer);
    wait.value = value;
    return static_cast<hipError_t>(proxyccl_host_stream_operations(hostStream(stream), 1, &wait, 0));
  });
}

HIP_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
  return static_cast<hipError_t>(proxyccl_host_event_create(event));
}
HIP_EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  return static_cast<hipError_t>(proxyccl_host_event_destroy(event));
}
HIP_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return statusOf([&]() -> hipError_t {
    if (isDestroyed(stream)) return hipErrorInvalidHandle;
    return static_cast<hipError_t>(proxyccl_host_event_record(event, hostStream(stream)));
  });
}
HIP_EXPORT hipError_t hipEventQuery(hipEvent_t event) {
  return static_cast<hipError_t>(proxyccl_host_event_query(event));
}
HIP_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  uint64_t target = 0;
  int status;
  do {
    status = proxyccl_host_event_await(event, &target, 1000);
  } while (status == PROXYCCL_HOST_NOT_READY);
  return static_cast<hipError_t>(status);
}
HIP_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t end) {
  return static_cast<hipError_t>(proxyccl_host_event_elapsed(milliseconds, start, end));
}

// -- kernels ---

HIP_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  const size_t bytes = imageBytes(image);
  if (bytes == 0) return hipErrorInvalidImage;
  // The file name is unique, because dlopen would return an already loaded file of the same name.
  char path[] = "/tmp/hip_on_host.XXXXXX";
  const int descriptor = mkostemp(path, O_CLOEXEC);
  if (descriptor < 0) return hipErrorOutOfMemory;
  const char* rest = static_cast<const char*>(image);
  for (size_t left = bytes; left > 0;) {
    const ssize_t written = write(descriptor, rest, left);
    if (written < 0) break;
    rest += written;
    left -= static_cast<size_t>(written);
  }
  close(descriptor);
  const int status = proxyccl_host_module_load(module, path);  // returns an error for a truncated file
  unlink(path);
  return status == 0 ? hipSuccess : hipErrorSharedObjectInitFailed;
}
HIP_EXPORT hipError_t hipModuleUnload(hipModule_t module) {
  return static_cast<hipError_t>(proxyccl_host_module_unload(module));
}
HIP_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  return static_cast<hipError_t>(proxyccl_host_module_function(function, module, name));
}
HIP_EXPORT hipError_t hipModuleGetGlobal(hipDeviceptr_t* pointer, size_t* bytes, hipModule_t module, const char* name) {
  *pointer = proxyccl_host_module_variable(module, name);
  if (std::strcmp(name, "proxyccl_default_control") == 0) {
    *bytes = sizeof(void*);
    return hipSuccess;
  }
  Dl_info info;
  const ElfW(Sym)* symbol = nullptr;
  if (*pointer == nullptr ||
      dladdr1(*pointer, &info, reinterpret_cast<void**>(const_cast<ElfW(Sym)**>(&symbol)), RTLD_DL_SYMENT) == 0 ||
      symbol == nullptr)
    return hipErrorNotFound;
  *bytes = symbol->st_size;
  return hipSuccess;
}
HIP_EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                            hipStream_t stream, void** parameters, void** extra) {
  return statusOf([&]() -> hipError_t {
    return static_cast<hipError_t>(proxyccl_host_launch(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                                        shared_bytes, hostStream(stream), parameters, extra));
  });
}
