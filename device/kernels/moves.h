// The kernels of all_gather, all_to_all, broadcast and barrier, which move bytes without regard to element types.
//
// `bytes` is the size of the data that a rank sends to each rank. A call is in place, as in NCCL, if in = out + rank *
// bytes for all_gather, or in = out for all_to_all and broadcast.
//
// If all ranks' outputs are mapped (outputs.h), a rank stores its data directly in the outputs. The ranks then
// synchronize at the beginning, because an output may be written only when its rank's kernel runs, and again at the
// end. If some output is not mapped, lanes send through scratch memory, in pieces that fit their slots, and every rank
// runs the same number of rounds.
#pragma once

#include "exchange.h"
#include "instance.h"
#include "outputs.h"

namespace proxyccl {

// Called by all threads: synchronizes the ranks, and returns whether all outputs are mapped. A rank whose own output is
// not mapped returns false without waiting.
PROXYCCL_DEVICE bool meet(const ProxycclTeam& team, Exchange& exchange, const Outputs& outputs) {
  if (!team.meet) return false;
  outputs.tell();
  exchange.post();
  if (!outputs.ownIsReached()) {
    outputs.ignore();
    exchange.oweAwait();
    return false;
  }
  exchange.await();
  return outputs.learn();
}

PROXYCCL_DEVICE void takeInboxes(const ProxycclTeam& team, const Exchange& exchange, char* out, uint64_t bytes,
                                 uint64_t offset, uint64_t size) {
  for (uint32_t i = 1; i < team.world_size; ++i) {
    const uint32_t peer = (team.rank + i) % team.world_size;
    exchange.copy(out + peer * bytes + offset, exchange.inbox(peer), size);
  }
}

}  // namespace proxyccl

PROXYCCL_TEAM_KERNEL all_gather(const ProxycclTeam team, const char* in, char* out, uint64_t bytes) {
  using namespace proxyccl;
  Exchange exchange(team);
  const Outputs outputs(team);
  const uint32_t rank = team.rank, ranks = team.world_size;
  char* const own = out + rank * bytes;
  if (meet(team, exchange, outputs)) {
    exchange.forLanePart(bytes, [&](uint64_t offset, uint64_t size) {
      for (uint32_t i = 1; i < ranks; ++i)
        exchange.copy(outputs.of((rank + i) % ranks) + rank * bytes + offset, in + offset, size);
      if (own != in) exchange.copy(own + offset, in + offset, size);
    });
    exchange.swap();
  } else {
    exchange.forEachRound(
        bytes, 1,
        [&](uint64_t offset, uint64_t size) {
          for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in + offset, size);
          if (own != in) exchange.copy(own + offset, in + offset, size);
        },
        [&](uint64_t offset, uint64_t size) { takeInboxes(team, exchange, out, bytes, offset, size); });
  }
  exchange.finish();
}

// An in-place call stores nothing directly to peers, because each output is also an input that its rank still reads.
PROXYCCL_TEAM_KERNEL all_to_all(const ProxycclTeam team, const char* in, char* out, uint64_t bytes) {
  using namespace proxyccl;
  Exchange exchange(team);
  const Outputs outputs(team);
  const uint32_t rank = team.rank, ranks = team.world_size;
  if (meet(team, exchange, outputs)) {
    // Copies one piece for each rank in turn, including this rank: if this rank's own data, which crosses no link, were
    // copied at the end, the links would be idle during that time.
    constexpr uint64_t kPiece = 64 * 1024;
    exchange.forLanePart(bytes, [&](uint64_t begin, uint64_t size) {
      for (uint64_t offset = begin; offset < begin + size; offset += kPiece) {
        const uint64_t length = minimum(kPiece, begin + size - offset);
        for (uint32_t i = 1; i < ranks; ++i) {
          const uint32_t peer = (rank + i) % ranks;
          exchange.copy(outputs.of(peer) + rank * bytes + offset, in + peer * bytes + offset, length);
        }
        exchange.copy(out + rank * bytes + offset, in + rank * bytes + offset, length);
      }
    });
    exchange.swap();
  } else {
    exchange.forEachRound(
        bytes, 1,
        [&](uint64_t offset, uint64_t size) {
          for (uint32_t i = 1; i < ranks; ++i) {
            const uint32_t peer = (rank + i) % ranks;
            exchange.send(peer, in + peer * bytes + offset, size);
          }
          if (out != in) exchange.copy(out + rank * bytes + offset, in + rank * bytes + offset, size);
        },
        [&](uint64_t offset, uint64_t size) { takeInboxes(team, exchange, out, bytes, offset, size); });
  }
  exchange.finish();
}

PROXYCCL_TEAM_KERNEL broadcast(const ProxycclTeam team, const char* in, char* out, uint64_t bytes, uint32_t root) {
  using namespace proxyccl;
  Exchange exchange(team);
  const Outputs outputs(team);
  const uint32_t rank = team.rank, ranks = team.world_size;
  if (meet(team, exchange, outputs)) {
    exchange.forLanePart(bytes, [&](uint64_t offset, uint64_t size) {
      if (rank != root) return;
      for (uint32_t i = 1; i < ranks; ++i) exchange.copy(outputs.of((rank + i) % ranks) + offset, in + offset, size);
      if (out != in) exchange.copy(out + offset, in + offset, size);
    });
    exchange.swap();
  } else {
    exchange.forEachRound(
        bytes, 1,
        [&](uint64_t offset, uint64_t size) {
          if (rank != root) return;
          for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in + offset, size);
          if (out != in) exchange.copy(out + offset, in + offset, size);
        },
        [&](uint64_t offset, uint64_t size) {
          if (rank != root) exchange.copy(out + offset, exchange.inbox(root), size);
        });
  }
  exchange.finish();
}

PROXYCCL_TEAM_KERNEL barrier(const ProxycclTeam team) {
  proxyccl::Exchange exchange(team);
  exchange.swap();
  exchange.finish();
}

PROXYCCL_EXPORT_KERNEL(all_gather)
PROXYCCL_EXPORT_KERNEL(all_to_all)
PROXYCCL_EXPORT_KERNEL(broadcast)
PROXYCCL_EXPORT_KERNEL(barrier)
