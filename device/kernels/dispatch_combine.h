// MoE dispatch and combine: rows travel to the ranks of their experts, and come back to be summed.
//
// expert_route sorts this rank's slots by expert, tells all ranks how many rows go where, and fills the tables of
// routing.h; it is the only kernel that counts. expert_dispatch and expert_collect are each other's mirror image: both
// ends of a stream know its length and order from the tables, so messages hold nothing but rows. expert_combine sums
// what expert_collect has brought back.
#ifndef PROXYCCL_DISPATCH_COMBINE_H
#define PROXYCCL_DISPATCH_COMBINE_H

#include "exchange.h"
#include "instance.h"
#include "routing.h"

namespace proxyccl {

// A run of consecutive elements for each caller.
struct Run {
  uint32_t begin, end;
  PROXYCCL_DEVICE Run(uint32_t n, uint32_t thread, uint32_t threads)
      : begin(static_cast<uint64_t>(n) * thread / threads), end(static_cast<uint64_t>(n) * (thread + 1) / threads) {}
};

// Calls body(i, lane, lanes) for each i < n, a row of memory that `lanes` neighbouring threads copy together. On a CPU
// it is one: a fiber copies a whole row faster than many do bits of it.
template <class Body>
PROXYCCL_DEVICE void forEachRow(size_t n, uint32_t thread, uint32_t threads, Body body) {
  constexpr uint32_t kLanes = PROXYCCL_ON_HOST ? 1 : 32;
  const uint32_t lane = thread % kLanes;
  forEach(n, thread / kLanes, threads / kLanes, [&](size_t i) { body(i, lane, kLanes); });
}

// By one block: out[i] = in[0] + … + in[i - 1], for i from 0 to n. `in` may be `out`.
PROXYCCL_DEVICE void exclusiveScan(const uint32_t* in, uint32_t* out, uint32_t n) {
  __shared__ uint32_t sums[1024];  // the most threads in a block of any target
  const Run run(n, threadIdx.x, blockDim.x);
  uint32_t sum = 0;
  for (uint32_t i = run.begin; i < run.end; ++i) sum += in[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before = 0;
    for (uint32_t t = 0; t < blockDim.x; ++t) {
      const uint32_t own = sums[t];
      sums[t] = before;
      before += own;
    }
    out[n] = before;
  }
  __syncthreads();
  uint32_t before = sums[threadIdx.x];
  for (uint32_t i = run.begin; i < run.end; ++i) {
    const uint32_t own = in[i];
    out[i] = before;
    before += own;
  }
  __syncthreads();
}

// The tables, as seen from one rank.
class Routes {
 public:
  PROXYCCL_DEVICE Routes(const ProxycclTeam* team, const ProxycclRouting* routing)
      : routing_(*routing), rank_(team->rank), ranks_(team->world_size) {}

  PROXYCCL_DEVICE uint32_t experts() const { return ranks_ * routing_.experts_per_rank; }
  PROXYCCL_DEVICE uint32_t* countsOf(uint32_t rank) const { return routing_.counts + rank * (experts() + 1); }

  PROXYCCL_DEVICE uint32_t sentTo(uint32_t peer) const { return span(routing_.departures, peer); }
  PROXYCCL_DEVICE uint32_t receivedFrom(uint32_t peer) const { return span(routing_.arrivals, peer); }
  PROXYCCL_DEVICE uint32_t slotOf(uint32_t peer, uint32_t row) const {
    return routing_.slots[routing_.departures[peer * routing_.experts_per_rank] + row];
  }
  PROXYCCL_DEVICE uint32_t outputRowOf(uint32_t peer, uint32_t row) const {
    return routing_.rows[routing_.arrivals[peer * routing_.experts_per_rank] + row];
  }

