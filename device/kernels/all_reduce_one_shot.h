// One-shot all-reduce with packets, for small messages: every rank sends all it has to every other, and each reduces
// for itself.
//
// One crossing of the link, (n-1) times the bytes. Each rank reduces in rank order, so all get the same bits.
//
// A packet slot is reused two epochs later. From kernel to kernel that is safe because a rank that has finished epoch
// e + 1 has packets of that epoch from every peer, and a peer sends those only when its kernel of epoch e has ended.
// Inside a kernel the same holds for each thread and its counterpart, which reads and sends the same pieces in every
// epoch: a short last one is padded, or a rank could finish the kernel while a thread that has no piece in it still reads
// the epoch before at a peer, and overwrite that with its next kernel.
#ifndef PROXYCCL_ALL_REDUCE_ONE_SHOT_H
#define PROXYCCL_ALL_REDUCE_ONE_SHOT_H

#include "packets.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_one_shot(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  using A = typename Element<T>::Accumulator;
  constexpr uint32_t kPerPacket = PayloadOf<T>::kCount;
  const uint32_t rank = team->rank, ranks = team->world_size;
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  PacketLanes lanes(team, ranks);
  const uint64_t packets = (count + kPerPacket - 1) / kPerPacket;
  auto load = [&](uint64_t packet) {
    PayloadOf<T> payload{};
    for (uint32_t k = 0; k < kPerPacket; ++k)
      if (packet * kPerPacket + k < count) payload.values[k] = in[packet * kPerPacket + k];
    return payload;
  };

  const uint64_t span = lanes.packetsPerEpoch(packets);
  for (uint64_t first = 0; first < packets; first += span) {
    for (uint32_t i = 1; i < ranks; ++i) {
      LL16Packet* remote = lanes.remote((rank + i) % ranks, rank);
      forEach(span, thread, threads, [&](uint64_t p) { remote[p].write(load(first + p).pack(), lanes.flag()); });
    }
    forEach(span, thread, threads, [&](uint64_t p) {
      A sums[kPerPacket] = {};
      for (uint32_t source = 0; source < ranks; ++source) {
        const PayloadOf<T> payload =
            source == rank
                ? load(first + p)
                : PayloadOf<T>::unpack(readPacket(&lanes.local(source)[p], lanes.flag(), team->control, source));
        for (uint32_t k = 0; k < kPerPacket; ++k) {
          const A value = Element<T>::widen(payload.values[k]);
          sums[k] = source == 0 ? value : Op::combine(sums[k], value);
        }
      }
      for (uint32_t k = 0; k < kPerPacket; ++k)
        if ((first + p) * kPerPacket + k < count)
          out[(first + p) * kPerPacket + k] = Element<T>::narrow(Op::finish(sums[k], ranks));
    });
    lanes.nextEpoch();
  }
  lanes.finish();
}

}  // namespace proxyccl

#endif
