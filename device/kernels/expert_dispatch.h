// MoE dispatch: each token's row goes once to every rank of its node that has one of its experts, and once to every
// other node, and is spread over the experts' rows where it arrives.
//
// A rank counts its own slots by expert, segment by segment, and tells everyone; with everyone's counts each rank knows
// the row of every slot that comes to it. So rows can be on their way before anybody knows where they end. The experts
// of few tokens are announced instead (expert_announcement.h), and everyone counts all of them.
#ifndef PROXYCCL_EXPERT_DISPATCH_H
#define PROXYCCL_EXPERT_DISPATCH_H

#include "expert_announcement.h"

namespace proxyccl {

// By one block: values[i] becomes the sum of those before it, plus added[i]. Returns the sum of all values.
PROXYCCL_DEVICE uint32_t exclusiveScan(uint32_t* values, const uint32_t* added, uint32_t n) {
  __shared__ uint32_t sums[PROXYCCL_EXPERT_THREADS / PROXYCCL_WARP_SIZE];
  const uint32_t share = (n + blockDim.x - 1) / blockDim.x;
  const uint32_t begin = threadIdx.x * share < n ? threadIdx.x * share : n;
  const uint32_t end = begin + share < n ? begin + share : n;
  const uint32_t lane = threadIdx.x % PROXYCCL_WARP_SIZE, warp = threadIdx.x / PROXYCCL_WARP_SIZE;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) own += values[i];
  uint32_t through = own;
#pragma unroll
  for (uint32_t distance = 1; distance < PROXYCCL_WARP_SIZE; distance *= 2) {
    const uint32_t other = shuffle(through, lane >= distance ? lane - distance : lane);
    if (lane >= distance) through += other;
  }
  if (lane == PROXYCCL_WARP_SIZE - 1 || threadIdx.x == blockDim.x - 1) sums[warp] = through;
  __syncthreads();
  uint32_t before = through - own, total = 0;
#pragma unroll 1
  for (uint32_t w = 0; w * PROXYCCL_WARP_SIZE < blockDim.x; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t value = values[i];
    values[i] = before + added[i];
    before += value;
  }
  __syncthreads();
  return total;
}

// One dispatch, as one block sees it. With kAnnounced expert ids are announced, and there is one node.
template <bool kAnnounced>
class Dispatch {
 public:
  // What everyone's counts say.
  struct Found {
    uint32_t rows;                // of this rank
    uint32_t bad_rank, bad_slot;  // the first slot with a bad expert id, or ~0
  };

  PROXYCCL_DEVICE Dispatch(const ProxycclExperts& experts, const ProxycclDispatch& call)
      : team_(experts),
        call_(call),
        number_(experts.counters->dispatches + 1),
        announced_(experts, experts.counters->routings + 1),
        inbox_(static_cast<uint32_t>(experts.counters->routings + (call.again ? 0 : 1)) % 2),
        segment_(blockIdx.x % experts.segments),
        topk_(experts.topk),
        own_(Segment::of(call.tokens, segment_, experts.segments)) {}

