// Runs the threads of a block as fibers of one OS thread.
//
// If ThreadSanitizer is in the process, this file calls the sanitizer's fiber functions, so that the sanitizer sees
// each GPU thread as a thread and finds a kernel's races. This file itself is never instrumented. The file reports to
// the sanitizer only orders that a GPU guarantees too: a barrier synchronises fibers, a switch does not. If unrelated
// barriers shared an address, the sanitizer would miss races between them.
#include "link_old_symbols.h"

#include "fibers.h"
#include "status.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

// The sanitizer's functions are weak symbols, which are null unless the process runs under ThreadSanitizer.
extern "C" {
void* __tsan_get_current_fiber() __attribute__((weak));
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_destroy_fiber(void* fiber) __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void __tsan_acquire(void* address) __attribute__((weak));
void __tsan_release(void* address) __attribute__((weak));
}

// The dynamic loader's function that returns, and may allocate, the calling thread's thread-local memory of a module.
struct TlsIndex {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

// Saves the callee-saved registers on the current stack, stores the stack pointer, and continues on another stack. The
// switch takes a few nanoseconds; swapcontext takes hundreds, because it makes a system call.
extern "C" void proxyccl_host_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.hidden proxyccl_host_switch
.globl proxyccl_host_switch
.type proxyccl_host_switch,@function
proxyccl_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size proxyccl_host_switch,.-proxyccl_host_switch
)");
constexpr uint64_t kSwitchFrame = 7 * 8;  // the six saved registers and the return address
constexpr uint64_t kReturnAddress = 6 * 8;
#elif defined(__aarch64__)
asm(R"(
.text
.hidden proxyccl_host_switch
.globl proxyccl_host_switch
.type proxyccl_host_switch,%function
proxyccl_host_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size proxyccl_host_switch,.-proxyccl_host_switch
)");
constexpr uint64_t kSwitchFrame = 160;
constexpr uint64_t kReturnAddress = 88;  // x30
#else
#error "the host runtime supports only x86-64 and aarch64"
#endif

namespace proxyccl {
namespace host {
namespace {

constexpr uint64_t kCanary = 0x5afec0de5afec0deull;
constexpr uint64_t kCanaryOffset = 8 * 1024;  // bytes below the canary, into which an overrun is harmless
constexpr uint32_t kWarp = PROXYCCL_WARP_SIZE;
constexpr unsigned kTsanNoSync = 1;

struct Block;

struct FiberState : Fiber {
  void* stack_pointer;
  FiberState *next, *previous;  // circular list of the block's runnable fibers
  Block* block;
  void* sanitizer;
  uint32_t index;
  bool live;
  // the warp exchange for which this fiber waits
  uint32_t exchange_mask, exchange_source;
  bool exchange_is_ballot;
  uint64_t exchange_value, exchange_result;
  // The addresses of these fields identify this fiber's arrival at a barrier, and its release, to the sanitizer.
  uint64_t arrived, released;
};
static_assert(sizeof(FiberState) <= kFiberSlot, "a fiber's description must fit its slot");

struct Warp {
  uint32_t live, waiting;
};

struct Block {
  const Launch* launch;
  std::vector<FiberState*> fibers;
  std::vector<Warp> warps;
  uint32_t live, runnable, at_barrier;
  uint32_t idle_turns, idle_rounds;
  bool deadlocked;
  FiberState* interrupted;  // the fiber to continue with after lookAround()
  void* host_stack_pointer;
  void* host_sanitizer;
  uint64_t started, ended;  // addresses that identify the fibers' starts and ends to the sanitizer
};

// The stacks of one OS thread, which all its blocks use. If a block needs more stacks, they are added as one mapping,
// because the system limits a process's mappings (vm.max_map_count).
class StackPool {
 public:
  ~StackPool() {
    for (FiberState* fiber : fibers_)
      if (__tsan_destroy_fiber) __tsan_destroy_fiber(fiber->sanitizer);
    for (const Mapping& mapping : mappings_) munmap(mapping.begin, mapping.bytes);
  }

  // Sets `fibers` to the first `count` fibers of the pool.
  void get(uint32_t count, std::vector<FiberState*>* fibers) {
    if (count > fibers_.size()) add(count - fibers_.size());
    fibers->assign(fibers_.begin(), fibers_.begin() + count);
  }

