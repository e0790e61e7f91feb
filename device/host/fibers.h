// Runs blocks of a launch on the calling OS thread, one at a time.
#pragma once

#include <chrono>
#include <cstdint>

#include "proxyccl/platform_host.h"

namespace proxyccl {
namespace host {

struct Launch {
  void (*entry)(void** arguments);
  uint64_t tls_module;  // the dynamic loader's TLS number of the kernel's module; 0 if it has no thread-local memory
  void** arguments;
  Dim3 grid, block;
  uint32_t shared_bytes;
  ProxycclControl* default_control;  // the module's control block
};

enum class BlockResult { kDone, kDeadlock, kStackOverflow };

// Called between two polls of a wait, after `rounds` polls without success. Runs the helpers (runtime.h). If no helper
// has work, yields the core, and after many rounds sleeps, so that waiting ranks do not starve a working rank.
void backOff(uint32_t rounds);

// While this object exists, the calling thread runs the work of a PROXYCCL_HOST_IN_CALLER stream, and may call
// lookAround() between two steps.
class RunsHere {
 public:
  explicit RunsHere(void* stream);
  ~RunsHere();
  RunsHere(const RunsHere&) = delete;
  RunsHere& operator=(const RunsHere&) = delete;
};

// Whether the calling thread should now call lookAround(), after `rounds` polls of a wait. The thread must call
// lookAround() on its own stack, not on a fiber's, and hold no lock but the stream's.
bool timeToLook(uint32_t rounds);
void lookAround();
// Whether a wait that sleeps for kBetweenLooks at a time should call lookAround() after each sleep.
bool mayLook();
constexpr std::chrono::milliseconds kBetweenLooks(50);

// Runs the helpers. Called when a kernel ends, so that the proxy takes the kernel's last triggers.
void helpOut();

// Allocates the calling thread's memory for blocks of a launch. Returns false if memory runs out.
bool prepareBlocks(const Launch& launch);
// Runs a block. prepareBlocks() must have succeeded for the same launch.
BlockResult runBlock(const Launch& launch, uint32_t block);

}  // namespace host
}  // namespace proxyccl
