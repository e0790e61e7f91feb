// Keeps a table of segments (the library's allocations) per device. No driver call is made with a table's lock held,
// because drivers wait for kernels.
#include "memory_pool.h"

#include <mutex>
#include <new>

namespace {

struct Segment {
  ProxycclSegment shown;
  uint32_t holders;
  Segment* next;
};

struct Device {
  std::mutex mutex;
  ProxycclPoolCalls calls;
  bool configured;
  Segment* segments;
  uint64_t last_number;
  uint64_t changes;
};

Device devices[PROXYCCL_POOL_DEVICES];

Device* find_device(int number) { return number >= 0 && number < PROXYCCL_POOL_DEVICES ? &devices[number] : nullptr; }

// Returns the address of the link to the first segment that matches, or of the last link, which is null. The caller
// holds the device's lock.
template <typename Predicate>
Segment** find_link(Device& device, Predicate wanted) {
  Segment** link = &device.segments;
  while (*link != nullptr && !wanted((*link)->shown)) link = &(*link)->next;
  return link;
}

// Removes a segment from the table. The caller holds the device's lock.
uint64_t remove(Device& device, Segment** link) {
  Segment* segment = *link;
  const uint64_t ptr = segment->shown.ptr;
  *link = segment->next;
  delete segment;
  ++device.changes;
  return ptr;
}

// While this object exists, the device's context is the thread's current context, and the thread's capture mode allows
// allocations.
class InContext {
 public:
  explicit InContext(const ProxycclPoolCalls& calls) : calls_(calls), mode_(calls.relaxed) {
    if (calls.current != nullptr) {
      failed_ = calls.current(&before_) != 0;
      if (!failed_ && before_ != calls.context) {
        failed_ = calls.make_current(calls.context) != 0;
        switched_ = !failed_;
      }
    }
    if (!failed_ && calls.exchange_capture_mode != nullptr) failed_ = calls.exchange_capture_mode(&mode_) != 0;
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  ~InContext() {
    if (!failed_ && calls_.exchange_capture_mode != nullptr) calls_.exchange_capture_mode(&mode_);
    if (switched_) calls_.make_current(before_);
  }
  bool failed() const { return failed_; }

 private:
  const ProxycclPoolCalls& calls_;
  uint64_t before_ = 0;
  int mode_;
  bool switched_ = false, failed_ = false;
};

uint64_t allocate(const ProxycclPoolCalls& calls, size_t bytes) {
  const InContext context(calls);
  if (context.failed()) return 0;
  if (calls.allocate != nullptr) {
    uint64_t ptr = 0;
    return calls.allocate(&ptr, bytes) == 0 ? ptr : 0;
  }
  void* ptr = nullptr;
  return calls.allocate_with_flags(&ptr, bytes, calls.flags) == 0 ? reinterpret_cast<uintptr_t>(ptr) : 0;
}

// The driver's status is dropped, because the library's function returns none. If a device can't free memory, it has
// failed, and the next driver call reports the failure.
void free_memory(const ProxycclPoolCalls& calls, uint64_t ptr) {
  const InContext context(calls);
  if (!context.failed()) calls.free(ptr);
}

bool same(const ProxycclPoolCalls& a, const ProxycclPoolCalls& b) {
  return a.allocate == b.allocate && a.allocate_with_flags == b.allocate_with_flags && a.free == b.free &&
         a.context == b.context;
}

}  // namespace

int proxyccl_pool_configure(int number, const ProxycclPoolCalls* calls) {
  Device* device = find_device(number);
  if (device == nullptr) return -1;
  const std::lock_guard<std::mutex> lock(device->mutex);
  if (device->configured) return same(device->calls, *calls) ? 0 : -1;
  device->calls = *calls;
  device->configured = true;
  return 0;
}

void* proxyccl_pool_allocate(ssize_t bytes, int number, void*) {
  Device* device = find_device(number);
  if (device == nullptr || bytes <= 0) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(device->mutex);
    if (!device->configured) return nullptr;
  }
  Segment* segment = new (std::nothrow) Segment();
  if (segment == nullptr) return nullptr;
  segment->shown.bytes = static_cast<uint64_t>(bytes);
  segment->shown.ptr = allocate(device->calls, static_cast<size_t>(bytes));
  if (segment->shown.ptr == 0) {
    delete segment;
    return nullptr;
  }
  void* const ptr = reinterpret_cast<void*>(static_cast<uintptr_t>(segment->shown.ptr));
  const std::lock_guard<std::mutex> lock(device->mutex);
  segment->shown.number = ++device->last_number;
  segment->next = device->segments;
  device->segments = segment;
  ++device->changes;
  return ptr;
}

void proxyccl_pool_free(void* ptr, ssize_t, int number, void*) {
  Device* device = find_device(number);
  if (device == nullptr) return;
  const uint64_t address = reinterpret_cast<uintptr_t>(ptr);
  {
    const std::lock_guard<std::mutex> lock(device->mutex);
    // Skips segments that the library has freed: their memory may still be held.
    Segment** link =
        find_link(*device, [address](const ProxycclSegment& each) { return each.ptr == address && !each.freed; });
    if (*link == nullptr) return;
    if ((*link)->holders != 0) {
      (*link)->shown.freed = 1;
      ++device->changes;
      return;
    }
    remove(*device, link);
  }
  free_memory(device->calls, address);
}

uint64_t proxyccl_pool_changes(int number) {
  Device* device = find_device(number);
  if (device == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(device->mutex);
  return device->changes;
}

size_t proxyccl_pool_segments(int number, ProxycclSegment* segments, size_t room) {
  Device* device = find_device(number);
  if (device == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(device->mutex);
  size_t count = 0;
  for (const Segment* each = device->segments; each != nullptr; each = each->next, ++count)
    if (count < room) segments[count] = each->shown;
  return count;
}

int proxyccl_pool_hold(int number, uint64_t segment) {
  Device* device = find_device(number);
  if (device == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(device->mutex);
  Segment** link = find_link(*device, [segment](const ProxycclSegment& each) { return each.number == segment; });
  if (*link == nullptr || (*link)->shown.freed) return 0;
  ++(*link)->holders;
  return 1;
}

uint64_t proxyccl_pool_release(int number, uint64_t segment) {
  Device* device = find_device(number);
  if (device == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(device->mutex);
  Segment** link = find_link(*device, [segment](const ProxycclSegment& each) { return each.number == segment; });
  if (*link == nullptr || (*link)->holders == 0) return 0;
  --(*link)->holders;
  return (*link)->holders == 0 && (*link)->shown.freed ? remove(*device, link) : 0;
}
