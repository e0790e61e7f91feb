// execute_plan: the interpreter of execution plans. A block executes the steps of one threadblock of the plan.
//
// Blocks wait for each other (barriers, semaphores, signals), so all must be resident. A block's threads execute the
// steps without waiting for one another, except at steps that are barriers. So steps of single threads, such as waits
// for several channels, overlap.
//
// After a failed wait the kernel continues with incomplete data, all its later waits end immediately, and the CPU
// raises the error (wait.h).
#pragma once

#include "execution.h"
#include "instance.h"
#include "packets.h"
#include "proxyccl/float8.h"
#include "reduce_ranks.h"

namespace proxyccl {

// A block's part of the plan, in shared memory. An object in each thread's local memory would take a microsecond more
// per step, because each acquire would invalidate its cached copy and each release would wait for the stores to it.
class PlanBlock {
 public:
  static PROXYCCL_DEVICE PlanBlock& own() {
    __shared__ PlanBlock block;
    return block;
  }

  // All threads of the block call load(), before anything else.
  PROXYCCL_DEVICE void load(const ProxycclExecution& execution) {
    const uint32_t steps = execution.block_steps, operands = execution.block_operands;
    const ProxycclStep* own_steps = execution.steps + static_cast<uint64_t>(blockIdx.x) * steps;
    const ProxycclOperand* own_operands = execution.operands + static_cast<uint64_t>(blockIdx.x) * operands;
    const bool fits = steps <= kSteps && operands <= kOperands;
    if (threadIdx.x == 0) {
      execution_ = execution;
      executions_ = loadRelaxedDevice(&execution.counters->executions);
      alternate_ = executions_ % 2 * execution.alternate_bytes;
      steps_ = fits ? kept_steps_ : own_steps;
      operands_ = fits ? kept_operands_ : own_operands;
    }
    if (fits) {
      copyBytes(kept_steps_, own_steps, steps * sizeof(ProxycclStep), threadIdx.x, blockDim.x);
      copyBytes(kept_operands_, own_operands, operands * sizeof(ProxycclOperand), threadIdx.x, blockDim.x);
    }
    __syncthreads();
  }

  PROXYCCL_DEVICE const ProxycclExecution* operator->() const { return &execution_; }
  PROXYCCL_DEVICE const ProxycclStep& step(uint32_t i) const { return steps_[i]; }
  PROXYCCL_DEVICE uint64_t executions() const { return executions_; }
  PROXYCCL_DEVICE uint64_t alternate() const { return alternate_; }
  // Returns the execution's packet flag, which is never 0, because zeroed memory holds 0. The number of flags is even,
  // so that each half of the scratch memory keeps its flags' parity when flags wrap around.
  PROXYCCL_DEVICE uint32_t flag() const { return static_cast<uint32_t>(executions_ % 0xfffffffeu) + 1; }

  PROXYCCL_DEVICE const ProxycclOperand& operand(const ProxycclStep& step, uint32_t i) const {
    return operands_[step.first_operand + i];
  }
  PROXYCCL_DEVICE char* at(const ProxycclStep& step, uint32_t i, uint64_t offset) const {
    const ProxycclOperand& it = operand(step, i);
    char* base = it.base == PROXYCCL_BASE_INPUT    ? execution_.input
                 : it.base == PROXYCCL_BASE_OUTPUT ? execution_.output
                                                   : nullptr;
    return base + it.address + (it.alternates ? alternate_ : 0) + (it.packets ? 2 * offset : offset);
  }

 private:
  static constexpr uint32_t kSteps = 64, kOperands = 128;  // steps and operands of larger plans stay in device memory

