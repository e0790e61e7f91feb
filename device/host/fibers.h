// Runs the blocks of a launch on the calling OS thread, one at a time. Internal to the host runtime.
#pragma once

#include <chrono>
#include <cstdint>

#include "proxyccl/platform_host.h"

namespace proxyccl {
namespace host {

struct Launch {
  void (*entry)(void** arguments);
  uint64_t tls_module;  // the loader's number of the kernel's module, 0 if the module has no thread-local memory
  void** arguments;
  Dim3 grid, block;
  uint32_t shared_bytes;
  ProxycclControl* default_control;  // the module's control block
};

enum class BlockResult { kDone, kDeadlock, kStackOverflow };

// Called between two polls of a wait, after `rounds` polls without success. Runs a helper if a helper has work.
// Otherwise gives up the core: at first by yielding, which costs the waiter least, then by sleeping, so that many
// waiting ranks on few cores do not starve the rank that works.
void backOff(uint32_t rounds);

// While this object exists, the calling thread runs a stream's work itself, and may interrupt the work for
// lookAround().
class RunsHere {
 public:
  explicit RunsHere(void* stream);
  ~RunsHere();
  RunsHere(const RunsHere&) = delete;
  RunsHere& operator=(const RunsHere&) = delete;
};

// Whether the calling thread should call lookAround() now, after `rounds` polls of a wait. The thread must make the
// call on its own stack, and hold only the stream's lock.
bool timeToLook(uint32_t rounds);
void lookAround();
// Like timeToLook(), for a wait that sleeps for kBetweenLooks at a time.
bool mayLook();
constexpr std::chrono::milliseconds kBetweenLooks(50);

// Runs the helpers when a kernel ends, so that the proxy takes the kernel's last triggers.
void helpOut();

// Allocates the memory that the calling thread needs for blocks of a launch. Returns false if there is too little.
bool prepareBlocks(const Launch& launch);
// Runs a block. prepareBlocks() must have succeeded for the same launch.
BlockResult runBlock(const Launch& launch, uint32_t block);

}  // namespace host
}  // namespace proxyccl