  // By the block, before anything else. What others wait for goes first, and different threads see to each part.
  PROXYCCL_DEVICE void enter() const {
    const bool routes = call_.phases & PROXYCCL_EXPERT_ROUTE, sends = call_.phases & PROXYCCL_EXPERT_SEND;
    if (routes && kAnnounced) announced_.send(call_);
    if (!kAnnounced && (routes || sends)) awaitReaders();
    if (holdsIds())
#pragma unroll 1
      for (uint32_t s = threadIdx.x; s < own_.tokens * topk_; s += blockDim.x)
        heldIds()[s] = call_.expert_ids[own_.begin * topk_ + s];
    if (kAnnounced) {  // hear() begins with what it finds here, and with no barrier
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < 2 * team_.experts(); i += blockDim.x) bases()[i] = 0;
      if (threadIdx.x == 0) {
        hearing() = {~0u, false};
        ownRows() = {0, 0};
      }
    }
    team_.enter();
    if (kAnnounced && (routes || call_.again)) raiseRead((threadIdx.x + blockDim.x / 2) % blockDim.x, number_ - 1);
    if (kAnnounced && call_.again) {
      awaitReaders();
      __syncthreads();
    }
    if (!routes || onlySends()) return;
    int32_t* kept = idsOf(team_->node, own_.begin);
    const int32_t* ids = ownIds(0);
    const uint32_t experts = team_.experts();
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < own_.tokens * topk_; s += blockDim.x)
      kept[s] = static_cast<int32_t>(static_cast<uint32_t>(ids[s]) < experts ? ids[s] : experts);
    if (!kAnnounced) route();
  }

  PROXYCCL_DEVICE void route() const {
    char* own = team_.inbox(team_->local_rank, team_->local_rank) + team_.routingAt(segment_);
    ProxycclExpertSlot* slots = slotsOf(own);
    uint32_t* counts = countsOf(own);
    const int32_t* ids = ownIds(0);
    const uint32_t n = own_.tokens * topk_, experts = team_.experts();

    __shared__ uint32_t bad;
    if (threadIdx.x == 0) bad = ~0u;
    for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < n; s += blockDim.x) {
      const uint32_t expert = static_cast<uint32_t>(ids[s]);
      slots[s] = {expert < experts ? expert : PROXYCCL_NO_EXPERT, 0};
      if (expert > experts) atomicMin(&bad, own_.begin * topk_ + s);
    }
    countSlots(ids, n, slots, counts, experts);
    if (call_.weights != nullptr)
      copyBytes(own + team_->weights_offset,
                call_.weights + static_cast<uint64_t>(own_.begin) * topk_ * team_->weight_bytes,
                static_cast<uint64_t>(n) * team_->weight_bytes, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) *reinterpret_cast<ProxycclExpertSegment*>(own) = {call_.tokens, bad, {0, 0}};
    if (crossesNodes()) placeTokens();
    syncThreadsDevice();

    const uint64_t head = team_->slots_offset + n * sizeof(ProxycclExpertSlot);
    const uint64_t weights = call_.weights == nullptr ? 0 : static_cast<uint64_t>(n) * team_->weight_bytes;
    auto copy = [&](char* to) {
      copyBytes(to, own, head, threadIdx.x, blockDim.x);
      copyBytes(to + team_->weights_offset, own + team_->weights_offset, weights, threadIdx.x, blockDim.x);
    };
    for (uint32_t l = 0; l < team_->local_size; ++l)
      if (l != team_->local_rank) copy(team_.inbox(l, team_->local_rank) + team_.routingAt(segment_));
    for (uint32_t node = 0; node < team_->nodes; ++node) {
      if (node == team_->node) continue;
      char* to = team_->workspace + team_.outbox(number_, node) + team_.routingAt(segment_);
      copy(to);
      const int32_t* places = sentPlaces(node);
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < own_.tokens; i += blockDim.x) placesOf(to)[i] = places[i];
    }
    syncThreadsSystem();
    if (threadIdx.x < team_->local_size) team_.raise(threadIdx.x, team_.routed(team_->rank, segment_), number_);
    if (threadIdx.x < team_->nodes && threadIdx.x != team_->node)
      team_.post(team_->out_channels, threadIdx.x, team_.rail(number_, team_->node) + team_.routingAt(segment_),
                 team_.outbox(number_, threadIdx.x) + team_.routingAt(segment_), team_->routing_bytes);
  }

  // Passes on within the node what the counterparts on other nodes told.
  PROXYCCL_DEVICE void forwardRouting() const {
    const uint32_t node = threadIdx.x;
    if (node >= team_->nodes || node == team_->node) return;
    team_.awaitPost(team_->out_channels, node);
    for (uint32_t l = 0; l < team_->local_size; ++l)
      team_.raise(l, team_.routed(team_.member(node, team_->local_rank), segment_), number_);
  }

  // Hears what everyone announced, and works out the same as findRows(), the position of each of this block's own
  // slots, and what receive() needs to know. Returns false, to all threads, where something did not come.
  PROXYCCL_DEVICE bool hear(Found* found) const {
    const uint32_t ranks = team_->world_size, per_rank = team_->experts_per_rank, own = team_->rank * per_rank;
    const uint32_t n = team_.experts();
    uint32_t *first = bases(), *before = first + n;
    Hearing& hearing = this->hearing();
    if (!announced_.hear()) hearing.lost = true;
    syncThreadsSystem();  // also for what the block has sent: tellSent() follows
    if (hearing.lost) return false;
    learnTokens();
    uint32_t rows_before = 0;  // this rank's, in the rows of all
    announced_.forEachSlot(0, ranks, threadIdx.x, blockDim.x, [&](uint32_t source, uint32_t slot, uint32_t expert) {
      if (expert == Announcement::kBadExpert) atomicMin(&hearing.bad, source << 16 | slot);
      rows_before += expert < own;
      if (expert - own >= per_rank) return;
      const uint32_t i = (expert - own) * ranks + source;
      atomicAdd(&first[i], 1u);
      // Its segment's beginning is not everybody's yet.
      if (slot < announced_.tokens(source) * segment_ / team_->segments * topk_) atomicAdd(&before[i], 1u);
    });
    if (call_.scatter != nullptr && rows_before != 0) atomicAdd(&ownRows().first, rows_before);
    __syncthreads();
    numberOwnSlots();
    *found = {exclusiveScan(first, before, n), hearing.bad >> 16, hearing.bad & 0xffff};
    if (hearing.bad == ~0u) found->bad_rank = found->bad_slot = ~0u;
    if (call_.scatter == nullptr) return true;
    if (threadIdx.x == 0) ownRows().count = found->rows;
    __syncthreads();
    return true;
  }

  // Waits for everyone's counts, and adds up from them the first row of this block's slots for each expert of this rank
  // from each source: bases()[expert * ranks + source]. Returns false, to all threads, where counts did not come: then
  // there are none.
  PROXYCCL_DEVICE bool findRows(const Group& group, Found* found) const {
    __shared__ uint32_t bad;
    __shared__ bool lost;
    const uint32_t ranks = team_->world_size, segments = team_->segments, per_rank = team_->experts_per_rank;
    const uint32_t n = ranks * per_rank, own = team_->rank * per_rank;
    uint32_t *first = bases(), *before = first + n;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 2 * n; i += blockDim.x) first[i] = 0;
    if (threadIdx.x == 0) bad = ~0u;
    for (uint32_t i = threadIdx.x; i < ranks * segments; i += blockDim.x)
      team_.await(team_.routed(i / segments, i % segments), number_, i / segments);
    __syncthreads();
    for (uint32_t i = group.number; i < ranks * segments; i += Group::count()) {
      const uint32_t source = i / segments, segment = i % segments;
      const char* routing = team_.slabOf(number_, source) + team_.routingAt(segment);
      if (group.lane == 0 && reinterpret_cast<const ProxycclExpertSegment*>(routing)->bad_slot != ~0u)
        atomicMin(&bad, source);
#pragma unroll 1
      for (uint32_t e = group.lane; e < per_rank; e += kGroupLanes) {
        const uint32_t slots = countsOf(routing)[own + e];
        if (slots == 0) continue;
        atomicAdd(&first[e * ranks + source], slots);
        if (segment < segment_) atomicAdd(&before[e * ranks + source], slots);
      }
    }
    if (threadIdx.x == 0) lost = false;
    __syncthreads();
    if (threadIdx.x == 0) lost = aborted(team_->control);
    *found = {exclusiveScan(first, before, n), bad, ~0u};
    for (uint32_t segment = 0; bad != ~0u && segment < segments; ++segment) {
      const uint32_t slot = segmentOf(bad, segment).bad_slot;
      found->bad_slot = slot < found->bad_slot ? slot : found->bad_slot;
    }
    return !lost;
  }

  // By one thread: what the CPU is told.
  PROXYCCL_DEVICE void report(const Found& found) const {
    ProxycclExpertReport* to = team_->report;
    storeRelaxedSystem(&to->rows, found.rows);
    storeRelaxedSystem(&to->bad_rank, found.bad_rank);
    storeRelaxedSystem(&to->bad_slot, found.bad_slot);
    storeReleaseSystem(&to->ticket, call_.ticket);
  }

  // By one block: the counts of all ranks, for the descriptor; and the most rows of any, which must fit.
  PROXYCCL_DEVICE void keepCounts(uint32_t rows) const {
    __shared__ uint32_t most;
    const uint32_t experts = team_.experts(), ranks = team_->world_size;
    __syncthreads();  // the sources have been read
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    // A rank's rows are summed where its sources' counts were: those have been read.
    uint32_t* rows_of = tokensOf();
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < ranks; s += blockDim.x) {
      call_.layout.tokens[s] = static_cast<int32_t>(rows_of[s]);
      rows_of[s] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < ranks * experts; i += blockDim.x) {
      const char* slab = team_.slabOf(number_, i / experts);
      uint32_t slots = 0;
#pragma unroll 8
      for (uint32_t b = 0; b < team_->segments; ++b) slots += countsOf(slab + team_.routingAt(b))[i % experts];
      call_.layout.counts[i] = static_cast<int32_t>(slots);
      if (slots != 0) atomicAdd(&rows_of[i % experts / team_->experts_per_rank], slots);
    }
    __syncthreads();
    for (uint32_t rank = threadIdx.x; rank < ranks; rank += blockDim.x) atomicMax(&most, rows_of[rank]);
    __syncthreads();
    if (threadIdx.x == 0) keepRows(rows, most);
  }

  // Whether the block has no segment of its own.
  PROXYCCL_DEVICE bool onlySends() const { return blockIdx.x >= team_->segments; }

  // By block `block` of those `blocks` that send: its share of everything, of all segments in turns, as receivers want
  // them. Where each block sends, and has a segment, that is its share.
  PROXYCCL_DEVICE void send(const Group& group, uint32_t block, uint32_t blocks, uint32_t* finished) const {
    const uint32_t parts = team_.parts(), segments = team_->segments;
    const uint32_t all = (Segment::longest(call_.tokens, segments) << own_.pieces_log2) * segments;
#pragma unroll 1
    for (uint32_t round = 0; round * parts < all; ++round)
#pragma unroll 1
      for (uint32_t part = group.number * blocks + block; part < parts; part += blocks * Group::count())
        sendItem(group, part, round);
    if (!crossesNodes() || group.lane != 0) return;
    // The last group to come has all the others' rows, and the proxy reads them behind its release.
    if (fetchAddAcqRelDevice<uint32_t>(finished, 1) + 1 != Group::count()) return;
    for (uint32_t node = 0; node < team_->nodes; ++node) {
      if (node == team_->node) continue;
      const uint64_t first = rowAt(0), rows = rowsPlaced(sentPlaces(node), own_.tokens);
      team_.post(team_->out_channels, node, team_.rail(number_, team_->node) + first,
                 team_.outbox(number_, node) + first, rows * rowStride(call_.row_bytes));
    }
  }

  // What receive() needs to know of all, by the whole block. `rows` is what findRows() returned.
  PROXYCCL_DEVICE void learnSources(uint32_t rows) const {
    if (kAnnounced && !call_.again) return;  // hear() did
    learnTokens();
    Range& range = ownRows();
    if (threadIdx.x == 0) range = {0, rows};
    syncThreadsSystem();  // as in hear()
    if (call_.scatter == nullptr || call_.again) return;
    const uint32_t before = team_->rank * team_->experts_per_rank, n = team_->world_size * team_->segments;
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n * before; i += blockDim.x) {
      const uint32_t segment = i / before;
      own += countsOf(team_.slabOf(number_, segment / team_->segments) +
                      team_.routingAt(segment % team_->segments))[i % before];
    }
    if (own != 0) atomicAdd(&range.first, own);
    __syncthreads();
  }

  // By a group, when the block has met behind its rows: tells all ranks of a node to which ids are announced that they
  // are there. One release for all takes less time than one for each group, and few rows come so close upon each other
  // that nobody would have begun with the first.
  PROXYCCL_DEVICE void tellSent(const Group& group) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.raise(l, team_.sent(team_->rank, segment_), flagValue(number_, kAllItems));
  }

  // By every group, when it has nothing else to do; each takes the next item that none has taken.
  PROXYCCL_DEVICE void receive(const Group& group, uint32_t* taken, const Found& found) const {
    if (crossesNodes() && group.number == Group::count() - 1 && movesRows()) forwardRows(group);
    const uint32_t ranks = team_->world_size;
    // The tables that describe what was announced are written by whoever has no row to copy: the longest work of one
    // group before all rows, the rest behind them.
    const bool describes = describesApart();
    const uint32_t most = team_.mostItems(), copies = movesRows() || !describes ? most * ranks : 0;
    const uint32_t described = describes ? team_->segment_tokens * ranks : 0;
    uint64_t arrived = 0;
    for (;;) {
      uint32_t next = group.next(taken);
      if (describes && next-- == 0) {
        keepHeard(group, found.rows);
      } else if (next < copies) {
        // This rank's rows are there. Others' come one by one, so their sources take turns; or all of a source at once.
        const uint32_t item = kAnnounced ? next % most : next / ranks, turn = kAnnounced ? next / most : next;
        receiveItem(group, item, (team_->rank + turn) % ranks, &arrived);
      } else if (next - copies < described) {
        describeToken(group, (next - copies) % ranks, (next - copies) / ranks);
      } else {
        return;
      }
    }
  }

  // By the block, when it has received: the node may write its slabs again.
  PROXYCCL_DEVICE void acknowledge() const {
    __syncthreads();
    raiseRead(threadIdx.x, number_);
  }

  PROXYCCL_DEVICE bool movesRows() const { return call_.phases & PROXYCCL_EXPERT_RECEIVE; }

 private:
  PROXYCCL_DEVICE bool crossesNodes() const { return !kAnnounced && team_->nodes > 1; }
  PROXYCCL_DEVICE bool isNear(uint32_t source) const { return kAnnounced || team_.isNear(source); }

  // Tells the node that this block has read what came until call `number`.
  PROXYCCL_DEVICE void raiseRead(uint32_t thread, uint64_t number) const {
#pragma unroll 1
    for (uint32_t l = thread; l < team_->local_size; l += blockDim.x)
      team_.raise(l, team_.read(team_->local_rank, segment_), number);
  }
  // Waits until the node has read the dispatch before: its slabs can be written again. Routing is read by every block,
  // rows by that which has the segment; a block that only sends writes to all segments.
  PROXYCCL_DEVICE void awaitReaders() const {
    const bool rows_alone = kAnnounced || (call_.again && team_->segments == team_->blocks);
    const uint32_t first = rows_alone ? segment_ : 0, count = rows_alone ? 1 : team_->segments;
#pragma unroll 1
    for (uint32_t i = (threadIdx.x + blockDim.x / 2) % blockDim.x; i < team_->local_size * count; i += blockDim.x)
      team_.await(team_.read(i / count, first + i % count), number_ - 1, team_.member(team_->node, i / count));
  }

  // The expert ids of this block's tokens, from token i of its segment on.
  PROXYCCL_DEVICE const int32_t* ownIds(uint32_t i) const {
    return (holdsIds() ? heldIds() : call_.expert_ids + static_cast<uint64_t>(own_.begin) * topk_) + i * topk_;
  }
  PROXYCCL_DEVICE bool holdsIds() const { return own_.tokens * topk_ <= PROXYCCL_ANNOUNCED_SEGMENT_SLOTS; }
  static PROXYCCL_DEVICE int32_t* heldIds() {
    __shared__ int32_t ids[PROXYCCL_ANNOUNCED_SEGMENT_SLOTS];
    return ids;
  }

  // By the block: how many tokens each source has, and this block's segment of them.
  PROXYCCL_DEVICE void learnTokens() const {
#pragma unroll 1
    for (uint32_t s = threadIdx.x; s < team_->world_size; s += blockDim.x) {
      const uint32_t tokens = call_.again  ? static_cast<uint32_t>(call_.layout.tokens[s])
                              : kAnnounced ? announced_.tokens(s)
                                           : segmentOf(s, 0).tokens;
      tokensOf()[s] = tokens;
      team_.segmentOf(s) = Segment::of(tokens, segment_, team_->segments);
    }
  }

  // What the block's threads find as they hear.
  struct Hearing {
    uint32_t bad;  // the first slot with a bad expert id, and above 16 bits its rank; or ~0
    bool lost;
  };
  static PROXYCCL_DEVICE Hearing& hearing() {
    __shared__ Hearing hearing;
    return hearing;
  }

  PROXYCCL_DEVICE uint32_t segmentSlots() const { return team_->segment_tokens * topk_; }
  // The position of each of the block's own slots, [ranks][segmentSlots()], where they were announced.
  static PROXYCCL_DEVICE uint16_t* positions() {
    __shared__ uint16_t positions[PROXYCCL_ANNOUNCED_OWN_SLOTS];
    return positions;
  }
  // A slot's position is the number of those before it in its segment that have the same expert.
  PROXYCCL_DEVICE void numberOwnSlots() const {
    const uint32_t slots = segmentSlots(), per_rank = team_->experts_per_rank;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < team_->world_size * slots; i += blockDim.x) {
      const uint32_t source = i / slots, slot = i % slots;
      const Segment& segment = team_.segmentOf(source);
      if (slot >= segment.tokens * topk_) continue;
      const uint32_t first = segment.begin * topk_, expert = announced_.expert(source, first + slot);
      if (expert - team_->rank * per_rank >= per_rank) continue;
      uint32_t position = 0;
#pragma unroll 8
      for (uint32_t other = 0; other < slot; ++other) position += announced_.expert(source, first + other) == expert;
      positions()[i] = static_cast<uint16_t>(position);
    }
  }
  // Slot k of token i of a source's segment.
  PROXYCCL_DEVICE ProxycclExpertSlot slotOf(uint32_t source, uint32_t i, uint32_t k) const {
    const uint32_t slot = i * topk_ + k;
    if (!kAnnounced) return slotsOf(routingOf(source))[slot];
    const uint32_t expert = announced_.expert(source, team_.segmentOf(source).begin * topk_ + slot);
    if (expert >= team_.experts()) return {PROXYCCL_NO_EXPERT, 0};
    return {expert, positions()[source * segmentSlots() + slot]};
  }
  PROXYCCL_DEVICE uint64_t weightOf(uint32_t source, uint32_t i, uint32_t k) const {
    const uint32_t slot = i * topk_ + k, bytes = team_->weight_bytes;
    if (kAnnounced) return announced_.weight(source, team_.segmentOf(source).begin * topk_ + slot);
    return loadElement(routingOf(source) + team_->weights_offset + static_cast<uint64_t>(slot) * bytes, bytes);
  }

  // Whether receive() describes rows apart from copying them.
  PROXYCCL_DEVICE bool describesApart() const { return kAnnounced && !call_.again; }

  // By a group of each block: what keepCounts() does, of what was announced. Block b has sources b, b + blocks, …, and
  // the last one what concerns all.
  PROXYCCL_DEVICE void keepHeard(const Group& group, uint32_t rows) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.await(team_.read(l, segment_), number_ - 1, team_.nearRank(l));
    const uint32_t experts = team_.experts(), ranks = team_->world_size, segments = team_->segments;
    uint32_t* counts = bases() + experts;  // what hear() needs no more
    auto count = [&](uint32_t first, uint32_t sources) {
#pragma unroll 1
      for (uint32_t e = group.lane; e < experts; e += kGroupLanes) counts[e] = 0;
      group.sync();
      announced_.forEachSlot(first, sources, group.lane, kGroupLanes, [&](uint32_t, uint32_t, uint32_t expert) {
        if (expert < experts) atomicAdd(&counts[expert], 1u);
      });
      group.sync();
    };
