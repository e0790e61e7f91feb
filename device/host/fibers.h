// Runs the blocks of a launch on the calling OS thread, one at a time. Internal to the host runtime.
#pragma once

#include <chrono>
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
  ProxycclControl* default_control;  // the module's
};

enum class BlockResult { kDone, kDeadlock, kStackOverflow };

// Called between two polls of a wait, after `rounds` polls without success: lets a helper with work to do run.
// Otherwise it gives up the core: first by yielding, which costs the waiter least, then by sleeping, so that many
// waiting ranks on few cores do not starve the one that works.
void backOff(uint32_t rounds);

// Marks that the calling thread runs a stream's work itself, which it may interrupt to look around.
class RunsHere {
 public:
  explicit RunsHere(void* stream);
  ~RunsHere();
  RunsHere(const RunsHere&) = delete;
  RunsHere& operator=(const RunsHere&) = delete;
};

// Whether the calling thread should look around now, after `rounds` polls of a wait. If so, it calls lookAround(), on
// its own stack and holding only the stream's lock.
bool timeToLook(uint32_t rounds);
void lookAround();
// The same in a wait that sleeps for kBetweenLooks at a time.
bool mayLook();
constexpr std::chrono::milliseconds kBetweenLooks(50);

// For the proxy's remaining work when a kernel ends.
void helpOut();

// Takes the memory that the calling thread needs for blocks of a launch. Returns false if there is too little.
bool prepareBlocks(const Launch& launch);
// After prepareBlocks() for the same launch.
BlockResult runBlock(const Launch& launch, uint32_t block);

}  // namespace host
}  // namespace proxyccl