  ProxycclExecution execution_;
  uint64_t executions_, alternate_;
  const ProxycclStep* steps_;
  const ProxycclOperand* operands_;
  ProxycclStep kept_steps_[kSteps];
  ProxycclOperand kept_operands_[kOperands];
};

// The functions below are not inlined, because they are large and called from several places.

// Returns payload number p of a source. Waits for the payload if it comes in a packet.
PROXYCCL_OUT_OF_LINE LL16Packet::Payload receivePayload(const ProxycclStep& step, uint32_t source, size_t p) {
  const PlanBlock& block = PlanBlock::own();
  const char* from = block.at(step, source, 0);
  if (!block.operand(step, source).packets) return reinterpret_cast<const LL16Packet::Payload*>(from)[p];
  const LL16Packet* packet = reinterpret_cast<const LL16Packet*>(from) + p;
  const uint32_t flag = block.flag();
  LL16Packet::Payload payload{};
  const WaitFor what = {PROXYCCL_WAIT_EXECUTION, PROXYCCL_NO_PEER, step.place, flag};
  waitUntil(block->control, what, [&](uint64_t* seen) { return packet->tryRead(flag, &payload, seen); });
  return payload;
}

// Combines packet by packet, so that a thread waits only for its own packets. The function takes no offset, because
// loops do not contain steps with packets.
template <class T, class Op>
PROXYCCL_OUT_OF_LINE void combinePackets(const ProxycclStep& step, uint64_t bytes) {
  const PlanBlock& block = PlanBlock::own();
  using Payload = LL16Packet::Payload;
  forEach(bytes / sizeof(Payload), threadIdx.x, blockDim.x, [&](size_t p) {
    Payload payload = receivePayload(step, 0, p);
    if (step.sources > 1) {
      PacketReduction<T, Op> reduction(1);
      reduction(0, payload);
#pragma unroll 1
      for (uint32_t source = 1; source < step.sources; ++source) reduction(source, receivePayload(step, source, p));
      payload = reduction.finish();
    }
#pragma unroll 1
    for (uint32_t d = step.sources; d < step.sources + step.destinations; ++d) {
      char* to = block.at(step, d, 0);
      if (block.operand(step, d).packets)
        reinterpret_cast<LL16Packet*>(to)[p].write(payload, block.flag());
      else
        reinterpret_cast<Payload*>(to)[p] = payload;
    }
  });
}

// Combines the values of aligned ranges that fill whole units of 16 bytes, and returns the number of these values. A
// thread has several loads of each of two sources in flight, because a source may be across a link.
template <class T, class Op>
PROXYCCL_DEVICE uint64_t combineAligned([[maybe_unused]] const ProxycclStep& step, [[maybe_unused]] uint64_t offset,
                                        [[maybe_unused]] uint64_t count) {
#if PROXYCCL_ON_HOST
  return 0;  // on the host, the caller combines all values, so that each thread's values are contiguous
#else
  const PlanBlock& block = PlanBlock::own();
  constexpr uint32_t kWide = 16 / sizeof(T);
  constexpr uint32_t kUnits = sizeof(T) == 1 ? 2 : 4;  // each sum takes a register, even if elements have one byte
  const uint64_t units = count / kWide;
#pragma unroll 1
  for (uint64_t first = threadIdx.x; first < units; first += static_cast<uint64_t>(kUnits) * blockDim.x) {
    auto inside = [=](uint32_t u) { return first + u * blockDim.x < units; };
    auto at = [&](uint32_t operand) { return reinterpret_cast<Bytes16*>(block.at(step, operand, offset)) + first; };
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kAhead>(
        step.sources, 1,
        [&](uint32_t source) {
          return [=, from = at(source)](uint32_t u) { return inside(u) ? from[u * blockDim.x] : Bytes16{}; };
        },
        results);
#pragma unroll 1
    for (uint32_t d = step.sources; d < step.sources + step.destinations; ++d) {
      Bytes16* to = at(d);
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u)
        if (inside(u)) store128(to + u * blockDim.x, results[u].low, results[u].high);
    }
  }
  return units * kWide;
#endif
}

template <class T, class Op>
PROXYCCL_OUT_OF_LINE void combineRanges(const ProxycclStep& step, uint64_t offset, uint64_t bytes) {
  if (step.packets) return combinePackets<T, Op>(step, bytes);
  const PlanBlock& block = PlanBlock::own();
  bool aligned = true;
#pragma unroll 1
  for (uint32_t i = 0; i < step.sources + step.destinations; ++i)
    aligned = aligned && isAligned16(block.at(step, i, offset));
  const uint64_t count = bytes / sizeof(T);
  const uint64_t done = aligned ? combineAligned<T, Op>(step, offset, count) : 0;
  if (done == count) return;
  reduceRanks<T, Op>(
      step.sources, 1, count - done, false, threadIdx.x, blockDim.x,
      [&](uint32_t source) { return reinterpret_cast<const T*>(block.at(step, source, offset)) + done; },
      [&](uint64_t i, const auto& values) {
#pragma unroll 1
        for (uint32_t d = step.sources; d < step.sources + step.destinations; ++d)
          values.store(reinterpret_cast<T*>(block.at(step, d, offset)) + done + i);
      });
}

// The interpreter's state in one thread of a block.
template <class T>
class PlanExecutor {
 public:
  PROXYCCL_DEVICE void run() const {
    // The loop keeps few variables across steps, because such variables would be in local memory (see PlanBlock).
    uint32_t i = 0, loop = kNoLoop, turn = 0;
    for (;;) {
      const ProxycclStep& step = block().step(i);
      if (step.code == PROXYCCL_STEP_END) return;
      if (step.code == PROXYCCL_STEP_LOOP) {
        loop = i++;
        continue;
      }
      const uint64_t unit = loop != kNoLoop ? block().step(loop).unit : step.bytes;
      execute(step, turn * unit, unit);
      ++i;
      if (loop == kNoLoop || i <= loop + block().step(loop).option) continue;
      if (++turn < block().step(loop).iterations) {
        i = loop + 1;
      } else {
        loop = kNoLoop;
        turn = 0;
      }
    }
  }