#pragma unroll 1
    for (uint32_t s = segment_; s < ranks; s += segments) {
      count(s, 1);
#pragma unroll 1
      for (uint32_t e = group.lane; e < experts; e += kGroupLanes)
        call_.layout.counts[s * experts + e] = static_cast<int32_t>(counts[e]);
      if (group.lane == 0) call_.layout.tokens[s] = static_cast<int32_t>(tokensOf()[s]);
      group.sync();
    }
    if (segment_ != segments - 1) return;
    count(0, ranks);
    uint32_t& most = group.space().count;
    if (group.lane == 0) most = 0;
    group.sync();
#pragma unroll 1
    for (uint32_t rank = group.lane; rank < ranks; rank += kGroupLanes) {
      uint32_t of_rank = 0;
#pragma unroll 1
      for (uint32_t e = 0; e < team_->experts_per_rank; ++e) of_rank += counts[rank * team_->experts_per_rank + e];
      atomicMax(&most, of_rank);
    }
    group.sync();
    if (group.lane == 0) keepRows(rows, most);
    group.sync();
  }

  // By one thread: how many rows there are here, and the most of any rank.
  PROXYCCL_DEVICE void keepRows(uint32_t rows, uint32_t most) const {
    const uint32_t received = rows < call_.capacity ? rows : call_.capacity;
    if (call_.received != nullptr) *call_.received = static_cast<int32_t>(received);
    if (most > loadRelaxedSystem(&team_->report->most_rows)) storeRelaxedSystem(&team_->report->most_rows, most);
  }

  PROXYCCL_DEVICE uint32_t* countsOf(const char* routing) const {
    return reinterpret_cast<uint32_t*>(const_cast<char*>(routing) + team_->counts_offset);
  }
  PROXYCCL_DEVICE ProxycclExpertSlot* slotsOf(const char* routing) const {
    return reinterpret_cast<ProxycclExpertSlot*>(const_cast<char*>(routing) + team_->slots_offset);
  }
  PROXYCCL_DEVICE int32_t* placesOf(const char* routing) const {
    return reinterpret_cast<int32_t*>(const_cast<char*>(routing) + team_->places_offset);
  }
  // Of this block's segment of a source.
  PROXYCCL_DEVICE const char* routingOf(uint32_t source) const {
    return team_.slabOf(number_, source) + team_.routingAt(segment_);
  }
  PROXYCCL_DEVICE const ProxycclExpertSegment& segmentOf(uint32_t source, uint32_t block) const {
    return *reinterpret_cast<const ProxycclExpertSegment*>(team_.slabOf(number_, source) + team_.routingAt(block));
  }
  PROXYCCL_DEVICE int32_t* idsOf(uint32_t node, uint32_t token) const {
    return call_.layout.expert_ids + (static_cast<uint64_t>(node) * team_->max_tokens + token) * topk_;
  }
  PROXYCCL_DEVICE int32_t* sentPlaces(uint32_t node) const {
    return call_.layout.sent_places + static_cast<uint64_t>(node) * team_->max_tokens + own_.begin;
  }
  static PROXYCCL_DEVICE uint32_t* tokensOf() {
    __shared__ uint32_t tokens[PROXYCCL_MAX_EXPERT_RANKS];
    return tokens;
  }
  // This rank's rows among those of all ranks.
  struct Range {
    uint32_t first, count;
  };
  static PROXYCCL_DEVICE Range& ownRows() {
    __shared__ Range range;
    return range;
  }
  PROXYCCL_DEVICE uint32_t* bases() const {
    const uint32_t n = 2 * team_.experts();
    return n <= kScratch ? scratch() : team_->bases + static_cast<uint64_t>(segment_) * n;
  }
  static constexpr uint32_t kScratch = 2048;
  static PROXYCCL_DEVICE uint32_t* scratch() {
    __shared__ uint32_t words[kScratch];
    return words;
  }

  // Numbers the slots of each expert in order: in a tile of slots each expert has a bit for every slot, and a slot's
  // number is that of the bits before its own.
  PROXYCCL_DEVICE void countSlots(const int32_t* ids, uint32_t n, ProxycclExpertSlot* slots, uint32_t* counts,
                                  uint32_t experts) const {
    uint32_t* bits = scratch();
    const uint32_t some = experts < kScratch ? experts : kScratch, words = kScratch / some;
    for (uint32_t start = 0; start < n; start += 32 * words) {
      const uint32_t size = n - start < 32 * words ? n - start : 32 * words;
      for (uint32_t first = 0; first < experts; first += some) {
        auto eachSlot = [&](auto&& body) {
#pragma unroll 1
          for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
            const uint32_t expert = static_cast<uint32_t>(ids[start + i]);
            if (expert < experts && expert - first < some) body(i, expert, bits + (expert - first) * words);
          }
          __syncthreads();
        };
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < some * words; i += blockDim.x) bits[i] = 0;
        __syncthreads();
        eachSlot([&](uint32_t i, uint32_t, uint32_t* own) { atomicOr(&own[i / 32], 1u << i % 32); });
        eachSlot([&](uint32_t i, uint32_t expert, const uint32_t* own) {
          uint32_t position = counts[expert] + countBits(own[i / 32] & ((1u << i % 32) - 1));
          for (uint32_t w = 0; w < i / 32; ++w) position += countBits(own[w]);
          slots[start + i].position = position;
        });
        for (uint32_t e = threadIdx.x; e < some && first + e < experts; e += blockDim.x) {
          uint32_t count = 0;
          for (uint32_t w = 0; w < words; ++w) count += countBits(bits[e * words + w]);
          counts[first + e] += count;
        }
        __syncthreads();
      }
    }
  }

  // Where in the segment's rows for each node a token lies: those that go there, one behind the other.
  PROXYCCL_DEVICE void placeTokens() const {
    const uint32_t node = threadIdx.x;
    if (node >= team_->nodes) return;
    int32_t place = 0;
    for (uint32_t i = 0; i < own_.tokens; ++i) {
      const int32_t* ids = call_.expert_ids + static_cast<uint64_t>(own_.begin + i) * topk_;
      bool goes = false;
      for (uint32_t k = 0; k < topk_; ++k) {
        const uint32_t expert = static_cast<uint32_t>(ids[k]);
        goes |= expert < team_.experts() && team_.nodeOf(expert / team_->experts_per_rank) == node;
      }
      sentPlaces(node)[i] = goes ? place++ : PROXYCCL_NO_ROW;
    }
  }
  // What a rank of the node gets from another. Announced rows have two inboxes, by the parity of announcements. A rank
  // sends into one again when it has heard the announcement between, which everyone makes when it has read the rows of
  // the one before: keepHeard() waits for the flag that says so in proper order. Rows that are sent again take the
  // inbox of the last announcement, and wait for all to have read.
  PROXYCCL_DEVICE char* inbox(uint32_t local, uint32_t source_local) const {
    return team_.inbox(local, source_local) + (kAnnounced && inbox_ != 0 ? team_->local_size * team_->slab_bytes : 0);
  }
  // Where in a slab this block's rows lie.
  PROXYCCL_DEVICE uint64_t rowAt(uint32_t place) const {
    return team_.rowAt(segment_, place, rowStride(call_.row_bytes));
  }

  // By a group: pushes an item of a part, if there is one, to everyone that needs it, and says so.
  PROXYCCL_DEVICE void sendItem(const Group& group, uint32_t part, uint32_t round) const {
    const uint32_t number = round * team_.parts() + part, item = number / team_->segments;
    const uint32_t at = kAnnounced ? segment_ : number % team_->segments;
    const Segment segment = kAnnounced ? own_ : Segment::of(call_.tokens, at, team_->segments);
    if (item >= segment.items()) return;
    GroupSpace& space = group.space();
    const uint32_t i = segment.tokenOf(item);
    const uint64_t token = segment.begin + i;
    const int32_t* ids = at == segment_ ? ownIds(i) : call_.expert_ids + token * topk_;
    // Where each slot's row goes: to a rank of the node by its number, to another node by that and kFar.
    constexpr int32_t kFar = 1 << 16;
#pragma unroll 1
    for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
      const uint32_t expert = static_cast<uint32_t>(ids[k]);
      int32_t goal = PROXYCCL_NO_ROW;
      if (expert < team_.experts()) {
        const uint32_t rank = expert / team_->experts_per_rank, place = team_.placeOf(rank);
        if (place >> 16 != team_->node) {
          goal = kFar | static_cast<int32_t>(place >> 16);
        } else if (rank != team_->rank) {  // own rows are read from the input
          goal = static_cast<int32_t>(place & 0xffff);
        }
      }
      space.row[k] = goal;
    }
    group.sync();
    group.list(topk_, [&](uint32_t k, RowEntry* entry) {
      const int32_t goal = space.row[k];
      if (goal == PROXYCCL_NO_ROW) return false;
#pragma unroll 1
      for (uint32_t other = 0; other < k; ++other)
        if (space.row[other] == goal) return false;
      const uint32_t node = static_cast<uint32_t>(goal & ~kFar);
      entry->number = goal;
      entry->at = goal & kFar
                      ? team_->workspace + team_.outbox(number_, node) + rowAt(sentPlaces(node)[i])
                      : inbox(static_cast<uint32_t>(goal), team_->local_rank) +
                            team_.rowAt(at, i, rowStride(call_.row_bytes));
      return true;
    });
    const Piece piece(call_.row_bytes, segment, item);
    copyToEach(space.at, space.count, piece.begin, call_.input + token * call_.row_bytes + piece.begin,
               piece.end - piece.begin, group.lane);
    group.sync();
    if constexpr (!kAnnounced) {  // else tellSent() tells of all items at once
#pragma unroll 1
      for (uint32_t target = group.lane; target < space.count; target += kGroupLanes)
        if (!(space.number[target] & kFar))
          team_.raise(static_cast<uint32_t>(space.number[target]),
                      team_.sent(team_->rank, part), flagValue(number_, round + 1));
      group.sync();
    }
  }

  // By a group: waits for the rows of the counterparts on other nodes, and tells the node that they are there.
  PROXYCCL_DEVICE void forwardRows(const Group& group) const {
    const uint32_t groups = Group::count();
    for (uint32_t node = 0; node < team_->nodes; ++node) {
      if (node == team_->node) continue;
      if (group.lane == 0) team_.awaitPost(team_->out_channels, node);
      group.sync();
      const uint32_t source = team_.member(node, team_->local_rank);
      for (uint32_t i = group.lane; i < team_->local_size * groups; i += kGroupLanes)
        team_.raise(i / groups, team_.sent(source, i % groups * team_->segments + segment_),
                    flagValue(number_, kAllItems));
    }
  }

  // By a group: finds the row here of each slot of token i of a source's segment, for space.row; and enters them in the
  // descriptor, if `tell`.
  PROXYCCL_DEVICE void findTokenRows(const Group& group, uint32_t source, uint32_t i, bool tell) const {
    GroupSpace& space = group.space();
    const uint64_t token = team_.segmentOf(source).begin + i;
    int32_t* rows = call_.layout.rows + (static_cast<uint64_t>(source) * team_->max_tokens + token) * topk_;
#pragma unroll 1
    for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
      if (call_.again) {
        space.row[k] = rows[k];
        continue;
      }
      const ProxycclExpertSlot slot = slotOf(source, i, k);
      space.row[k] = rowOf(slot, source, token, k);
      if (!tell) continue;
      rows[k] = space.row[k];
      if (!isNear(source) && team_.localOf(source) == team_->local_rank)
        idsOf(team_.nodeOf(source), token)[k] =
            static_cast<int32_t>(slot.expert == PROXYCCL_NO_EXPERT ? team_.experts() : slot.expert);
    }
    group.sync();
  }

  // By a group: what the descriptor says of token i of a source's segment, if there is one.
  PROXYCCL_DEVICE void describeToken(const Group& group, uint32_t source, uint32_t i) const {
    if (i >= team_.segmentOf(source).tokens) return;
    findTokenRows(group, source, i, true);
    describeRows(group, source, i);
    group.sync();
  }

  // By a group: waits until an item of a source is there. `arrived` has a bit for each source of which all is known to
  // be, so that a group that has waited need not look again.
  PROXYCCL_DEVICE void awaitItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const {
    if (!kAnnounced) {
      const uint32_t number = item * team_->segments + segment_, parts = team_.parts();
      team_.await(group, team_.sent(source, number % parts), flagValue(number_, number / parts + 1), source);
      return;
    }
    if (source < 64 && *arrived >> source & 1) return;
    const uint64_t all = flagValue(number_, kAllItems);
#if !PROXYCCL_ON_HOST
    // One look at several takes no longer than at one.
    const char* flag = team_->workspace + team_.sent(group.lane, segment_);
    const bool looks = group.lane < team_->world_size;
    *arrived |= ballotWarp(looks && loadAcquireSystem(reinterpret_cast<const uint64_t*>(flag)) >= all);
    group.sync();
    if (source < 64 && *arrived >> source & 1) return;
#endif
    team_.await(group, team_.sent(source, segment_), all, source);
    if (source < 64) *arrived |= 1ull << source;
  }

  // By a group: takes in an item of a source, if there is one and it comes here.
  PROXYCCL_DEVICE void receiveItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const {
    const Segment& segment = team_.segmentOf(source);
    if (item >= segment.items()) return;
    GroupSpace& space = group.space();
    const uint32_t i = segment.tokenOf(item);
    const bool tell = segment.pieceOf(item) == 0 && !call_.again && !describesApart();
    const uint64_t token = segment.begin + i;
    int32_t place = static_cast<int32_t>(i);
    if (!isNear(source)) {
      int32_t& kept = call_.layout.places[static_cast<uint64_t>(source) * team_->max_tokens + token];
      place = call_.again ? kept : placesOf(routingOf(source))[i];
      if (tell && group.lane == 0) kept = place;
    }
    findTokenRows(group, source, i, tell);
    group.list(topk_, [&](uint32_t k, RowEntry* entry) {
      const int32_t row = space.row[k];
      entry->at = call_.output + row * (call_.row_bytes - call_.scale_bytes);
      entry->number = row;
      return row >= 0;
    });
    if (space.count != 0) {
      if (movesRows()) {
        const char* from = call_.input + token * call_.row_bytes;
        if (source != team_->rank) {
          awaitItem(group, item, source, arrived);
          const char* slab =
              kAnnounced ? inbox(team_->local_rank, team_.localOf(source)) : team_.slabOf(number_, source);
          from = slab + rowAt(place);
        }
        const Piece piece(call_.row_bytes, segment, item);
        const uint64_t scales = call_.row_bytes - call_.scale_bytes;  // where they begin in the row
        const uint64_t end = piece.end < scales ? piece.end : scales;
        if (piece.begin < end)
          copyToEach(space.at, space.count, piece.begin, from + piece.begin, end - piece.begin, group.lane);
        if (piece.end > scales) copyScales(group, from, piece.begin > scales ? piece.begin : scales, piece.end);
      }
      if (tell) describeRows(group, source, i);
    }
    group.sync();
  }

  // By a group: bytes [begin, end) of a row, which are scales, to those of each of the rows that it has listed.
  PROXYCCL_DEVICE void copyScales(const Group& group, const char* from, uint64_t begin, uint64_t end) const {
    const GroupSpace& space = group.space();
    const float* scales = reinterpret_cast<const float*>(from + begin);
    const uint64_t before = begin - (call_.row_bytes - call_.scale_bytes);
#pragma unroll 1
    for (uint64_t i = group.lane; i < (end - begin) / sizeof(float); i += kGroupLanes) {
      const float scale = scales[i];
#pragma unroll 1
      for (uint32_t slot = 0; slot < space.count; ++slot) {
        char* row = call_.output_scales + static_cast<uint64_t>(space.number[slot]) * call_.scale_bytes;
        reinterpret_cast<float*>(row + before)[i] = scale;
      }
    }
  }

  // The row here of a slot of a token.
  PROXYCCL_DEVICE int32_t rowOf(const ProxycclExpertSlot& slot, uint32_t source, uint64_t token, uint32_t k) const {
    const uint32_t expert = slot.expert - team_->rank * team_->experts_per_rank;
    if (slot.expert == PROXYCCL_NO_EXPERT || expert >= team_->experts_per_rank) return PROXYCCL_NO_ROW;
    uint64_t row = bases()[expert * team_->world_size + source] + slot.position;
    if (call_.scatter != nullptr) {
      uint64_t before = token;
      for (uint32_t s = 0; s < source; ++s) before += tokensOf()[s];
      row = static_cast<uint64_t>(static_cast<int64_t>(call_.scatter[before * topk_ + k]) - ownRows().first);
      if (row >= ownRows().count) {
        storeRelaxedSystem<uint32_t>(&team_->report->bad_index, 1);
        return PROXYCCL_PAST_END;
      }
    }
    return row < call_.capacity ? static_cast<int32_t>(row) : PROXYCCL_PAST_END;
  }

  // By a group: the descriptor's entries of the rows of a token.
  PROXYCCL_DEVICE void describeRows(const Group& group, uint32_t source, uint32_t i) const {
    const GroupSpace& space = group.space();
    int32_t first = PROXYCCL_NO_ROW;
#pragma unroll 1
    for (uint32_t k = topk_; k > 0; --k)
      if (space.row[k - 1] >= 0) first = space.row[k - 1];
#pragma unroll 1
    for (uint32_t k = group.lane; k < topk_; k += kGroupLanes) {
      const int32_t row = space.row[k];
      if (row < 0) continue;
      // With indices of the caller's the rows were filled with PROXYCCL_NO_ROW, and each must be taken once.
      if (call_.scatter == nullptr) {
        call_.layout.first_rows[row] = first;
      } else if (atomicExch(&call_.layout.first_rows[row], first) != PROXYCCL_NO_ROW) {
        storeRelaxedSystem<uint32_t>(&team_->report->bad_index, 1);
      }
      call_.layout.row_slots[row] = static_cast<int32_t>(k);
      if (call_.output_weights != nullptr)
        storeElement(call_.output_weights + static_cast<uint64_t>(row) * team_->weight_bytes, weightOf(source, i, k),
                     team_->weight_bytes);
    }
#pragma unroll 1
    for (uint32_t pair = group.lane; pair < topk_ * topk_; pair += kGroupLanes) {
      const int32_t row = space.row[pair / topk_], other = space.row[pair % topk_];
      if (row >= 0)
        call_.layout.token_rows[static_cast<uint64_t>(row) * topk_ + pair % topk_] =
            row == first && other >= 0 ? other : PROXYCCL_NO_ROW;
    }
  }

  const ExpertTeam team_;
  const ProxycclDispatch& call_;
  const uint64_t number_;
  const Announcement announced_;
  const uint32_t inbox_;  // which of the two, where ids are announced
  const uint32_t segment_, topk_;
  const Segment own_;
};

