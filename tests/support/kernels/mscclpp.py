"""Kernels in MSCCL++'s terms: every header of include/mscclpp and every method in them."""

MSCCLPP_KERNELS = r"""
#include <mscclpp/concurrency.hpp>
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
#include <mscclpp/gpu_data_types.hpp>
#include <mscclpp/memory_channel_device.hpp>
#include <mscclpp/packet_device.hpp>
#include <mscclpp/poll_device.hpp>
#include <mscclpp/port_channel_device.hpp>
#include <mscclpp/semaphore_device.hpp>
#include <mscclpp/switch_channel_device.hpp>

__device__ mscclpp::DeviceSyncer deviceSyncer;
__device__ mscclpp::LL16Packet boxes[8];

MSCCLPP_DEVICE_INLINE uint32_t lane() { return threadIdx.x % WARP_SIZE; }

// Memory channels: data that a peer wrote at 0 is put on at half, and fetched back with the offsets of both sides.
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
  channels[0].get<4, true>(theirs, mine, bytes, threadIdx.x, blockDim.x);
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
  const uint64_t at = fifo.push({mscclpp::TriggerData | mscclpp::TriggerFlag, channel.dst_memory, 0,
                                 channel.src_memory, 0, bytes, channel.channel});
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
"""
