// Memory that other processes can map: anonymous shared memory with a file descriptor.
//
// A file in /dev/shm would outlive a killed process. A memfd is freed with its last mapping or descriptor. Peers of the
// same user open the memfd through /proc/<pid>/fd.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <new>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"
#include "status.h"

int proxyccl_host_memory_create(int* descriptor, size_t bytes) {
  const int fd = memfd_create("proxyccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return errno;
  // The file is sealed, so that no other process can truncate it while it is mapped.
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    return error;
  }
  *descriptor = fd;
  return 0;
}

namespace {

constexpr uintptr_t kHugePage = 2 << 20;  // x86-64, and arm64 with 4 KiB pages; elsewhere madvise() fails
constexpr int kCollapse = 25;             // MADV_COLLAPSE of Linux 6.1, which older headers lack
constexpr uintptr_t kMovedAtOnce = 32 << 20;
constexpr std::chrono::seconds kMovingTime(2);

struct Mapping {
  size_t bytes;
  int descriptor;  // descriptor of memory from proxyccl_host_allocate(), to be closed; else -1
  uint64_t id;
};

struct Mappings {
  std::mutex mutex;
  std::map<uintptr_t, Mapping> by_address;
  uint64_t last_id = 0;

  // Returns the mapping that contains an address, or end(). The caller holds the lock.
  std::map<uintptr_t, Mapping>::iterator find(uint64_t ptr) {
    auto found = by_address.upper_bound(ptr);
    if (found == by_address.begin()) return by_address.end();
    --found;
    return ptr < found->first + found->second.bytes ? found : by_address.end();
  }
};

Mappings& mappings() { return proxyccl::host::Lasting<Mappings>::get(); }

// Forks wait for the lock, because a fork's child lacks the thread that would release it.
[[maybe_unused]] const int kForksWait = pthread_atfork(
    [] { mappings().mutex.lock(); }, [] { mappings().mutex.unlock(); }, [] { mappings().mutex.unlock(); });

uintptr_t roundUp(uintptr_t value, uintptr_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Maps a whole file. If the file is at least as large as a huge page, the mapping's address is a multiple of a huge
// page's size, because Linux uses huge pages only at such addresses.
void* mapAligned(int descriptor, size_t bytes) {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  void* mapping = mmap(nullptr, bytes, kProtection, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED || bytes < kHugePage || reinterpret_cast<uintptr_t>(mapping) % kHugePage == 0) {
    return mapping;
  }
  munmap(mapping, bytes);
  const size_t room = roundUp(bytes, sysconf(_SC_PAGESIZE));
  void* reserved = mmap(nullptr, room + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  const auto start = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = roundUp(start, kHugePage);
  mapping = mmap(reinterpret_cast<void*>(aligned), bytes, kProtection, MAP_SHARED | MAP_FIXED, descriptor, 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, room + kHugePage);
    errno = error;
    return MAP_FAILED;
  }
  if (aligned > start) munmap(reserved, aligned - start);
  munmap(reinterpret_cast<void*>(aligned + room), start + kHugePage - aligned);
  return mapping;
}

int map(void** address, int descriptor, size_t bytes, bool owned) {
  void* mapping = mapAligned(descriptor, bytes);
  if (mapping == MAP_FAILED) return errno;
  const int status = proxyccl::host::statusOf([=] {
    Mappings& all = mappings();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address[reinterpret_cast<uintptr_t>(mapping)] = {bytes, owned ? descriptor : -1, ++all.last_id};
    return PROXYCCL_HOST_SUCCESS;
  });
  if (status != PROXYCCL_HOST_SUCCESS) {
    munmap(mapping, bytes);
    return ENOMEM;
  }
  *address = mapping;
  return 0;
}

}  // namespace

int proxyccl_host_memory_map(void** address, int descriptor, size_t bytes) {
  return map(address, descriptor, bytes, false);
}

void proxyccl_host_memory_use_huge_pages(uint64_t ptr, size_t bytes) {
  uintptr_t end = 0;
  {
    Mappings& all = mappings();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.find(ptr);
    if (found == all.by_address.end()) return;
    end = std::min<uintptr_t>(ptr + bytes, found->first + found->second.bytes);
  }
  end -= end % kHugePage;
  const auto deadline = std::chrono::steady_clock::now() + kMovingTime;
  for (uintptr_t piece = roundUp(ptr, kHugePage); piece < end; piece += kMovedAtOnce) {
    // If the call fails, the pages stay small.
    madvise(reinterpret_cast<void*>(piece), std::min(kMovedAtOnce, end - piece), kCollapse);
    if (std::chrono::steady_clock::now() > deadline) return;
  }
}

int proxyccl_host_memory_unmap(void* address, size_t bytes) {
  Mappings& all = mappings();
  {
    // The entry is removed first, because another thread may map memory at the address as soon as it is unmapped.
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.by_address.erase(reinterpret_cast<uintptr_t>(address));
  }
  return munmap(address, bytes) == 0 ? 0 : errno;
}

int proxyccl_host_memory_discard(void* address, size_t bytes) {
  // MADV_REMOVE takes whole pages; the last page of a mapping belongs to no other memory.
  return madvise(address, roundUp(bytes, sysconf(_SC_PAGESIZE)), MADV_REMOVE) == 0 ? 0 : errno;
}

int proxyccl_host_allocate(uint64_t* ptr, size_t bytes) {
  int descriptor = -1;
  void* address = nullptr;
  int status = proxyccl_host_memory_create(&descriptor, bytes);
  if (status != 0) return status;
  status = map(&address, descriptor, bytes, true);
  if (status != 0) {
    close(descriptor);
    return status;
  }
  *ptr = reinterpret_cast<uintptr_t>(address);
  return PROXYCCL_HOST_SUCCESS;
}

int proxyccl_host_free(uintptr_t ptr) {
  Mapping found;
  {
    Mappings& all = mappings();
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto mapping = all.by_address.find(ptr);
    if (mapping == all.by_address.end() || mapping->second.descriptor < 0) return PROXYCCL_HOST_INVALID_VALUE;
    found = mapping->second;
  }
  const int status = proxyccl_host_memory_unmap(reinterpret_cast<void*>(ptr), found.bytes);
  close(found.descriptor);
  return status;
}

int proxyccl_host_allocation(uint64_t ptr, uint64_t* base, uint64_t* bytes, int* descriptor) {
  Mappings& all = mappings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.find(ptr);
  if (found == all.by_address.end() || found->second.descriptor < 0) return PROXYCCL_HOST_NOT_FOUND;
  *base = found->first;
  *bytes = found->second.bytes;
  *descriptor = found->second.descriptor;
  return PROXYCCL_HOST_SUCCESS;
}

int proxyccl_host_pointer_attribute(void* data, int attribute, uint64_t ptr) {
  if (attribute != PROXYCCL_HOST_BUFFER_ID) return PROXYCCL_HOST_INVALID_VALUE;
  Mappings& all = mappings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.find(ptr);
  if (found == all.by_address.end()) return PROXYCCL_HOST_INVALID_VALUE;
  *static_cast<uint64_t*>(data) = found->second.id;
  return PROXYCCL_HOST_SUCCESS;
}