template <bool kAnnounced>
PROXYCCL_DEVICE void dispatchExperts(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  __shared__ uint32_t finished, taken;
  const Dispatch<kAnnounced> dispatch(experts, call);
  const Group group;
  const bool sends = call.phases & PROXYCCL_EXPERT_SEND, gathers = call.phases & PROXYCCL_EXPERT_GATHER;
  const bool receives = call.phases & (PROXYCCL_EXPERT_RECEIVE | PROXYCCL_EXPERT_LAYOUT);
  if (threadIdx.x == 0) finished = taken = 0;
  dispatch.enter();
  const bool last_thread = threadIdx.x == blockDim.x - 1;  // its group is the last that has something to send
  if (last_thread && receives && advance(experts, &experts.counters->dispatches) && !call.again)
    storeRelaxedDevice<uint64_t>(&experts.counters->routings, experts.counters->routings + 1);
  // Blocks that have no segment send while the others receive; where there is nothing else to do, all send.
  const bool apart = receives && experts.segments < experts.blocks;
  const uint32_t first = apart ? experts.segments : 0;
  if (sends && blockIdx.x >= first) dispatch.send(group, blockIdx.x - first, experts.blocks - first, &finished);
  if (dispatch.onlySends()) return;
  bool sound = true;
  typename Dispatch<kAnnounced>::Found found = {0, ~0u, ~0u};
  if (gathers && !kAnnounced) dispatch.forwardRouting();
  if (!call.again && (receives || (gathers && blockIdx.x == 0)))
    sound = kAnnounced ? dispatch.hear(&found) : dispatch.findRows(group, &found);
  if (receives && sound) dispatch.learnSources(found.rows);
  if (kAnnounced && sends) {
    if (!receives) syncThreadsSystem();
    if (group.number == Group::count() - 1) dispatch.tellSent(group);
  }
  // By one thread, as it waits for the bus; its group may come late to what is received.
  if (gathers && sound && blockIdx.x == 0 && threadIdx.x == 0) dispatch.report(found);
  if (!receives || !sound) return;
  dispatch.receive(group, &taken, found);
  if (blockIdx.x == 0 && !call.again && !kAnnounced) dispatch.keepCounts(found.rows);
  if (!kAnnounced) dispatch.acknowledge();
}

}  // namespace proxyccl

extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<false>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch)

// The same where ids are announced (ProxycclExperts.id_packets).
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_dispatch_announced(const ProxycclExperts experts, const ProxycclDispatch call) {
  ::proxyccl::dispatchExperts<true>(experts, call);
}
PROXYCCL_EXPORT_KERNEL(expert_dispatch_announced)

// matrix[rows][topk] = each row's value in the column of the slot that it is for, zero elsewhere: what combine must sum
// to bring a value for each row back to its slot.
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_spread(const char* values, const int32_t* row_slots, char* matrix, uint32_t rows, uint32_t topk,
                  uint32_t bytes) {
  using namespace proxyccl;
  forEach(static_cast<uint64_t>(rows) * topk, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x,
          [&](size_t i) {
            const size_t row = i / topk;
            const bool own = row_slots[row] == static_cast<int32_t>(i % topk);
            storeElement(matrix + i * bytes, own ? loadElement(values + row * bytes, bytes) : 0, bytes);
          });
}
PROXYCCL_EXPORT_KERNEL(expert_spread)

#endif