  // By one block, which owns all of `tally`: this rank's row of `counts`, `departures`, `slots` and `positions`. A
  // stable counting sort: each thread takes a run of the slots, first counts, then places them.
  PROXYCCL_DEVICE void sortSlots(const int32_t* expert_ids, uint32_t slots) const {
    const uint32_t experts = this->experts();
    const Run run(slots, threadIdx.x, blockDim.x);
    uint32_t* own = countsOf(rank_);
    uint32_t* tally = routing_.tally + threadIdx.x * experts;
    for (uint32_t e = 0; e < experts; ++e) tally[e] = 0;
    if (threadIdx.x == 0) own[experts] = PROXYCCL_NO_SLOT;
    __syncthreads();
    for (uint32_t slot = run.begin; slot < run.end; ++slot) {
      const uint32_t expert = static_cast<uint32_t>(expert_ids[slot]);
      if (expert < experts) ++tally[expert];
      if (expert > experts) atomicMin(&own[experts], slot);
    }
    __syncthreads();
    forEach(experts, threadIdx.x, blockDim.x, [&](size_t e) {
      uint32_t before = 0;
      for (uint32_t t = 0; t < blockDim.x; ++t) {
        uint32_t* entry = routing_.tally + t * experts + e;
        const uint32_t count = *entry;
        *entry = before;
        before += count;
      }
      own[e] = before;
    });
    __syncthreads();
    exclusiveScan(own, routing_.departures, experts);
    for (uint32_t slot = run.begin; slot < run.end; ++slot) {
      const uint32_t expert = static_cast<uint32_t>(expert_ids[slot]);
      uint32_t position = PROXYCCL_NO_SLOT;
      if (expert < experts) {
        position = routing_.departures[expert] + tally[expert]++;
        routing_.slots[position] = slot;
      }
      routing_.positions[slot] = position;
    }
  }

  // By one block, when `counts` is complete: the other tables.
  PROXYCCL_DEVICE void layOutRows(uint32_t* longest) const {
    const uint32_t experts = this->experts(), per_rank = routing_.experts_per_rank;
    auto arriving = [&](uint32_t source, uint32_t e) { return countsOf(source)[rank_ * per_rank + e]; };
    if (threadIdx.x == 0) *longest = 0;
    forEach(experts, threadIdx.x, blockDim.x, [&](size_t i) {
      routing_.arrivals[i] = arriving(i / per_rank, i % per_rank);
      routing_.groups[i] = arriving(i % ranks_, i / ranks_);
    });
    __syncthreads();
    exclusiveScan(routing_.arrivals, routing_.arrivals, experts);
    exclusiveScan(routing_.groups, routing_.groups, experts);
    forEachRow(experts, threadIdx.x, blockDim.x, [&](size_t i, uint32_t lane, uint32_t lanes) {
      const uint32_t source = i / per_rank, e = i % per_rank;
      const uint32_t group = routing_.groups[e * ranks_ + source], first = routing_.arrivals[i];
      for (uint32_t row = lane; row < arriving(source, e); row += lanes) routing_.rows[first + row] = group + row;
    });
    forEach(ranks_ * ranks_, threadIdx.x, blockDim.x, [&](size_t i) {
      const uint32_t source = i / ranks_, peer = i % ranks_;
      if (source == peer) return;
      uint32_t rows = 0;
      for (uint32_t e = 0; e < per_rank; ++e) rows += countsOf(source)[peer * per_rank + e];
      atomicMax(longest, rows);
    });
  }

 private:
  PROXYCCL_DEVICE uint32_t span(const uint32_t* first, uint32_t peer) const {
    return first[(peer + 1) * routing_.experts_per_rank] - first[peer * routing_.experts_per_rank];
  }