  static char* base(FiberState* fiber) { return reinterpret_cast<char*>(fiber) + kFiberSlot - kStackBytes; }

 private:
  struct Mapping {
    char* begin;
    size_t bytes;
  };

  void add(size_t count) {
    // Maps one stack more, because stacks are aligned. Untouched pages take no memory if they are not huge.
    const size_t bytes = (count + 1) * kStackBytes;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    madvise(mapped, bytes, MADV_NOHUGEPAGE);
    char* begin = static_cast<char*>(mapped);
    try {
      fibers_.reserve(fibers_.size() + count);
      mappings_.push_back({begin, bytes});
    } catch (const std::bad_alloc&) {
      munmap(mapped, bytes);
      throw;
    }
    char* stack = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(begin) + kStackBytes - 1) & ~(kStackBytes - 1));
    for (size_t i = 0; i < count; ++i, stack += kStackBytes) {
      auto* fiber = new (stack + kStackBytes - kFiberSlot) FiberState();
      *reinterpret_cast<uint64_t*>(stack + kCanaryOffset) = kCanary;
      if (__tsan_create_fiber) fiber->sanitizer = __tsan_create_fiber(0);
      fibers_.push_back(fiber);
    }
  }

  std::vector<FiberState*> fibers_;
  std::vector<Mapping> mappings_;
};

void switchTo(void** save, void* to, void* sanitizer) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(sanitizer, kTsanNoSync);
  proxyccl_host_switch(save, to);
}

void resume(FiberState* from, FiberState* to) {
  if (from != to) switchTo(&from->stack_pointer, to->stack_pointer, to->sanitizer);
}

void leaveToHost(FiberState* from) {
  Block* block = from->block;
  switchTo(&from->stack_pointer, block->host_stack_pointer, block->host_sanitizer);
}

void unlink(FiberState* fiber) {
  fiber->next->previous = fiber->previous;
  fiber->previous->next = fiber->next;
  --fiber->block->runnable;
}

void linkAfter(FiberState* position, FiberState* fiber) {
  fiber->previous = position;
  fiber->next = position->next;
  position->next->previous = fiber;
  position->next = fiber;
  ++fiber->block->runnable;
}

// Unlinks the running fiber and runs the next one. Returns once the fiber is linked again.
void suspend(FiberState* fiber) {
  FiberState* next = fiber->next;
  Block* block = fiber->block;
  unlink(fiber);
  if (block->runnable == 0) {
    block->deadlocked = true;  // all live fibers wait, but not all in the same barrier
    leaveToHost(fiber);
  }
  resume(fiber, next);
}

// These functions tell the sanitizer about a barrier: all fibers' accesses before the barrier happen before the last
// fiber's arrival, and this arrival happens before each fiber's release.
void announceArrival(FiberState* fiber) {
  if (__tsan_release) __tsan_release(&fiber->arrived);
}
void gatherArrival(FiberState* fiber) {
  if (__tsan_acquire) __tsan_acquire(&fiber->arrived);
}
void passOn(FiberState* fiber) {
  if (__tsan_release) __tsan_release(&fiber->released);
}
void waitForOthers(FiberState* fiber) {
  announceArrival(fiber);
  suspend(fiber);
  if (__tsan_acquire) __tsan_acquire(&fiber->released);
}

// Makes every live fiber of the block runnable. All live fibers wait at the barrier, except perhaps `current`.
void releaseBarrier(Block* block, FiberState* current) {
  block->at_barrier = 0;
  FiberState* position = current;
  for (FiberState* fiber : block->fibers) {
    if (!fiber->live || fiber == current) continue;
    gatherArrival(fiber);
    linkAfter(position, fiber);
    position = fiber;
  }
  for (FiberState* fiber : block->fibers)
    if (fiber->live && fiber != current) passOn(fiber);
}

void syncBlock(Fiber* base) {
  auto* fiber = static_cast<FiberState*>(base);
  Block* block = fiber->block;
  block->idle_rounds = 0;
  if (++block->at_barrier == block->live) {
    releaseBarrier(block, fiber);
  } else {
    waitForOthers(fiber);
  }
}

FiberState* laneOf(Block* block, uint32_t warp, uint32_t lane) { return block->fibers[warp * kWarp + lane]; }

