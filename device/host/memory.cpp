// Memory that other processes can map: anonymous shared memory behind a file descriptor.
//
// A name in /dev/shm would outlive a killed process. A memfd has none: the kernel frees it with its last mapping, and
// a peer of the same user opens it through /proc/<pid>/fd.
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

int proxyccl_host_memory_create(int* descriptor, size_t bytes) {
  const int fd = memfd_create("proxyccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return errno;
  // Sealed so that whoever maps it need not fear that another process cuts it short.
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    return error;
  }
  *descriptor = fd;
  return 0;
}

int proxyccl_host_memory_map(void** address, int descriptor, size_t bytes) {
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapping == MAP_FAILED) return errno;
  *address = mapping;
  return 0;
}

int proxyccl_host_memory_unmap(void* address, size_t bytes) { return munmap(address, bytes) == 0 ? 0 : errno; }