  const ProxycclRouting routing_;
  const uint32_t rank_, ranks_;
};

// Moves streams of rows between all pairs of ranks. A row that is longer than a slot of the exchange is cut into
// segments; otherwise a segment is a row. Every rank knows the longest stream, so all make as many rounds.
//   rows_to(peer), rows_from(peer)                    the lengths of the streams
//   put(to, peer, row, column, bytes, lane, lanes)    writes bytes [column, column + bytes) of a row for `peer`
//   take(from, peer, row, column, bytes, lane, lanes) the same for what has come
template <class RowsTo, class RowsFrom, class Put, class Take>
PROXYCCL_DEVICE void exchangeRows(ProxycclTeam* team, uint64_t row_bytes, uint64_t longest, RowsTo rows_to,
                                  RowsFrom rows_from, Put put, Take take) {
  Exchange exchange(team);
  const uint32_t rank = team->rank, ranks = team->world_size;
  const uint64_t segment = minimum(row_bytes, exchange.slotBytes());
  const uint64_t per_row = (row_bytes + segment - 1) / segment;
  const uint64_t share = (longest * per_row + exchange.lane().count() - 1) / exchange.lane().count();
  // Calls body(offset in the slot, row, column, bytes, …) for those of segments [offset, offset + n) that a stream of
  // `rows` rows has. Returns the bytes of the slot that they take.
  auto forEachSegment = [&](uint64_t rows, uint64_t offset, uint64_t n, auto&& body) {
    const uint64_t begin = minimum(offset, rows * per_row), end = minimum(offset + n, rows * per_row);
    forEachRow(end - begin, exchange.lane().thread(), exchange.lane().threads(),
               [&](uint64_t i, uint32_t lane, uint32_t lanes) {
                 const uint64_t row = (begin + i) / per_row, column = (begin + i) % per_row * segment;
                 body(i * segment, row, column, minimum(segment, row_bytes - column), lane, lanes);
               });
    return (end - begin) * segment;
  };
  exchange.forEachPiece(
      longest * per_row, minimum(share, exchange.slotBytes() / segment), [&](uint64_t offset, uint64_t n) {
        for (uint32_t i = 1; i < ranks; ++i) {
          const uint32_t peer = (rank + i) % ranks;
          char* slot = exchange.outbox(peer);
          auto fill = [&](uint64_t at, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane, uint32_t lanes) {
            put(slot + at, peer, row, column, bytes, lane, lanes);
          };
          exchange.announce(peer, forEachSegment(rows_to(peer), offset, n, fill));
        }
        exchange.swap();
        for (uint32_t i = 1; i < ranks; ++i) {
          const uint32_t peer = (rank + i) % ranks;
          const char* slot = exchange.inbox(peer);
          auto empty = [&](uint64_t at, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane, uint32_t lanes) {
            take(slot + at, peer, row, column, bytes, lane, lanes);
          };
          forEachSegment(rows_from(peer), offset, n, empty);
        }
      });
  exchange.finish();
}

// Calls body(row, lane, lanes) for each row that a rank sends to itself, over the whole grid.
template <class Body>
PROXYCCL_DEVICE void forEachOwnRow(uint32_t rows, Body body) {
  forEachRow(rows, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, body);
}

// out[R][hidden] = the rows of all tokens that chose this rank's experts, times their weights where there are any.
template <class T>
PROXYCCL_DEVICE void dispatchRows(ProxycclTeam* team, const ProxycclRouting* routing, const T* tokens,
                                  const float* weights, T* out, uint64_t hidden) {
  using A = typename Element<T>::Accumulator;
  const Routes routes(team, routing);
  const uint32_t rank = team->rank, topk = routing->topk;
  const uint64_t row_bytes = hidden * sizeof(T);
  char* rows = reinterpret_cast<char*>(out);
  auto put = [&](char* to, uint32_t peer, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane,
                 uint32_t lanes) {
    const uint32_t slot = routes.slotOf(peer, row);
    const char* from = reinterpret_cast<const char*>(tokens) + slot / topk * row_bytes + column;
    if (weights == nullptr) return copyBytes(to, from, bytes, lane, lanes);
    const A weight = static_cast<A>(weights[slot]);
    T* scaled = reinterpret_cast<T*>(to);
    const T* values = reinterpret_cast<const T*>(from);
    forEach(bytes / sizeof(T), lane, lanes,
            [&](size_t i) { scaled[i] = Element<T>::narrow(weight * Element<T>::widen(values[i])); });
  };
  auto take = [&](const char* from, uint32_t peer, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane,
                  uint32_t lanes) {
    copyBytes(rows + routes.outputRowOf(peer, row) * row_bytes + column, from, bytes, lane, lanes);
  };
  forEachOwnRow(routes.sentTo(rank), [&](uint64_t row, uint32_t lane, uint32_t lanes) {
    put(rows + routes.outputRowOf(rank, row) * row_bytes, rank, row, 0, row_bytes, lane, lanes);
  });
  exchangeRows(
      team, row_bytes, routing->longest, [&](uint32_t peer) { return routes.sentTo(peer); },
      [&](uint32_t peer) { return routes.receivedFrom(peer); }, put, take);
}

// out[T][hidden] = the sum over k of each token's rows, times their weights where there are any.
template <class T>
PROXYCCL_DEVICE void combineRows(const ProxycclRouting* routing, const T* slots, const float* weights, T* out,
                                 uint64_t tokens, uint64_t hidden) {
  using A = typename Element<T>::Accumulator;
  const uint32_t topk = routing->topk;
  forEach(tokens * hidden, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, [&](uint64_t i) {
    const uint64_t first = i / hidden * topk, column = i % hidden;
    A sum = 0;
    for (uint64_t slot = first; slot < first + topk; ++slot) {
      if (routing->positions[slot] == PROXYCCL_NO_SLOT) continue;
      const A value = Element<T>::widen(slots[slot * hidden + column]);
      sum += weights == nullptr ? value : static_cast<A>(weights[slot]) * value;
    }
    out[i] = Element<T>::narrow(sum);
  });
}

}  // namespace proxyccl