// Completes a warp exchange if each live lane of `mask` waits in it. The running fiber, `current`, stays linked.
bool completeExchange(Block* block, uint32_t warp_index, uint32_t mask, FiberState* current) {
  Warp& warp = block->warps[warp_index];
  const uint32_t members = mask & warp.live;
  if (members == 0 || (warp.waiting & members) != members) return false;
  uint64_t bits = 0;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(members >> lane & 1)) continue;
    FiberState* fiber = laneOf(block, warp_index, lane);
    if (fiber->exchange_mask != mask) return false;
    if (fiber != current) gatherArrival(fiber);
    bits |= static_cast<uint64_t>(fiber->exchange_value & 1) << lane;
  }
  FiberState* position = current;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(members >> lane & 1)) continue;
    FiberState* fiber = laneOf(block, warp_index, lane);
    if (fiber->exchange_is_ballot) {
      fiber->exchange_result = bits;
    } else {
      const uint32_t source = fiber->exchange_source;
      // On a GPU, the result of an absent source lane is undefined; here it is the reading lane's value.
      fiber->exchange_result =
          members >> source & 1 ? laneOf(block, warp_index, source)->exchange_value : fiber->exchange_value;
    }
    if (fiber != current) {
      passOn(fiber);
      linkAfter(position, fiber);
      position = fiber;
    }
  }
  warp.waiting &= ~members;
  return true;
}

uint64_t exchange(FiberState* fiber, uint32_t mask, uint64_t value, uint32_t source, bool is_ballot) {
  Block* block = fiber->block;
  const uint32_t warp_index = fiber->index / kWarp;
  Warp& warp = block->warps[warp_index];
  block->idle_rounds = 0;
  fiber->exchange_mask = mask;
  fiber->exchange_value = value;
  fiber->exchange_source = source;
  fiber->exchange_is_ballot = is_ballot;
  warp.waiting |= 1u << fiber->lane;
  if (!completeExchange(block, warp_index, mask, fiber)) waitForOthers(fiber);
  return fiber->exchange_result;
}

uint64_t shuffleLanes(Fiber* fiber, uint32_t mask, uint64_t value, uint32_t source) {
  return exchange(static_cast<FiberState*>(fiber), mask, value, source, false);
}

uint32_t ballotLanes(Fiber* fiber, uint32_t mask, uint32_t predicate) {
  return static_cast<uint32_t>(exchange(static_cast<FiberState*>(fiber), mask, predicate, 0, true));
}

void spin(Fiber* base, uint32_t spins) {
  auto* fiber = static_cast<FiberState*>(base);
  Block* block = fiber->block;
  if (spins == 0) block->idle_rounds = 0;        // a new wait: the previous one has succeeded
  if (++block->idle_turns >= block->runnable) {  // every fiber has spun without progress
    block->idle_turns = 0;
    backOff(block->idle_rounds++);
    if (timeToLook(block->idle_rounds)) {
      block->interrupted = fiber;  // lookAround() runs on the thread's stack, because a fiber's is too small
      leaveToHost(fiber);
    }
  }
  resume(fiber, fiber->next);
}

uint64_t nowNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

const EmulatorApi kApi = {syncBlock, shuffleLanes, ballotLanes, spin, nowNanoseconds};

[[noreturn]] void fiberMain() {
  auto* fiber = static_cast<FiberState*>(self());
  Block* block = fiber->block;
  if (__tsan_acquire) __tsan_acquire(&block->started);
  block->launch->entry(block->launch->arguments);
  if (__tsan_release) __tsan_release(&block->ended);

  const uint32_t warp_index = fiber->index / kWarp;
  Warp& warp = block->warps[warp_index];
  fiber->live = false;
  --block->live;
  warp.live &= ~(1u << fiber->lane);
  block->idle_rounds = 0;
  // Releases the fibers that waited for this fiber, which stays linked until the released fibers are linked after it.
  if (block->live > 0 && block->at_barrier == block->live) releaseBarrier(block, fiber);
  for (uint32_t lane = 0; lane < kWarp && warp.waiting; ++lane)
    if (warp.waiting >> lane & 1)
      completeExchange(block, warp_index, laneOf(block, warp_index, lane)->exchange_mask, fiber);
  FiberState* next = fiber->next;
  unlink(fiber);
  if (block->live == 0) leaveToHost(fiber);
  if (block->runnable == 0) {
    block->deadlocked = true;
    leaveToHost(fiber);
  }
  resume(fiber, next);
  std::abort();  // unreachable, because a fiber that has ended is never resumed
}

