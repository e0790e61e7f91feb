// all_gather and all_to_all of short shares, in packets: one crossing, without a fence and without a signal.
//
// `bytes` is one rank's contribution for one rank. In-place calls are those of moves.h. A thread reads and writes the
// same bytes of every share, so it has sent what it overwrites in place.
#ifndef PROXYCCL_PACKET_MOVES_H
#define PROXYCCL_PACKET_MOVES_H

#include "instance.h"
#include "packets.h"

namespace proxyccl {

PROXYCCL_DEVICE void gatherPackets(const ProxycclPacketTeam& team, const char* in, char* out, uint64_t bytes) {
  PacketLanes lanes(team);
  const bool in_place = in == out + team.rank * bytes;
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint64_t p) { return loadPayload(in, bytes, first + p).pack(); };
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToAll(team.rank, p, load(p)); });
    lanes.forEachPacket([&](uint64_t p) {
      const LL16Packet::Payload own = in_place ? LL16Packet::Payload{} : load(p);
      lanes.receiveFromAll(0, p, own, [&](uint32_t rank, LL16Packet::Payload payload) {
        if (rank == team.rank && in_place) return;
        storePayload(out + rank * bytes, bytes, first + p, PayloadOf<char>::unpack(payload));
      });
    });
  });
}

PROXYCCL_DEVICE void exchangePackets(const ProxycclPacketTeam& team, const char* in, char* out, uint64_t bytes) {
  PacketLanes lanes(team);
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint32_t rank, uint64_t p) { return loadPayload(in + rank * bytes, bytes, first + p).pack(); };
    lanes.forEachPacket(
        [&](uint64_t p) { lanes.sendToEach(team.rank, p, [&](uint32_t peer) { return load(peer, p); }); });
    lanes.forEachPacket([&](uint64_t p) {
      lanes.receiveFromAll(0, p, load(team.rank, p), [&](uint32_t rank, LL16Packet::Payload payload) {
        storePayload(out + rank * bytes, bytes, first + p, PayloadOf<char>::unpack(payload));
      });
    });
  });
}

}  // namespace proxyccl

PROXYCCL_TEAM_KERNEL all_gather_packets(const ProxycclPacketTeam team, const char* in, char* out, uint64_t bytes) {
  proxyccl::gatherPackets(team, in, out, bytes);
}

PROXYCCL_TEAM_KERNEL all_to_all_packets(const ProxycclPacketTeam team, const char* in, char* out, uint64_t bytes) {
  proxyccl::exchangePackets(team, in, out, bytes);
}

PROXYCCL_EXPORT_KERNEL(all_gather_packets)
PROXYCCL_EXPORT_KERNEL(all_to_all_packets)

#endif
