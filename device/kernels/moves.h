// all_gather, all_to_all, broadcast and barrier: bytes are moved, none is looked at.
//
// Each lane takes its part, in pieces that fit its slots; `bytes` is what one rank contributes for one rank. Every
// rank runs the same number of rounds. In-place calls are those of NCCL: all_gather with in = out + rank * bytes,
// all_to_all and broadcast with in = out.
#ifndef PROXYCCL_MOVES_H
#define PROXYCCL_MOVES_H

#include "exchange.h"
#include "instance.h"

PROXYCCL_TEAM_KERNEL all_gather(ProxycclTeam* team, const char* in, char* out, uint64_t bytes) {
  using namespace proxyccl;
  Exchange exchange(team);
  gatherBytes(exchange, team, in, out, bytes);
  exchange.finish();
}

PROXYCCL_TEAM_KERNEL all_to_all(ProxycclTeam* team, const char* in, char* out, uint64_t bytes) {
  using namespace proxyccl;
  Exchange exchange(team);
  const uint32_t rank = team->rank, ranks = team->world_size;
  exchange.forEachPiece(bytes, 1, [&](uint64_t offset, uint64_t size) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.send(peer, in + peer * bytes + offset, size);
    }
    if (out != in) exchange.copy(out + rank * bytes + offset, in + rank * bytes + offset, size);
    exchange.swap();
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.copy(out + peer * bytes + offset, exchange.inbox(peer), size);
    }
  });
  exchange.finish();
}

PROXYCCL_TEAM_KERNEL broadcast(ProxycclTeam* team, const char* in, char* out, uint64_t bytes, uint32_t root) {
  using namespace proxyccl;
  Exchange exchange(team);
  const uint32_t rank = team->rank, ranks = team->world_size;
  exchange.forEachPiece(bytes, 1, [&](uint64_t offset, uint64_t size) {
    if (rank == root) {
      for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in + offset, size);
      if (out != in) exchange.copy(out + offset, in + offset, size);
    }
    exchange.swap();
    if (rank != root) exchange.copy(out + offset, exchange.inbox(root), size);
  });
  exchange.finish();
}

PROXYCCL_TEAM_KERNEL barrier(ProxycclTeam* team) {
  proxyccl::Exchange exchange(team);
  exchange.swap();
  exchange.finish();
}

PROXYCCL_EXPORT_KERNEL(all_gather)
PROXYCCL_EXPORT_KERNEL(all_to_all)
PROXYCCL_EXPORT_KERNEL(broadcast)
PROXYCCL_EXPORT_KERNEL(barrier)

#endif