  PROXYCCL_DEVICE void finish() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    ProxycclExecutionCounters* counters = block()->counters;
    if (fetchAddAcqRelDevice<uint32_t>(&counters->blocks_done, 1) != gridDim.x - 1) return;
    storeRelaxedDevice<uint32_t>(&counters->blocks_done, 0);
    storeRelaxedDevice<uint64_t>(&counters->executions, block().executions() + 1);
  }

 private:
  static constexpr uint32_t kNoLoop = ~0u;

  static PROXYCCL_DEVICE const PlanBlock& block() { return PlanBlock::own(); }

  // Executes a step on at most `limit` bytes of its data, from `offset` on.
  PROXYCCL_DEVICE void execute(const ProxycclStep& step, uint64_t offset, uint64_t limit) const {
    const uint64_t bytes = offset < step.bytes ? minimum(step.bytes - offset, limit) : 0;
    switch (step.code) {
      case PROXYCCL_STEP_SYNC:
        return syncThreadsSystem();
      case PROXYCCL_STEP_BARRIER:
        reinterpret_cast<DeviceSyncer*>(block()->barriers)[step.channel].sync(static_cast<int>(step.option),
                                                                              block()->control);
        return;
      case PROXYCCL_STEP_COPY:
        if (bytes != 0)
          copyBytes(block().at(step, 1, offset), block().at(step, 0, offset), bytes, threadIdx.x, blockDim.x);
        return;
      case PROXYCCL_STEP_COMBINE:
        return combine(step, offset, bytes);
      case PROXYCCL_STEP_AWAIT_PACKETS:
        forEach(bytes / sizeof(LL16Packet::Payload), threadIdx.x, blockDim.x,
                [&](size_t p) { receivePayload(step, 0, p); });
        return;
      default:
        if (threadIdx.x == step.thread) executeByOne(step, offset, bytes);
    }
  }

  PROXYCCL_DEVICE void executeByOne(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    switch (step.code) {
      case PROXYCCL_STEP_SIGNAL:
        return Semaphore{step.semaphore}.signal();
      case PROXYCCL_STEP_RELAXED_SIGNAL:
        return Semaphore{step.semaphore}.relaxedSignal();
      case PROXYCCL_STEP_WAIT:
      case PROXYCCL_STEP_PORT_WAIT:
        Semaphore{step.semaphore}.wait(block()->control, PROXYCCL_WAIT_EXECUTION, step.option, step.place);
        return;
      case PROXYCCL_STEP_RELAXED_WAIT:
        Semaphore{step.semaphore}.relaxedWait(block()->control, PROXYCCL_WAIT_EXECUTION, step.option, step.place);
        return;
      case PROXYCCL_STEP_PORT:
        return push(step, offset, bytes);
      case PROXYCCL_STEP_ACQUIRE:
        semaphore(step)->acquire(block()->control, {PROXYCCL_WAIT_EXECUTION, PROXYCCL_NO_PEER, step.place, 1});
        return;
      case PROXYCCL_STEP_RELEASE:
        return semaphore(step)->release();
    }
  }

  PROXYCCL_DEVICE DeviceSemaphore* semaphore(const ProxycclStep& step) const {
    return reinterpret_cast<DeviceSemaphore*>(block()->semaphores) + step.channel;
  }

  PROXYCCL_DEVICE void push(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    const ProxyChannelDeviceHandle channel{block()->port_channels[step.channel]};
    const uint64_t dst = step.dst_offset + offset + (step.dst_alternates ? block().alternate() : 0);
    const uint64_t src = step.src_offset + offset + (step.src_alternates ? block().alternate() : 0);
    const bool signals = (step.option & PROXYCCL_OP_SIGNAL) != 0;
    if ((step.option & PROXYCCL_OP_DATA) && bytes != 0) {
      if (signals)
        channel.putWithSignal(step.dst_memory, dst, step.src_memory, src, bytes);
      else
        channel.put(step.dst_memory, dst, step.src_memory, src, bytes);
    } else if (signals) {
      channel.signal();
    }
    if (!(step.option & PROXYCCL_OP_FLUSH)) return;
    const uint64_t ticket = channel.flushAsync();
    const WaitFor what = {PROXYCCL_WAIT_EXECUTION, channel.peer, step.place, ticket + 1};
    if (ticket != kNoTicket)
      waitUntil(block()->control, what, [&](uint64_t* seen) {
        *seen = loadRelaxedSystem(channel.flushed);
        return channel.isFlushed(ticket);
      });
  }

  PROXYCCL_DEVICE void combine(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    switch (step.option) {
      case PROXYCCL_COMBINE_SUM:
        return combineRanges<T, Sum>(step, offset, bytes);
      case PROXYCCL_COMBINE_PROD:
        return combineRanges<T, Prod>(step, offset, bytes);
      case PROXYCCL_COMBINE_MIN:
        return combineRanges<T, Min>(step, offset, bytes);
      default:
        return combineRanges<T, Max>(step, offset, bytes);
    }
  }
};

template <class T>
PROXYCCL_DEVICE void execute_plan(const ProxycclExecution& execution) {
  PlanBlock::own().load(execution);
  const PlanExecutor<T> executor;
  executor.run();
  executor.finish();
}

}  // namespace proxyccl

// Defines a kernel `name` from the template `kernel` for one element type.
#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                       \
  PROXYCCL_TEAM_KERNEL name(const ProxycclExecution execution) { ::proxyccl::kernel<T>(execution); } \
  PROXYCCL_EXPORT_KERNEL(name)