void prepare(FiberState* fiber) {
  // Sets the stack pointer below the fiber's slot, aligned as on entry to a called function.
  char* top = reinterpret_cast<char*>(fiber) - 64;
  char* frame = top - 8 - kSwitchFrame;
#if defined(__aarch64__)
  frame = top - kSwitchFrame;
#endif
  memset(frame, 0, static_cast<size_t>(top - frame));
  void (*entry)() = fiberMain;
  memcpy(frame + kReturnAddress, &entry, sizeof entry);
  fiber->stack_pointer = frame;
}

// The stacks of the blocks that this thread runs.
thread_local StackPool stacks;
thread_local std::vector<char> shared;
thread_local Block block;

}  // namespace

bool prepareBlocks(const Launch& launch) {
  const uint32_t count = launch.block.x * launch.block.y * launch.block.z;
  return statusOf([&] {
           if (shared.size() < launch.shared_bytes + 64) shared.resize(launch.shared_bytes + 64);
           stacks.get(count, &block.fibers);
           block.warps.resize((count + kWarp - 1) / kWarp);
           return PROXYCCL_HOST_SUCCESS;
         }) == PROXYCCL_HOST_SUCCESS;
}

BlockResult runBlock(const Launch& launch, uint32_t block_index) {
  const auto count = static_cast<uint32_t>(block.fibers.size());
  std::fill(block.warps.begin(), block.warps.end(), Warp{0, 0});
  void* dynamic_shared = reinterpret_cast<void*>((reinterpret_cast<uint64_t>(shared.data()) + 63) & ~uint64_t{63});

  // Allocates kernels' __shared__ variables, which are thread-local. Otherwise the loader would allocate the variables
  // at a fiber's first access, and a sanitizer would report a race with the other fibers.
  if (launch.tls_module != 0) {
    TlsIndex index = {launch.tls_module, 0};
    __tls_get_addr(&index);
  }

  block.launch = &launch;
  block.live = count;
  block.runnable = 0;
  block.at_barrier = block.idle_turns = block.idle_rounds = 0;
  block.deadlocked = false;
  block.interrupted = nullptr;
  if (__tsan_get_current_fiber) block.host_sanitizer = __tsan_get_current_fiber();

  for (uint32_t i = 0; i < count; ++i) {
    FiberState* fiber = block.fibers[i];
    fiber->api = &kApi;
    fiber->default_control = launch.default_control;
    fiber->thread_idx = {i % launch.block.x, i / launch.block.x % launch.block.y,
                         i / (launch.block.x * launch.block.y)};
    fiber->block_idx = {block_index % launch.grid.x, block_index / launch.grid.x % launch.grid.y,
                        block_index / (launch.grid.x * launch.grid.y)};
    fiber->block_dim = launch.block;
    fiber->grid_dim = launch.grid;
    fiber->lane = i % kWarp;
    fiber->dynamic_shared = dynamic_shared;
    fiber->block = &block;
    fiber->index = i;
    fiber->live = true;
    block.warps[i / kWarp].live |= 1u << fiber->lane;
    prepare(fiber);
    if (i == 0) {
      fiber->next = fiber->previous = fiber;
      block.runnable = 1;
    } else {
      linkAfter(block.fibers[i - 1], fiber);
    }
  }

  if (__tsan_release) __tsan_release(&block.started);
  switchTo(&block.host_stack_pointer, block.fibers[0]->stack_pointer, block.fibers[0]->sanitizer);
  while (FiberState* fiber = block.interrupted) {
    block.interrupted = nullptr;
    lookAround();
    switchTo(&block.host_stack_pointer, fiber->stack_pointer, fiber->sanitizer);
  }
  if (__tsan_acquire) __tsan_acquire(&block.ended);

  bool overflowed = false;
  for (FiberState* fiber : block.fibers) {
    auto* canary = reinterpret_cast<uint64_t*>(StackPool::base(fiber) + kCanaryOffset);
    overflowed |= *canary != kCanary;
    *canary = kCanary;  // restored for the next block that uses this stack
  }
  if (overflowed) return BlockResult::kStackOverflow;
  return block.deadlocked ? BlockResult::kDeadlock : BlockResult::kDone;
}

}  // namespace host
}  // namespace proxyccl
