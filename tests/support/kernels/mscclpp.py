"""Kernels with MSCCL++'s API: they include every header of include/mscclpp and call every method in them."""

MSCCLPP_KERNELS = r"""
#include <mscclpp/algorithm.hpp>
#include <mscclpp/bulk_device.hpp>
#include <mscclpp/concurrency.hpp>
#include <mscclpp/core.hpp>
#include <mscclpp/fifo.hpp>
#include <mscclpp/memory_channel.hpp>
#include <mscclpp/nvls_device.hpp>
#include <mscclpp/packet.hpp>
#include <mscclpp/poll.hpp>
#include <mscclpp/port_channel.hpp>
#include <mscclpp/proxy_channel.hpp>
#include <mscclpp/proxy_channel_device.hpp>
#include <mscclpp/semaphore.hpp>
#include <mscclpp/sm_channel.hpp>
#include <mscclpp/sm_channel_device.hpp>
#include <mscclpp/switch_channel.hpp>
#include <mscclpp/assert_device.hpp>
#include <mscclpp/atomic_device.hpp>
#include <mscclpp/concurrency_device.hpp>
#include <mscclpp/copy_device.hpp>
#include <mscclpp/fifo_device.hpp>
#include <mscclpp/gpu.hpp>
#include <mscclpp/gpu_data_types.hpp>
#include <mscclpp/gpu_utils.hpp>
#include <mscclpp/memory_channel_device.hpp>
#include <mscclpp/packet_device.hpp>
#include <mscclpp/poll_device.hpp>
#include <mscclpp/port_channel_device.hpp>
#include <mscclpp/semaphore_device.hpp>
#include <mscclpp/switch_channel_device.hpp>
#include <mscclpp/utils.hpp>

__device__ mscclpp::DeviceSyncer deviceSyncer;
__device__ mscclpp::LL16Packet boxes[8];

MSCCLPP_DEVICE_INLINE uint32_t lane() { return threadIdx.x % WARP_SIZE; }

// Memory channels: data that a peer wrote at 0 is put on at half, and fetched back to an offset of its own.
extern "C" __global__ void memory_put(mscclpp::DeviceHandle<mscclpp::MemoryChannel>* channels, uint64_t half) {
  mscclpp::MemoryChannelDeviceHandle& channel = channels[0];
  channel.put<16, true>(half, 0, half, threadIdx.x, blockDim.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    channel.signal();
    channel.wait();
    channel.relaxedSignal();
    channel.relaxedWait(-1);
  }
}
extern "C" __global__ void memory_get(mscclpp::SmChannelDeviceHandle* channels, uint64_t theirs, uint64_t mine,
                                      uint64_t bytes) {
  channels[0].get<4, true>(mine, theirs, bytes, threadIdx.x, blockDim.x);
}
extern "C" __global__ void memory_elements(mscclpp::DeviceHandle<mscclpp::MemoryChannel> channel, int* out) {
  channel.write<int>(threadIdx.x, 100 + threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    channel.semaphore_.signal();
    channel.semaphore_.wait();
    while (false) channel.poll();
  }
  __syncthreads();
  out[threadIdx.x] = channel.read<int>(threadIdx.x) + static_cast<int*>(channel.src_)[threadIdx.x];
  mscclpp::copy<8>(static_cast<char*>(channel.dst_) + 128, channel.src_, 64, threadIdx.x, blockDim.x);
}
template <class Packet>
__device__ void exchange(mscclpp::MemoryChannelDeviceHandle& channel, uint64_t at, uint64_t bytes, uint32_t flag) {
  channel.putPackets<Packet>(at, 0, bytes, threadIdx.x, blockDim.x, flag);
  channel.unpackPackets<Packet>(at, bytes, bytes, threadIdx.x, blockDim.x, flag);
}
extern "C" __global__ void memory_packets(mscclpp::MemoryChannelDeviceHandle* channels, uint64_t at, uint64_t bytes,
                                          uint32_t flag, uint2* first) {
  exchange<mscclpp::LL16Packet>(channels[0], at, bytes, flag);
  const uint64_t behind = at + 2 * bytes;
  exchange<mscclpp::LL8Packet>(channels[0], behind, bytes, flag);
  channels[0].getPackets<mscclpp::LL8Packet>(behind, bytes, bytes, threadIdx.x, blockDim.x, flag);
  __syncthreads();
  if (threadIdx.x == 0) *first = channels[0].unpackPacket(at / sizeof(mscclpp::LL16Packet), flag);
}

// Port channels.
extern "C" __global__ void port_put(mscclpp::DeviceHandle<mscclpp::PortChannel>* channels, uint64_t half) {
  if (threadIdx.x != 0) return;
  mscclpp::PortChannelDeviceHandle& channel = channels[0];
  channel.put(half, 0, half);
  channel.signal();
  channel.flush(-1);
  channel.wait(1000);
  channel.putWithSignal(0, 0);
  channel.wait();
  channel.putWithSignalAndFlush(half, 0, half);
  while (!channel.poll()) {}
}
extern "C" __global__ void base_port_put(mscclpp::DeviceHandle<mscclpp::BasePortChannel>* channels,
                                         mscclpp::MemoryId to, mscclpp::MemoryId from, uint64_t bytes) {
  if (threadIdx.x != 0) return;
  channels[0].put(to, 0, from, 0, bytes);
  channels[0].putWithSignal(to, from, bytes, bytes);
  channels[0].wait();
  channels[0].putWithSignalAndFlush(to, from, 0, bytes);
  channels[0].wait();
}
extern "C" __global__ void raw_trigger(mscclpp::PortChannelDeviceHandle channel, mscclpp::FifoDeviceHandle fifo,
                                       uint64_t bytes) {
  const uint64_t at = fifo.push({mscclpp::TriggerData | mscclpp::TriggerFlag, channel.dst_, 0,
                                 channel.src_, 0, bytes, channel.semaphoreId_});
  fifo.sync(at);
  channel.wait();
}

// One grid.
extern "C" __global__ void grid(int* out, mscclpp::DeviceSemaphore* semaphore, uint32_t* word) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = lane();
  deviceSyncer.sync(gridDim.x, -1);
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    mscclpp::atomicStore<uint32_t, mscclpp::scopeDevice>(word, 5u, mscclpp::memoryOrderSeqCst);
    mscclpp::atomicFetchAdd<uint32_t, mscclpp::scopeDevice>(word, 2u, mscclpp::memoryOrderRelease);
    semaphore->release();
  }
  if (threadIdx.x == 0 && blockIdx.x == 1) {
    semaphore->acquire();
    POLL_MAYBE_JAILBREAK((mscclpp::atomicLoad<uint32_t, mscclpp::scopeDevice>(word, mscclpp::memoryOrderAcquire) != 7),
                         1000);
    OR_POLL_MAYBE_JAILBREAK((*word == 0), (*word == 1), 1000);
    MSCCLPP_ASSERT_DEVICE(*word == 7, "both sums have come");
    mscclpp::f32x4 a, b;
    for (int i = 0; i < a.Size; ++i) a[i] = b[i] = i;
    mscclpp::f16x2 halves = mscclpp::bit_cast<mscclpp::f16x2>(0x3c003c00u);
    halves = halves + halves;
    out[0] = static_cast<int>((a + b)[3]);
    out[1] = halves.words[0] == 0x40004000u;
    const int4 wide = make_int4(1, 2, 3, 4);
    out[2] = wide.w;
  }
}
extern "C" __global__ void packets(uint2* out) {
  boxes[threadIdx.x].write(threadIdx.x, 1, 9);
  out[threadIdx.x] = boxes[threadIdx.x].read(9);
  uint2 again;
  if (boxes[threadIdx.x].readOnce(9, again)) out[threadIdx.x].x = 1000;
  boxes[threadIdx.x].clear();
  if (!boxes[threadIdx.x].readOnce(9, again)) out[threadIdx.x].x = 1001;
  __syncshm();
}

// Several threads and blocks use a channel at once: each signals, waits and polls.
extern "C" __global__ void memory_at_once(mscclpp::MemoryChannelDeviceHandle* channels) {
  channels[0].signal();
  channels[0].wait();
  channels[0].relaxedSignal();
  channels[0].relaxedWait();
  channels[0].signal();
  while (!channels[0].poll()) {}
}
extern "C" __global__ void port_at_once(mscclpp::PortChannelDeviceHandle* channels) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  channels[0].putWithSignalAndFlush(4 * thread, 4);
  channels[0].wait();
  channels[0].signal();
  while (!channels[0].poll()) {}
}

// One thread's part of a call.
extern "C" __global__ void one_part(mscclpp::MemoryChannelDeviceHandle channel, int call, uint64_t to, uint64_t from,
                                    uint64_t bytes, uint32_t thread, uint32_t threads) {
  if (call == 0) channel.put<4>(to, from, bytes, thread, threads);
  if (call == 1) channel.put<8>(to, from, bytes, thread, threads);
  if (call == 2) channel.put(to, from, bytes, thread, threads);
  if (call == 3) channel.put<32, false>(to, from, bytes, thread, threads);
  if (call == 4) channel.get<8>(to, from, bytes, thread, threads);
  if (call == 5) channel.putPackets(to, from, bytes, thread, threads, 7);
  if (call == 6) channel.putPackets<mscclpp::LL8Packet>(to, from, bytes, thread, threads, 7);
  if (call == 7) channel.unpackPackets<mscclpp::LL8Packet>(from, to, bytes, thread, threads, 7);
  if (call == 8) {
    char* base = static_cast<char*>(channel.src_);
    mscclpp::copyToPackets(base + to, base + from, bytes, thread, threads, 7);
  }
}

// Semaphores and rings by themselves, as arguments.
extern "C" __global__ void semaphores(mscclpp::DeviceHandle<mscclpp::MemoryDevice2DeviceSemaphore>* of_ranks,
                                      int rank, int ranks) {
  const int peer = threadIdx.x;
  if (peer >= ranks || peer == rank) return;
  of_ranks[peer].signal();
  of_ranks[peer].wait();
}
extern "C" __global__ void ring_and_semaphore(mscclpp::FifoDeviceHandle fifo,
                                              mscclpp::Host2DeviceSemaphoreDeviceHandle semaphore, uint32_t id,
                                              uint64_t* out) {
  mscclpp::ProxyTrigger trigger(mscclpp::TriggerFlag, 0, 0, 0, 0, 0, id);
  out[0] = trigger.fields.type == mscclpp::TriggerFlag && trigger.fields.semaphoreId == id;
  const uint64_t place = fifo.push(trigger, -1);
  while (!fifo.poll(place)) {}
  const uint64_t number = semaphore.incExpectedInbound();
  POLL_MAYBE_JAILBREAK(semaphore.loadInbound() < number, -1);
  out[1] = *semaphore.inboundToken - *semaphore.expectedInboundToken + semaphore.loadExpectedInbound() - number;
  out[2] = fifo.size == 1 << fifo.sizeShift && fifo.sizeMask + 1 == static_cast<uint64_t>(fifo.size);
}

// What else kernels name: members, element types and vectors.
extern "C" __global__ void members(mscclpp::MemoryChannelDeviceHandle memory, mscclpp::PortChannelDeviceHandle port,
                                   float* out) {
  using namespace mscclpp;
  MemoryChannelDeviceHandle made(memory.semaphore_, memory.dst_, memory.src_, nullptr);
  made.write<float>(0, 2.5f);
  out[0] = static_cast<float*>(made.dst_)[0];
  out[1] = port.semaphoreId_ == port.ours().channel && port.dst_ == port.ours().dst_memory &&
           port.src_ == port.ours().src_memory && port.fifo_.triggers == (void*)port.ours().fifo.slots &&
           port.flushDonePos_ == port.ours().flushed && port.semaphore_.inboundToken == port.ours().semaphore.inbound;
  f16x2 big;
  big[0] = 60000.0f;
  big[1] = 1.5f;
  const f16x2 clipped = big + big;
  out[2] = static_cast<float>(clipped[0]);
  out[3] = static_cast<float>(clipped[1]);
  out[4] = static_cast<float>(mscclpp::min(big, clipped)[0]);
  u8x4 bytes;
  for (int i = 0; i < u8x4::Size; ++i) bytes[i] = static_cast<uint8_t>(200 + i);
  out[5] = (bytes + bytes).words[0] == 0x96949290u;
  f32x4 floats(make_float4(1, 2, 3, 4));
  out[6] = to<i32x4>(floats)[3] + floats.storage.y;
  f8_e4m3x4 narrow = to<f8_e4m3x4>(floats);
  out[7] = static_cast<float>((narrow + narrow)[3]);
  out[8] = static_cast<float>(__fp8_e4m3b15(1.75f)) + static_cast<float>(__fp8_e4m3b15::fromRaw(0x7f));
  f32x16 wide;
  f16x16 halves;
  bf16x8 bfloats;
  f8_e5m2x16 narrower;
  wide[15] = halves[15] = bfloats[7] = narrower[15] = 3;
  out[9] = wide[15] + static_cast<float>(halves[15]);
  out[9] += static_cast<float>(bfloats[7]) + static_cast<float>(narrower[15]);
  Words<32> words;
  words[7] = static_cast<uint32_t>(DataType::BFLOAT16) + static_cast<uint32_t>(ReduceOp::MIN);
  out[10] = words[7] + MSCCLPP_BULK_AVAILABLE;
  LL16Packet packet;
  packet.raw_.x = 5;
  out[11] = packet.data1;
  copy<32>(out + 16, out, 48, 0, 1);
  while (false) {
    detail::waitFlush(port.flushDonePos_, 0, -1);
    port.fifo_.push({TriggerData | TriggerFlag, 0, 0, 0, 0, 4, 1});
  }
}
"""