// By one block. expert_ids[slots]: the expert of each slot; an id equal to the number of experts drops it.
PROXYCCL_TEAM_KERNEL expert_route(ProxycclTeam* team, ProxycclRouting* routing, const int32_t* expert_ids,
                                  uint32_t slots) {
  using namespace proxyccl;
  __shared__ bool lost;
  Exchange exchange(team);
  const Routes routes(team, routing);
  routes.sortSlots(expert_ids, slots);
  gatherBytes(exchange, team, reinterpret_cast<char*>(routes.countsOf(team->rank)),
              reinterpret_cast<char*>(routing->counts), (routes.experts() + 1) * sizeof(uint32_t));
  // Counts of a peer that did not come are no counts, and would lead astray.
  if (threadIdx.x == 0) lost = aborted(team->control);
  __syncthreads();
  if (!lost) routes.layOutRows(&routing->longest);
  exchange.finish();
}

// slots[tokens * topk][row_bytes] = what became of each slot's row; those of dropped slots are left alone.
PROXYCCL_TEAM_KERNEL expert_collect(ProxycclTeam* team, const ProxycclRouting* routing, const char* rows, char* slots,
                                    uint64_t row_bytes) {
  using namespace proxyccl;
  const Routes routes(team, routing);
  const uint32_t rank = team->rank;
  auto row_at = [&](uint32_t peer, uint64_t row) { return rows + routes.outputRowOf(peer, row) * row_bytes; };
  auto slot_at = [&](uint32_t peer, uint64_t row) { return slots + routes.slotOf(peer, row) * row_bytes; };
  forEachOwnRow(routes.sentTo(rank), [&](uint64_t row, uint32_t lane, uint32_t lanes) {
    copyBytes(slot_at(rank, row), row_at(rank, row), row_bytes, lane, lanes);
  });
  exchangeRows(
      team, row_bytes, routing->longest, [&](uint32_t peer) { return routes.receivedFrom(peer); },
      [&](uint32_t peer) { return routes.sentTo(peer); },
      [&](char* to, uint32_t peer, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane, uint32_t lanes) {
        copyBytes(to, row_at(peer, row) + column, bytes, lane, lanes);
      },
      [&](const char* from, uint32_t peer, uint64_t row, uint64_t column, uint64_t bytes, uint32_t lane,
          uint32_t lanes) { copyBytes(slot_at(peer, row) + column, from, bytes, lane, lanes); });
}

PROXYCCL_EXPORT_KERNEL(expert_route)
PROXYCCL_EXPORT_KERNEL(expert_collect)

#define PROXYCCL_EXPERT_KERNELS(T, type)                                                                           \
  PROXYCCL_TEAM_KERNEL expert_dispatch_##type(ProxycclTeam* team, const ProxycclRouting* routing, const T* tokens, \
                                              const float* weights, T* out, uint64_t hidden) {                     \
    ::proxyccl::dispatchRows<T>(team, routing, tokens, weights, out, hidden);                                      \
  }                                                                                                                \
  PROXYCCL_TEAM_KERNEL expert_combine_##type(const ProxycclRouting* routing, const T* slots, const float* weights, \
                                             T* out, uint64_t tokens, uint64_t hidden) {                           \
    ::proxyccl::combineRows<T>(routing, slots, weights, out, tokens, hidden);                                      \
  }                                                                                                                \
  PROXYCCL_EXPORT_KERNEL(expert_dispatch_##type)                                                                   \
  PROXYCCL_EXPORT_KERNEL(expert_combine_##type)

PROXYCCL_EXPERT_KERNELS(float, float32)
PROXYCCL_EXPERT_KERNELS(double, float64)
PROXYCCL_EXPERT_KERNELS(proxyccl::Half, float16)
PROXYCCL_EXPERT_KERNELS(proxyccl::BFloat16, bfloat16)

#endif
