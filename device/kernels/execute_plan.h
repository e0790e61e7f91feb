// execute_plan: the interpreter of execution plans. A block executes the steps of one threadblock of the plan.
//
// Blocks wait for each other (barriers, semaphores, signals), so all must be resident. Threads of a block go through
// the steps without waiting for one another, but for the steps that say so: steps of single threads, such as waits for
// several channels, then overlap.
//
// A wait that fails is not the end of the kernel: it goes on with incomplete data, all its later waits end at once, and
// the CPU raises the error (wait.h).
#ifndef PROXYCCL_EXECUTE_PLAN_H
#define PROXYCCL_EXECUTE_PLAN_H

#include "execution.h"
#include "instance.h"
#include "packets.h"
#include "reduce_ranks.h"

namespace proxyccl {

template <class T>
class PlanExecutor;

// Out of line: they are large, and called from several places.

// Number p of a source's payloads; waits for it if it comes in a packet.
template <class T>
PROXYCCL_OUT_OF_LINE LL16Packet::Payload receivePayload(const PlanExecutor<T>& executor, const ProxycclStep& step,
                                                        uint32_t source, size_t p) {
  const char* from = executor.at(step, source, 0);
  if (!executor.operand(step, source).packets) return reinterpret_cast<const LL16Packet::Payload*>(from)[p];
  const LL16Packet* packet = reinterpret_cast<const LL16Packet*>(from) + p;
  const uint32_t flag = executor.flag();
  LL16Packet::Payload payload{};
  const WaitFor what = {PROXYCCL_WAIT_EXECUTION, PROXYCCL_NO_PEER, step.place, flag};
  waitUntil(executor.control(), what, [&](uint64_t* seen) { return packet->tryRead(flag, &payload, seen); });
  return payload;
}

// Packet by packet: a thread waits for its own packets alone. Loops have no such steps, so there is no offset.
template <class T, class Op>
PROXYCCL_OUT_OF_LINE void combinePackets(const PlanExecutor<T>& executor, const ProxycclStep& step, uint64_t bytes) {
  using Payload = LL16Packet::Payload;
  forEach(bytes / sizeof(Payload), threadIdx.x, blockDim.x, [&](size_t p) {
    Payload payload = receivePayload(executor, step, 0, p);
    if (step.sources > 1) {
      PacketReduction<T, Op> reduction;
      reduction(0, payload);
#pragma unroll 1
      for (uint32_t source = 1; source < step.sources; ++source)
        reduction(source, receivePayload(executor, step, source, p));
      payload = reduction.finish(1).pack();
    }
#pragma unroll 1
    for (uint32_t d = step.sources; d < step.sources + step.destinations; ++d) {
      char* to = executor.at(step, d, 0);
      if (executor.operand(step, d).packets)
        reinterpret_cast<LL16Packet*>(to)[p].write(payload, executor.flag());
      else
        reinterpret_cast<Payload*>(to)[p] = payload;
    }
  });
}

// Combines aligned ranges, but for what is left over by 16 bytes, and returns how many values that were. A source may
// lie behind a link, so a thread has the loads of two sources in flight, and several of each.
template <class T, class Op>
PROXYCCL_DEVICE uint64_t combineAligned([[maybe_unused]] const PlanExecutor<T>& executor,
                                        [[maybe_unused]] const ProxycclStep& step, [[maybe_unused]] uint64_t offset,
                                        [[maybe_unused]] uint64_t count) {
#if PROXYCCL_ON_HOST
  return 0;  // there a thread's values lie side by side
#else
  constexpr uint32_t kWide = 16 / sizeof(T);
  constexpr uint32_t kUnits = sizeof(T) == 1 ? 2 : 4;  // sums of one byte take a register each too
  const uint64_t units = count / kWide;
#pragma unroll 1
  for (uint64_t first = threadIdx.x; first < units; first += static_cast<uint64_t>(kUnits) * blockDim.x) {
    auto inside = [=](uint32_t u) { return first + u * blockDim.x < units; };
    auto at = [&](uint32_t operand) { return reinterpret_cast<Bytes16*>(executor.at(step, operand, offset)) + first; };
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
PROXYCCL_OUT_OF_LINE void combineRanges(const PlanExecutor<T>& executor, const ProxycclStep& step, uint64_t offset,
                                        uint64_t bytes) {
  if (step.packets) return combinePackets<T, Op>(executor, step, bytes);
  bool aligned = true;
#pragma unroll 1
  for (uint32_t i = 0; i < step.sources + step.destinations; ++i)
    aligned = aligned && isAligned16(executor.at(step, i, offset));
  const uint64_t count = bytes / sizeof(T);
  const uint64_t done = aligned ? combineAligned<T, Op>(executor, step, offset, count) : 0;
  reduceRanks<T, Op>(
      step.sources, 1, count - done, false, threadIdx.x, blockDim.x,
      [&](uint32_t source) { return reinterpret_cast<const T*>(executor.at(step, source, offset)) + done; },
      [&](uint64_t i, const auto& values) {
#pragma unroll 1
        for (uint32_t d = step.sources; d < step.sources + step.destinations; ++d)
          values.store(reinterpret_cast<T*>(executor.at(step, d, offset)) + done + i);
      });
}

template <class T>
class PlanExecutor {
 public:
  // Called by the block.
  PROXYCCL_DEVICE explicit PlanExecutor(const ProxycclExecution& execution)
      : execution_(execution),
        begin_(execution.begins[blockIdx.x]),
        end_(execution.begins[blockIdx.x + 1]),
        executions_(loadRelaxedDevice(&execution.counters->executions)),
        steps_(execution.steps + begin_.step),
        operands_(execution.operands + begin_.operand),
        semaphores_(nullptr) {
    alternate_ = executions_ % 2 * execution.alternate_bytes;
    if (end_.step - begin_.step <= kStagedSteps && end_.operand - begin_.operand <= kStagedOperands) stage();
  }

  PROXYCCL_DEVICE void run() const {
    const uint32_t end = end_.step - begin_.step;
    uint32_t i = 0;
    while (i < end) {
      // A step outside of loops is a loop of one turn over all its bytes: `execute` is large, and stands here once.
      const ProxycclStep& first = steps_[i];
      const bool loops = first.code == PROXYCCL_STEP_LOOP;
      const uint32_t begin = loops ? i + 1 : i, count = loops ? first.option : 1;
      const uint64_t unit = loops ? first.unit : first.bytes;
      const uint32_t iterations = loops ? first.iterations : 1;
#pragma unroll 1
      for (uint32_t k = 0; k < iterations; ++k)
#pragma unroll 1
        for (uint32_t s = begin; s < begin + count; ++s) execute(steps_[s], k * unit, unit);
      i = begin + count;
    }
  }

  // The kernel's last use of this object.
  PROXYCCL_DEVICE void finish() const {
    __syncthreads();  // all threads have read the count
    if (threadIdx.x != 0) return;
    ProxycclExecutionCounters* counters = execution_.counters;
    if (fetchAddAcqRelDevice<uint32_t>(&counters->blocks_done, 1) != gridDim.x - 1) return;
    storeRelaxedDevice<uint32_t>(&counters->blocks_done, 0);
    storeRelaxedDevice<uint64_t>(&counters->executions, executions_ + 1);
  }

  // An even number of flags, so that they alternate with the halves of the scratch memory when they wrap. Not 0, which
  // fresh memory holds.
  PROXYCCL_DEVICE uint32_t flag() const { return static_cast<uint32_t>(executions_ % 0xfffffffeu) + 1; }

  PROXYCCL_DEVICE ProxycclControl* control() const { return execution_.control; }
  PROXYCCL_DEVICE const ProxycclOperand& operand(const ProxycclStep& step, uint32_t i) const {
    return operands_[step.first_operand - begin_.operand + i];
  }
  PROXYCCL_DEVICE char* at(const ProxycclStep& step, uint32_t i, uint64_t offset) const {
    const ProxycclOperand& it = operand(step, i);
    char* base = it.base == PROXYCCL_BASE_INPUT    ? execution_.input
                 : it.base == PROXYCCL_BASE_OUTPUT ? execution_.output
                                                   : nullptr;
    return base + it.address + (it.alternates ? alternate_ : 0) + (it.packets ? 2 * offset : offset);
  }

 private:
  static constexpr uint32_t kStagedSteps = 64, kStagedOperands = 128;

  // Copies to shared memory what every step reads: loads from device memory would take longer than short steps, as each
  // acquire empties its cache.
  PROXYCCL_DEVICE void stage() {
    __shared__ ProxycclStep steps[kStagedSteps];
    __shared__ ProxycclOperand operands[kStagedOperands];
    __shared__ ProxycclSemaphore semaphores[kStagedSteps];
    const uint32_t count = end_.step - begin_.step;
    copyBytes(steps, steps_, count * sizeof(ProxycclStep), threadIdx.x, blockDim.x);
    copyBytes(operands, operands_, (end_.operand - begin_.operand) * sizeof(ProxycclOperand), threadIdx.x, blockDim.x);
    __syncthreads();
    forEach(count, threadIdx.x, blockDim.x, [&](size_t i) {
      if (isOnChannel(steps[i])) semaphores[i] = loadSemaphore(steps[i]);
    });
    __syncthreads();
    steps_ = steps;
    operands_ = operands;
    semaphores_ = semaphores;
  }

  static PROXYCCL_DEVICE bool isOnChannel(const ProxycclStep& step) {
    return (step.code >= PROXYCCL_STEP_SIGNAL && step.code <= PROXYCCL_STEP_RELAXED_WAIT) ||
           step.code == PROXYCCL_STEP_PORT_WAIT;
  }
  PROXYCCL_DEVICE ProxycclSemaphore loadSemaphore(const ProxycclStep& step) const {
    return step.code == PROXYCCL_STEP_PORT_WAIT ? execution_.port_channels[step.channel].semaphore
                                                : execution_.memory_channels[step.channel].semaphore;
  }
  PROXYCCL_DEVICE Semaphore semaphoreOf(const ProxycclStep& step) const {
    return {semaphores_ != nullptr ? semaphores_[&step - steps_] : loadSemaphore(step)};
  }

  // Executes a step for `limit` bytes of its data from `offset` on.
  PROXYCCL_DEVICE void execute(const ProxycclStep& step, uint64_t offset, uint64_t limit) const {
    const uint64_t bytes = offset < step.bytes ? minimum(step.bytes - offset, limit) : 0;
    switch (step.code) {
      case PROXYCCL_STEP_SYNC:
        return syncThreadsSystem();
      case PROXYCCL_STEP_BARRIER:
        reinterpret_cast<DeviceSyncer*>(execution_.barriers)[step.channel].sync(static_cast<int>(step.option),
                                                                                execution_.control);
        return;
      case PROXYCCL_STEP_COPY:
        if (bytes != 0) copyBytes(at(step, 1, offset), at(step, 0, offset), bytes, threadIdx.x, blockDim.x);
        return;
      case PROXYCCL_STEP_COMBINE:
        return combine(step, offset, bytes);
      case PROXYCCL_STEP_AWAIT_PACKETS:
        forEach(bytes / sizeof(LL16Packet::Payload), threadIdx.x, blockDim.x,
                [&](size_t p) { receivePayload(*this, step, 0, p); });
        return;
      default:
        if (threadIdx.x == step.thread) executeByOne(step, offset, bytes);
    }
  }

  PROXYCCL_DEVICE void executeByOne(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    switch (step.code) {
      case PROXYCCL_STEP_SIGNAL:
        return semaphoreOf(step).signal();
      case PROXYCCL_STEP_RELAXED_SIGNAL:
        return semaphoreOf(step).relaxedSignal();
      case PROXYCCL_STEP_WAIT:
      case PROXYCCL_STEP_PORT_WAIT:
        semaphoreOf(step).wait(execution_.control, PROXYCCL_WAIT_EXECUTION, step.option, step.place);
        return;
      case PROXYCCL_STEP_RELAXED_WAIT:
        semaphoreOf(step).relaxedWait(execution_.control, PROXYCCL_WAIT_EXECUTION, step.option, step.place);
        return;
      case PROXYCCL_STEP_PORT:
        return push(step, offset, bytes);
      case PROXYCCL_STEP_ACQUIRE:
        semaphore(step)->acquire(execution_.control, {PROXYCCL_WAIT_EXECUTION, PROXYCCL_NO_PEER, step.place, 1});
        return;
      case PROXYCCL_STEP_RELEASE:
        return semaphore(step)->release();
    }
  }

  PROXYCCL_DEVICE DeviceSemaphore* semaphore(const ProxycclStep& step) const {
    return reinterpret_cast<DeviceSemaphore*>(execution_.semaphores) + step.channel;
  }

  // A part of a put that has no bytes still signals and flushes.
  PROXYCCL_DEVICE void push(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    const ProxyChannelDeviceHandle channel{execution_.port_channels[step.channel]};
    const uint64_t dst = step.dst_offset + offset + (step.dst_alternates ? alternate_ : 0);
    const uint64_t src = step.src_offset + offset + (step.src_alternates ? alternate_ : 0);
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
      waitUntil(execution_.control, what, [&](uint64_t* seen) {
        *seen = loadRelaxedSystem(channel.flushed);
        return channel.isFlushed(ticket);
      });
  }

  PROXYCCL_DEVICE void combine(const ProxycclStep& step, uint64_t offset, uint64_t bytes) const {
    switch (step.option) {
      case PROXYCCL_COMBINE_SUM:
        return combineRanges<T, Sum>(*this, step, offset, bytes);
      case PROXYCCL_COMBINE_PROD:
        return combineRanges<T, Prod>(*this, step, offset, bytes);
      case PROXYCCL_COMBINE_MIN:
        return combineRanges<T, Min>(*this, step, offset, bytes);
      default:
        return combineRanges<T, Max>(*this, step, offset, bytes);
    }
  }

  const ProxycclExecution& execution_;
  const ProxycclBlockBegin begin_, end_;
  const uint64_t executions_;
  uint64_t alternate_;
  // This block's, in device memory or staged; without staged semaphores they are those of the channels.
  const ProxycclStep* steps_;
  const ProxycclOperand* operands_;
  const ProxycclSemaphore* semaphores_;
};

template <class T>
PROXYCCL_DEVICE void execute_plan(const ProxycclExecution& execution) {
  const PlanExecutor<T> executor(execution);
  executor.run();
  executor.finish();
}

}  // namespace proxyccl

// A kernel `name` from the template `kernel` for one element type.
#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                       \
  PROXYCCL_TEAM_KERNEL name(const ProxycclExecution execution) { ::proxyccl::kernel<T>(execution); } \
  PROXYCCL_EXPORT_KERNEL(name)

#endif
