// Runs one block of a launch on the calling OS thread. Internal to the host runtime.
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

// Between two polls of a wait, `rounds` of which have passed without effect: lets a helper work, if there is one with
// work to do. Otherwise gives the core away: at first by yielding, which costs the waiter least, then by sleeping, so
// that many waiting ranks on few cores do not starve the one that works.
void backOff(uint32_t rounds);

// Marks that the calling thread runs work of a stream itself, which it may interrupt to look around.
class RunsHere {
 public:
  explicit RunsHere(void* stream);
  ~RunsHere();
  RunsHere(const RunsHere&) = delete;
  RunsHere& operator=(const RunsHere&) = delete;
};

// Whether the calling thread is to look around now, in a wait of which `rounds` have passed. Then it calls
// lookAround(), on its own stack and without locks but the stream's.
bool timeToLook(uint32_t rounds);
void lookAround();
// The same in a wait that sleeps for kBetweenLooks at a time.
bool mayLook();
constexpr std::chrono::milliseconds kBetweenLooks(50);

// For the proxy's remaining work when a kernel ends.
void helpOut();

BlockResult runBlock(const Launch& launch, uint32_t block);

}  // namespace host
}  // namespace proxyccl
