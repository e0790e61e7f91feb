// all_gather and all_to_all of short shares, in packets or lines, which need neither fences nor signals.
//
// `bytes` is the size of the data that a rank sends to each rank. A call may be in place as in moves.h: a thread reads
// and writes the same bytes of every share, so it has sent the bytes that it overwrites.
#pragma once

#include "instance.h"
#include "lines.h"

namespace proxyccl {

template <class Form>
PROXYCCL_DEVICE void gatherPackets(const ProxycclPacketTeam& team, const char* in, char* out, uint64_t bytes) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  const bool in_place = in == out + team.rank * bytes;
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint64_t p) { return lanes.load(in, bytes, 0, first + p); };
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToAll(team.rank, p, load(p)); });
    lanes.forEachPacket([&](uint64_t p) {
      const Payload own = in_place ? Payload{} : load(p);
      lanes.receiveFromAll(0, p, own, [&](uint32_t rank, const Payload& payload) {
        if (rank == team.rank && in_place) return;
        lanes.store(out + rank * bytes, bytes, 0, first + p, payload);
      });
    });
  });
}

template <class Form>
PROXYCCL_DEVICE void exchangePackets(const ProxycclPacketTeam& team, const char* in, char* out, uint64_t bytes) {
  Lanes<Form> lanes(team);
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint32_t rank, uint64_t p) { return lanes.load(in + rank * bytes, bytes, 0, first + p); };
    lanes.forEachPacket(
        [&](uint64_t p) { lanes.sendToEach(team.rank, p, [&](uint32_t peer) { return load(peer, p); }); });
    lanes.forEachPacket([&](uint64_t p) {
      lanes.receiveFromAll(0, p, load(team.rank, p), [&](uint32_t rank, const typename Form::Payload& payload) {
        lanes.store(out + rank * bytes, bytes, 0, first + p, payload);
      });
    });
  });
}

}  // namespace proxyccl

#define PROXYCCL_PACKET_MOVE(name, move, Form)                                                          \
  PROXYCCL_TEAM_KERNEL name(const ProxycclPacketTeam team, const char* in, char* out, uint64_t bytes) { \
    proxyccl::move<proxyccl::Form>(team, in, out, bytes);                                               \
  }                                                                                                     \
  PROXYCCL_EXPORT_KERNEL(name)
PROXYCCL_PACKET_MOVE(all_gather_packets, gatherPackets, PacketForm)
PROXYCCL_PACKET_MOVE(all_gather_lines, gatherPackets, LineForm)
PROXYCCL_PACKET_MOVE(all_to_all_packets, exchangePackets, PacketForm)
PROXYCCL_PACKET_MOVE(all_to_all_lines, exchangePackets, LineForm)
