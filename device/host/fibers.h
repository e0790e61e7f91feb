// Runs one block of a launch on the calling OS thread. Internal to the host runtime.
#pragma once

#include <cstdint>

#include "proxyccl/platform_host.h"

namespace proxyccl {
namespace host {

struct Launch {
  void (*entry)(void** arguments);
  uint64_t tls_module;  // the loader's number of the kernel's module, 0 if it has no thread-local memory
  void** arguments;
  Dim3 grid, block;
  uint32_t shared_bytes;
};

enum class BlockResult { kDone, kDeadlock, kStackOverflow };

BlockResult runBlock(const Launch& launch, uint32_t block);

}  // namespace host
}  // namespace proxyccl
