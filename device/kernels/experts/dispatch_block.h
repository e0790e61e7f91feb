// MoE dispatch as one block sees it: its data, where the data lies, and when it may be written.
//
// Its steps are in the other files, in the order in which a row goes through them: experts/dispatch_counts.h,
// experts/dispatch_ids.h or experts/dispatch_masks.h, then experts/dispatch_send.h and experts/dispatch_receive.h, or
// experts/dispatch_store.h if there are output buffers. experts/dispatch.h calls them in order.
#ifndef PROXYCCL_EXPERT_DISPATCH_BLOCK_H
#define PROXYCCL_EXPERT_DISPATCH_BLOCK_H

#include "experts/announcement_ids.h"
#include "experts/announcement_masks.h"

namespace proxyccl {

template <class T, class U>
constexpr bool kIsSame = false;
template <class T>
constexpr bool kIsSame<T, T> = true;

// The variant of a dispatch kernel. A is the kind of announcement, which needs a single node; with void the kernel
// announces nothing. T is the type of the elements that the kernel turns into float8 rows in output buffers; with
// uint8_t it stores rows as they are. A kernel with kOnlyStores serves only dispatches that one launch completes and
// whose rows go to output buffers, and is shorter.
template <class A, class T, bool kOnlyStores = false>
struct DispatchMode {
  using Announces = A;
  using Quantized = T;
  static constexpr bool kStores = kOnlyStores;
};

template <class A>
struct AnnouncementIf {
  using Type = A;
};
template <>
struct AnnouncementIf<void> {
  using Type = Announcement;  // an empty type
};

// One dispatch, as one block sees it.
template <class Mode>
class Dispatch {
 public:
  static constexpr bool kIds = kIsSame<typename Mode::Announces, IdAnnouncement>;
  static constexpr bool kFewMasks = kIsSame<typename Mode::Announces, MaskAnnouncement<false>>;
  static constexpr bool kSharedMasks = kIsSame<typename Mode::Announces, MaskAnnouncement<true>>;
  static constexpr bool kMasks = kFewMasks || kSharedMasks;
  static constexpr bool kAnnounced = kIds || kMasks;
  static constexpr bool kQuantizes = !kIsSame<typename Mode::Quantized, uint8_t>;
  static constexpr bool kOnlyStores = Mode::kStores;

  // What a rank learns from all ranks' counts.
  struct Gathered {
    uint32_t rows;                // rows that this rank receives
    uint32_t bad_rank, bad_slot;  // the first slot with a bad expert id, or ~0
    uint32_t wanted_tokens;       // the most tokens that any rank wants to send
  };

  PROXYCCL_DEVICE Dispatch(const ProxycclExperts& experts, const ProxycclDispatch& call)
      : team_(experts),
        call_(call),
        number_(experts.counters->dispatches + 1),
        choices_(experts, call),
        announced_(experts, experts.counters->routings + 1),
        inbox_(kSharedMasks ? 0
               : kAnnounced ? (experts.counters->routings + (call.redispatch ? 0 : 1)) % 2
                            : static_cast<uint32_t>(number_) & (experts.kept_calls - 1)),
        segment_(blockIdx.x % experts.segments),
        topk_(experts.topk),
        own_(Segment::of(call.tokens, segment_, experts.segments)) {}

  // Called by the block, before anything else. Sends first what other ranks wait for. Different threads do each part.
  PROXYCCL_DEVICE void begin() const {
    const bool routes = call_.phases & PROXYCCL_EXPERT_ROUTE, sends = call_.phases & PROXYCCL_EXPERT_SEND;
    if (blockIdx.x == 0 && threadIdx.x < 2) team_->counters->next_item[(number_ + 1) % 2][threadIdx.x] = 0;
    if constexpr (kIds)
      if (routes) announced_.send(call_);
    if constexpr (kMasks) {
      announced_.clear();
      __syncthreads();
      if (routes || (storesMasked() && !kSharedMasks)) announced_.collect(call_);
    }
    if (acknowledges() && (routes || sends) && !storesMasked()) awaitReaders();
    const bool writes = kAnnounced && routes && !onlySends();
    if ((writes || cachesIds()) && !storesMasked())
#pragma unroll 1
      for (uint32_t s = threadIdx.x; s < own_.tokens * topk_; s += blockDim.x) {
        const int32_t id = choices_.id(own_.begin * topk_ + s);
        if (cachesIds()) cachedIds()[s] = id;
        if (writes) writeId(s, id);
      }
    if (kAnnounced) {  // gather() starts from these values, without a barrier
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < countersUsed(); i += blockDim.x) bases()[i] = 0;
      if (threadIdx.x == 0) {
        announcedState() = {~0u, 0, false};
        ownRows() = {0, 0};
      }
    }
    if (crossesNodes() && threadIdx.x == 0) team_.batchFrom(team_->rank) = team_.batchOf(call_.tokens, segment_);
    team_.loadLookup();
    if constexpr (kMasks)
      if (routes) announced_.send(Group(), call_);
    if (kSharedMasks && routes)
      __syncthreads();  // arriving masks overwrite the memory in which the block's own masks were read
    if (!acknowledges() && (routes || call_.redispatch))
      raiseRead((threadIdx.x + blockDim.x / 2) % blockDim.x, number_ - 1);
    if (!acknowledges() && call_.redispatch) {
      awaitReaders();
      __syncthreads();
    }
    if (!kAnnounced && routes && !onlySends()) route();
  }

  // Called by the block: waits for the choices of all ranks. After that the block knows where the rows of its slots
  // begin. Returns false to all threads if the choices of some rank did not arrive.
  PROXYCCL_DEVICE bool gather(const Group& group, Gathered* gathered) const {
    if constexpr (kMasks) {
      return awaitMasks(gathered);
    } else if constexpr (kIds) {
      return awaitIds(gathered);
    } else {
      return gatherCounts(group, gathered);
    }
  }

  // -- counts (experts/dispatch_counts.h) ---
  // Called by the block: counts its slots by expert, and sends counts, slots and weights to all ranks.
  PROXYCCL_DEVICE void route() const;
  // Called by one thread per node of each block: the first block waits for the routing from this rank's counterpart on
  // that node, and raises the routing's flag on every rank of this node.
  PROXYCCL_DEVICE void forwardRouting() const;
  // gather() for dispatches by counts. bases()[expert * ranks + source] is the first row of this block's slots of a
  // source for an expert of this rank.
  PROXYCCL_DEVICE bool gatherCounts(const Group& group, Gathered* gathered) const;
  // Called by the block: sets the segments of all sources and this rank's range of rows. `rows` is from gatherCounts().
  PROXYCCL_DEVICE void prepareReceive(uint32_t rows) const;
  // Called by one thread: stores the number of received rows for the CPU.
  PROXYCCL_DEVICE void publishReceivedRows(const Gathered& gathered) const;
  // Called by the block. `first` holds how many rows each of this rank's experts gets from each source, and `before`
  // how many of these rows precede the rows of this block's slots. Replaces each number in `first` by the first row of
  // this block's slots of that expert and source. Returns the number of this rank's rows.
  PROXYCCL_DEVICE uint32_t placeRows(uint32_t* first, const uint32_t* before) const;
  // Called by the block. `rows` holds how many rows each of this rank's experts gets from each source. Adds the padding
  // up to a multiple of the alignment to the last source's rows. Block 0 tells the CPU how many rows each expert has.
  PROXYCCL_DEVICE void alignExperts(uint32_t* rows) const;
  // Called by one block: writes the counts of all ranks to the descriptor, and stores the largest number of rows of any
  // rank or, with padded rows, of any expert.
  PROXYCCL_DEVICE void writeCounts(uint32_t rows) const;

  // -- rows (experts/dispatch_send.h, experts/dispatch_receive.h) ---
  // Called by block `block` of the `blocks` that send: sends its share of all rows, from each segment in turn, in the
  // order in which the receivers take them. If every block sends and has a segment, its segment is its share.
  PROXYCCL_DEVICE void send(const Group& group, uint32_t block, uint32_t blocks, uint32_t* finished) const;
  // Called by a group, when a barrier has followed the block's stores of rows: raises one flag for all these rows on
  // every rank of the node. One release takes less time than a release in each group, and few rows arrive so close
  // together that no receiver would have started earlier.
  PROXYCCL_DEVICE void publishSent(const Group& group) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.raise(l, team_.sent(team_->rank, segment_), flagValue(number_, kAllItems));
  }
  // Called by every group when it has nothing else to do: receives the next item that no group has received, until
  // there are no more.
  PROXYCCL_DEVICE void receive(const Group& group, uint32_t* next_item, const Gathered& gathered) const;

  // Called by every block if there is one node and a token has a row for each rank: writes the descriptor's entries of
  // all tokens. A token has at most one row on this rank, so one thread handles each slot.
  PROXYCCL_DEVICE void describeSlots() const {
    if constexpr (kMasks) {
      describeMasked(blockIdx.x * blockDim.x + threadIdx.x, team_->blocks * blockDim.x);
    } else {
      describeCounted();
    }
  }

  // Called by each of `threads` threads of the grid, with a row for each rank: records for the rows past the last one
  // that they have chosen no expert.
  PROXYCCL_DEVICE void clearPastEnd(uint32_t rows, uint32_t thread, uint32_t threads) const {
    if (team_->chosen_per_rank == 0) return;
    const uint64_t first = static_cast<uint64_t>(rows) * topk_, end = static_cast<uint64_t>(call_.capacity) * topk_;
#pragma unroll 1
    for (uint64_t i = first + thread; i < end; i += threads) storeOwnExpert(i, PROXYCCL_NO_ROW);
  }

  // -- rows in output buffers (experts/dispatch_store.h) ---
  // Whether rows go to output buffers.
  PROXYCCL_DEVICE bool storesRows() const { return call_.output_buffer != 0; }
  PROXYCCL_DEVICE bool storesMasked() const {
    constexpr uint32_t kBoth = PROXYCCL_EXPERT_SEND | PROXYCCL_EXPERT_RECEIVE;
    return kOnlyStores || (kMasks && storesRows() && (call_.phases & kBoth) == kBoth);
  }
  // Whether, in a dispatch by counts, one kernel both counts and stores rows. Then the last block reports the counts to
  // the CPU, otherwise the first block does.
  PROXYCCL_DEVICE bool storesCounted() const {
    return !kAnnounced && storesRows() && call_.phases & PROXYCCL_EXPERT_SEND && movesRows();
  }
  // Called by the block when it has announced masks or, for the second function, sent counts: does the rest of the
  // dispatch.
  PROXYCCL_DEVICE void storeMaskedRows(const Group& group, uint32_t* next_item) const {
    if constexpr (kSharedMasks) {
      storeManyRows(group);
    } else {
      storeFewRows(group, next_item);
    }
  }
  PROXYCCL_DEVICE void storeCountedRows(const Group& group) const;
  // Called by a group: waits until every rank's block with this block's number has stored its rows.
  PROXYCCL_DEVICE void awaitStored(const Group& group) const {
#pragma unroll 1
    for (uint32_t source = group.lane; source < team_->world_size; source += kGroupLanes)
      team_.awaitSent(source, segment_, number_, kAllItems);
  }

  // Whether a call announces at its end that it has read its slabs. Otherwise the next call announces it at its
  // beginning.
  static PROXYCCL_DEVICE constexpr bool acknowledges() { return !kAnnounced || kSharedMasks; }
  // Called by the block when it has received: lets the node's ranks write their slabs again.
  PROXYCCL_DEVICE void acknowledge() const {
    __syncthreads();
    raiseRead(threadIdx.x, number_);
  }
  // Called by the block if data of some rank did not arrive: records that this call has not written its layout.
  PROXYCCL_DEVICE void giveUp() const {
    if (threadIdx.x == 0) storeRelaxedDevice<uint32_t>(&team_->counters->has_failed, 1);
  }
  // Called by one thread of each block of a call's last kernel, after all its threads have read the counters.
  PROXYCCL_DEVICE void countCall() const {
    if (advance(*team_, &team_->counters->dispatches) && !call_.redispatch)
      storeRelaxedDevice<uint64_t>(&team_->counters->routings, team_->counters->routings + 1);
  }

  // Whether the block has no segment.
  PROXYCCL_DEVICE bool onlySends() const { return blockIdx.x >= team_->segments; }
  PROXYCCL_DEVICE bool movesRows() const { return call_.phases & PROXYCCL_EXPERT_RECEIVE; }
  // Whether describeSlots(), rather than receive(), writes the descriptor's entries.
  PROXYCCL_DEVICE bool describesSlots() const {
    return team_->chosen_per_rank != 0 && team_->nodes == 1 && !call_.redispatch;
  }

 private:
  // Numbers the slots of each expert in order, stores them, and counts them. In a tile of slots each expert has one bit
  // per slot; a slot's number is how many of its expert's bits are set before its own.
  PROXYCCL_DEVICE void countSlots(uint32_t n, uint32_t* counts) const;
  // Called by the block, with a row for each rank: where several slots of a token have the same target, keeps only the
  // first of these slots.
  PROXYCCL_DEVICE void dropLaterTargets() const;
  // Returns the id under which slot s of this block's tokens counts; at least the number of experts if it does not
  // count.
  PROXYCCL_DEVICE uint32_t countedId(uint32_t s) const {
    return keepsTargets() ? keptTargets()[s] : static_cast<uint32_t>(idsOf(team_->node, own_.begin)[s]);
  }
  // Calls body(routing) with the routing of this block's segment on each rank of the node.
  template <class Body>
  PROXYCCL_DEVICE void toNode(Body body) const {
#pragma unroll 1
    for (uint32_t l = 0; l < team_->local_size; ++l) body(inbox(l, team_->local_rank) + team_.routingAt(segment_));
  }
  PROXYCCL_DEVICE void storeSlot(uint32_t s, const ProxycclExpertSlot& slot) const {
    toNode([&](char* routing) { slotsOf(routing)[s] = slot; });
  }
  // Whether the block keeps the targets of its tokens' slots while it counts them.
  PROXYCCL_DEVICE bool keepsTargets() const {
    return own_.tokens * topk_ <= PROXYCCL_KEPT_TARGETS && team_.experts() < 0xffff;
  }
  static PROXYCCL_DEVICE uint16_t* keptTargets() {
    __shared__ uint16_t targets[PROXYCCL_KEPT_TARGETS];
    return targets;
  }
  // Called by the block: for each node, numbers the segment's tokens that go to that node, so that the numbers follow
  // those of the batch's earlier segments. The rows of a batch lie one after the other in this order.
  PROXYCCL_DEVICE void placeTokens() const;
  // Called by the block: awaitRouting() waits for the counts of all ranks; hasRouting() then returns whether all
  // threads' waits succeeded. Each ends with a barrier.
  PROXYCCL_DEVICE void awaitRouting() const;
  PROXYCCL_DEVICE bool hasRouting() const {
    __shared__ bool is_aborted;
    if (threadIdx.x == 0) is_aborted = aborted(team_->control);
    __syncthreads();
    return !is_aborted;
  }
  // Called by the block before counts are added to outgoing(), which it clears.
  PROXYCCL_DEVICE void clearOutgoing() const {
#pragma unroll 1
    for (uint32_t rank = threadIdx.x; rank < team_->world_size; rank += blockDim.x)
      outgoing()[rank] = {0, rank == team_->rank ? call_.output_buffer : 0};
  }
  // Called by the block after clearOutgoing(): finds, for each rank, the first row on that rank of each segment of this
  // rank's tokens.
  PROXYCCL_DEVICE void placeOutgoing() const;
  // Finds, for each segment of each source, its first row on this rank. Returns the number of this rank's rows.
  PROXYCCL_DEVICE uint32_t placeIncoming() const;
  // The results of placeOutgoing() and placeIncoming(): [world_size][segments].
  PROXYCCL_DEVICE uint32_t* firstRowsThere() const {
    const uint32_t n = 2 * team_->world_size * team_->segments;
    return n <= kScratch ? scratch() : team_->bases + static_cast<uint64_t>(blockIdx.x) * n;
  }
  PROXYCCL_DEVICE uint32_t* firstRowsHere() const { return firstRowsThere() + team_->world_size * team_->segments; }
  enum class Stored { own, of_peers, all };  // rows that stay on this rank, that go to peers, or all
  // Called by each group of the blocks that store the rows of kind `stored`. For i < n, find(item, i, &rank, &row) says
  // to which rank and row an item, which is a piece of a row, goes.
  template <class Find>
  PROXYCCL_DEVICE void storeItems(const Group& group, Stored stored, uint32_t n, Find find) const;
  // Called by the block when it knows where the rows of many tokens go: stores them and writes the descriptor's
  // entries. Some blocks store rows at peers; in each of these blocks some groups first call describe(thread, threads),
  // while the rows of the other groups keep the link busy. The other blocks store the rows that stay on this rank,
  // because a multiprocessor's stores to its own memory would wait behind stores that a link holds up. Converting rows
  // to float8 takes longer than storing them, so then all blocks do both. Groups take the next item from a counter,
  // because not all multiprocessors store equally fast.
  template <class Describe, class Find>
  PROXYCCL_DEVICE void storeInTurns(const Group& group, uint32_t rows, uint32_t n, Describe describe, Find find) const;
  // Whether each block stores both rows that stay and rows for peers.
  PROXYCCL_DEVICE bool storesAll() const { return team_->blocks == 1 || kQuantizes; }
  // Returns how many blocks, from block 0 on, store rows at peers.
  PROXYCCL_DEVICE uint32_t storingBlocks() const { return storesAll() ? team_->blocks : team_->senders; }
  static PROXYCCL_DEVICE uint32_t describingGroups() { return Group::count() < 4 ? Group::count() : 4; }
  // With counts, called by `threads` threads: writes the descriptor's entries.
  PROXYCCL_DEVICE void describeAll(uint32_t thread, uint32_t threads) const;
  // With masks, storeFewRows(), for few tokens: the first blocks write the descriptor's entries, and the other blocks,
  // if any, store the rows, because loads wait for stores that a link holds up. storeManyRows() does the same for many
  // tokens.
  PROXYCCL_DEVICE void storeFewRows(const Group& group, uint32_t* next_item) const;
  PROXYCCL_DEVICE void storeManyRows(const Group& group) const;
  // Returns how many blocks write the entries of few tokens. There is an entry for each slot of all ranks.
  PROXYCCL_DEVICE uint32_t describingBlocks() const {
    const uint32_t wanted = (team_->world_size * team_->max_tokens * topk_ + kSlotsOfBlock - 1) / kSlotsOfBlock;
    const uint32_t most = team_->blocks < 8 ? 1 : team_->blocks / 8;  // the other blocks must fill the links
    return wanted < most ? wanted : most;
  }
  static constexpr uint32_t kSlotsOfBlock =
      1024;  // describing twice this number takes as long as storing the rows of 128 tokens
  // The two cases of describeSlots(): with counts; and with masks, for the slots of all blocks by `threads` threads.
  PROXYCCL_DEVICE void describeCounted() const;
  PROXYCCL_DEVICE void describeMasked(uint32_t thread, uint32_t threads) const;
  // With masks, called by `threads` threads: writes the descriptor's entries of this rank's own slots.
  PROXYCCL_DEVICE void describeSent(uint32_t thread, uint32_t threads) const;
  // For slot k of a token: the token's row on this rank, whether the slot is the first that sends the token to this
  // rank, and the slot's expert and weight.
  struct OwnChoice {
    int32_t row;
    bool is_first;
    uint32_t expert;  // number among all ranks' experts
    float weight;
  };
  // Called by one thread, with a row for each rank: writes the descriptor's entries of slot k of a source's token.
  PROXYCCL_DEVICE void describeSlot(uint32_t source, uint64_t token, uint32_t k, const OwnChoice& own) const;
  // With counts, returns the choice that describeSlot() takes. The segment's rows begin at `first`.
  template <class SlotOf>
  PROXYCCL_DEVICE OwnChoice findOwnChoice(uint32_t k, uint32_t first, uint64_t carried, SlotOf slotOf) const;
  // Called by a group: stores an item of a segment, which is a piece of a token's row and its scales, at each place
  // that find(i, &rank, &row) gives for i < n.
  template <class Find>
  PROXYCCL_DEVICE void storeRow(const Group& group, uint64_t token, const Segment& segment, uint32_t item, uint32_t n,
                                Find find) const;
  template <class Find>
  PROXYCCL_DEVICE void storeQuantized(const Group& group, uint64_t token, const Segment& segment, uint32_t item,
                                      uint32_t n, Find find) const;
  // Finds the rank that is candidate i < world_size for a row of one of this rank's tokens, and the row's number on
  // that rank. Returns false if that rank has no row of the token. This rank is the last candidate.
  PROXYCCL_DEVICE bool findMasked(uint32_t token, uint32_t i, uint32_t* rank, int32_t* row) const;
  // The words of the block's rows that a thread holds before it knows where they go: loads take about as long as
  // announcements. A group holds half a row of 14 KiB, so that of 128 such rows no group has two pieces.
  static constexpr uint32_t kHeldWords = PROXYCCL_ON_HOST ? 64 : 14;
  PROXYCCL_DEVICE bool holdsRows() const {
    const uint64_t misaligned = reinterpret_cast<uintptr_t>(call_.input) | call_.row_bytes;
    return !kQuantizes && call_.scale_bytes == 0 && misaligned % 16 == 0;
  }
  PROXYCCL_DEVICE uint32_t piecesOfRow() const {
    constexpr uint32_t kHeldBytes = kHeldWords * kGroupLanes * sizeof(Bytes16);
    return static_cast<uint32_t>((call_.row_bytes + kHeldBytes - 1) / kHeldBytes);
  }
  template <class Body>
  PROXYCCL_DEVICE void forEachWord(const Group& group, uint32_t piece, Body body) const {
    const uint32_t row_words = static_cast<uint32_t>(call_.row_bytes / sizeof(Bytes16)), pieces = piecesOfRow();
    const uint32_t words = (row_words + pieces - 1) / pieces, begin = piece % pieces * words;
    const uint32_t end = begin + words < row_words ? begin + words : row_words;
#pragma unroll
    for (uint32_t w = 0; w < kHeldWords; ++w)
      if (begin + group.lane + w * kGroupLanes < end) body(w, begin + group.lane + w * kGroupLanes);
  }
  // Three steps for a piece of one of this rank's rows, called by a group: load the piece; list its targets, which
  // needs only this rank's masks; store it.
  PROXYCCL_DEVICE void loadPiece(const Group& group, uint32_t piece, Bytes16* words) const {
    const uint64_t token = piece / piecesOfRow();
    const Bytes16* from = inGlobal(reinterpret_cast<const Bytes16*>(call_.input + token * call_.row_bytes));
    forEachWord(group, piece, [&](uint32_t w, uint32_t at) { words[w] = from[at]; });
  }
  PROXYCCL_DEVICE void listPiece(const Group& group, uint32_t piece) const;
  PROXYCCL_DEVICE void storePiece(const Group& group, uint32_t piece, const Bytes16* words) const;
  // Returns the number that a slot's row has on the slot's rank. The slot is one of this rank's tokens, and the rows of
  // its segment begin at `first`.
  PROXYCCL_DEVICE int32_t rowAtRank(const ProxycclExpertSlot& slot, uint32_t first) const {
    return slot.expert == PROXYCCL_NO_EXPERT ? static_cast<int32_t>(PROXYCCL_NO_ROW) : inBuffer(first + slot.position);
  }
  PROXYCCL_DEVICE int32_t inBuffer(uint32_t row) const {
    return row < team_->output_rows ? static_cast<int32_t>(row) : static_cast<int32_t>(PROXYCCL_PAST_END);
  }
  // A rank that named no buffer makes a different call than this rank. Records that error, and moves the rows for that
  // rank past the end of its buffer, so that none is stored.
  PROXYCCL_DEVICE void checkBufferOn(uint32_t rank) const {
    const WaitFor what = {PROXYCCL_WAIT_NONE, rank, PROXYCCL_NO_CHANNEL, 0};
    if (outgoing()[rank].buffer - 1 < team_->output_buffers) return;
    if (!aborted(team_->control)) recordError(team_->control, PROXYCCL_ERROR_MISMATCH, what, 0);
    atomicAdd(&outgoing()[rank].row, team_->output_rows);
  }
  PROXYCCL_DEVICE char* bufferOn(uint32_t rank) const {
    return team_.outputOf(team_.localOf(rank), outgoing()[rank].buffer);
  }

  // Called by one thread: writes the number of this rank's rows, and the largest number of rows of any rank.
  PROXYCCL_DEVICE void writeRowTotals(uint32_t rows, uint32_t most) const {
    const uint32_t received = rows < call_.capacity ? rows : call_.capacity;
    if (call_.received != nullptr) *call_.received = static_cast<int32_t>(received);
    if (most > loadRelaxedSystem(&team_->received_rows->most_rows))
      storeRelaxedSystem(&team_->received_rows->most_rows, most);
  }
  // Called by a group: writes these totals. rowsOf(rank), which is called once for each rank, returns how many rows
  // that rank or, with padded rows, its fullest expert gets.
  template <class RowsOf>
  PROXYCCL_DEVICE void writeTotals(const Group& group, uint32_t rows, RowsOf rowsOf) const;

  // gather() for dispatches by announcements, after which prepareReceive() has nothing to do.
  PROXYCCL_DEVICE bool awaitIds(Gathered* gathered) const;
  PROXYCCL_DEVICE bool awaitMasks(Gathered* gathered) const;
  // Finds the position of each slot in this block's segments: how many slots before it in its segment have the same
  // expert.
  PROXYCCL_DEVICE void numberOwnSlots() const;
  // Called by block 0, with a row for each rank: adds up the choices of each of this rank's experts.
  PROXYCCL_DEVICE void countChosen() const;
  // With masks, when they have arrived: placeLeaving() finds where the rows of this rank's tokens begin on each rank,
  // and placeArriving() where the rows of each source begin on this rank. After a barrier of the block, arriving()
  // returns the totals.
  PROXYCCL_DEVICE void placeLeaving(const Group& group) const;
  PROXYCCL_DEVICE void placeArriving(uint32_t thread, uint32_t threads) const;
  PROXYCCL_DEVICE Gathered arriving() const {
    const AnnouncedState& state = announcedState();
    const uint32_t bad_rank = state.bad_slot == ~0u ? ~0u : state.bad_slot >> 16;
    return {bases()[team_->world_size], bad_rank, bad_rank == ~0u ? ~0u : announced_.badSlot(bad_rank),
            state.wanted_tokens};
  }
  // With masks, returns the row on this rank of a source's token.
  PROXYCCL_DEVICE int32_t maskedRow(uint32_t source, uint32_t token) const {
    const auto mask = announced_.from(source);
    return mask.has(token) ? within(bases()[source] + mask.countBefore(token)) : static_cast<int32_t>(PROXYCCL_NO_ROW);
  }
  PROXYCCL_DEVICE int32_t within(uint64_t row) const {
    return row < call_.capacity ? static_cast<int32_t>(row) : static_cast<int32_t>(PROXYCCL_PAST_END);
  }
  // Whether the CPU wants to know how many slots chose each expert. It does only if it also waits for the number of
  // rows, and launches another kernel to move the rows.
  PROXYCCL_DEVICE bool tellsChosen() const {
    return team_->chosen_per_rank != 0 && call_.phases & PROXYCCL_EXPERT_TELL;
  }
  // Called by a group of each block: does what writeCounts() does, from the announcements.
  PROXYCCL_DEVICE void writeAnnouncedCounts(const Group& group, uint32_t rows) const {
    awaitPreviousReaders(group);
    if constexpr (kMasks) {
      if (blockIdx.x == 0) writeMaskCounts(group, rows);
    } else {
      writeIdCounts(group, rows);
    }
  }
  // Block b counts the choices of the sources b, b + segments, …; the last block also counts those of all sources.
  PROXYCCL_DEVICE void writeIdCounts(const Group& group, uint32_t rows) const;
  // Called by one group of the grid.
  PROXYCCL_DEVICE void writeMaskCounts(const Group& group, uint32_t rows) const;

  // Called by a group: writes an item of a part, if the part has one left, to every rank that needs the item, and
  // raises the part's flag on that rank.
  PROXYCCL_DEVICE void sendItem(const Group& group, uint32_t part, uint32_t round) const;

  // Called by a group of each block: the first block of a batch waits for the batch's rows from this rank's counterpart
  // on another node, and raises their flag on every rank of this node.
  PROXYCCL_DEVICE void forwardRows(const Group& group) const;
  // Called by a group: waits until an item of a source has arrived. In `arrived` the bit of a source is set once all
  // its items are known to have arrived, so that a group waits for them only once.
  PROXYCCL_DEVICE void awaitItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const;
  // Called by a group: copies an item of a source to the token's rows on this rank, if there are any.
  PROXYCCL_DEVICE void receiveItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const;
  // Called by a group: for each slot of token i of a source's segment, stores in space.row the slot's row on this rank.
  // Also writes the rows to the descriptor if `describe`.
  PROXYCCL_DEVICE void findTokenRows(const Group& group, uint32_t source, uint32_t i, bool describe) const;
  // Returns the row that a token's slot has on this rank, or PROXYCCL_NO_ROW or PROXYCCL_PAST_END.
  PROXYCCL_DEVICE int32_t rowOf(const ProxycclExpertSlot& slot, uint32_t source, uint64_t token, uint32_t k) const;
  // Called by a group: copies bytes [begin, end) of a row, which are scales, to the scales of each row that the group
  // has listed.
  PROXYCCL_DEVICE void copyScales(const Group& group, const char* from, uint64_t begin, uint64_t end) const;
  // Returns the index of one of a row's scales, for padded rows whose scales lie in columns.
  PROXYCCL_DEVICE uint64_t placeInColumn(uint32_t row, uint64_t columns, uint64_t column) const {
    const uint32_t expert = row / call_.padded_rows;
    return (expert * columns + column) * call_.scale_column + (row - expert * call_.padded_rows);
  }
  // Called by a group: writes the descriptor's entries of token i of a source's segment, if there is one.
  PROXYCCL_DEVICE void describeToken(const Group& group, uint32_t source, uint32_t i) const {
    if (i >= team_.segmentOf(source).tokens) return;
    findTokenRows(group, source, i, true);
    describeRows(group, source, i);
    group.sync();
  }
  // Called by a group: writes the descriptor's entries of a token's rows.
  PROXYCCL_DEVICE void describeRows(const Group& group, uint32_t source, uint32_t i) const;
  // Stores an entry of row_experts.
  PROXYCCL_DEVICE void storeOwnExpert(uint64_t entry, int32_t expert) const {
    if (call_.id_bytes == sizeof(int64_t))
      reinterpret_cast<int64_t*>(call_.layout.row_experts)[entry] = expert;
    else
      call_.layout.row_experts[entry] = expert;
  }
  // Called by a group, with a row for each rank: writes the token's choices on this rank.
  PROXYCCL_DEVICE void describeChoices(const Group& group, uint32_t source, uint32_t i, int32_t row) const;

  // Called by a group: waits, with acquire, until all ranks have read the block's data of the previous dispatch.
  PROXYCCL_DEVICE void awaitPreviousReaders(const Group& group) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.await(team_.read(l, segment_), number_ - 1, team_.nearRank(l));
  }
  // Raises this block's flag on every rank of the node: it has read all data up to call `number`.
  PROXYCCL_DEVICE void raiseRead(uint32_t thread, uint64_t number) const {
#pragma unroll 1
    for (uint32_t l = thread; l < team_->local_size; l += blockDim.x)
      team_.raiseBehindLoads(l, team_.read(team_->local_rank, segment_), number);
  }
  // Waits until the node's ranks have read the previous dispatch or, with kept_calls = 2, the dispatch before that, so
  // that its slabs can be written again. Every block reads the routing of all segments, but only the rows of its own
  // segment. A block that only sends writes the rows of all segments.
  PROXYCCL_DEVICE void awaitReaders() const {
    const bool rows_alone = kAnnounced || (call_.redispatch && team_->segments == team_->blocks);
    const uint32_t first = rows_alone ? segment_ : 0, count = rows_alone ? 1 : team_->segments;
#pragma unroll 1
    for (uint32_t i = (threadIdx.x + blockDim.x / 2) % blockDim.x; i < team_->local_size * count; i += blockDim.x)
      team_.await(team_.read(i / count, first + i % count), number_ - (kAnnounced ? 1 : team_->kept_calls),
                  team_.member(team_->node, i / count));
  }
  // Called by `threads` threads of the block: stores how many tokens each source has, and which of them are this
  // block's segment.
  PROXYCCL_DEVICE void setSegments(uint32_t thread, uint32_t threads) const {
#pragma unroll 1
    for (uint32_t s = thread; s < team_->world_size; s += threads) {
      uint32_t tokens = 0;
      if (call_.redispatch) {
        tokens = static_cast<uint32_t>(call_.layout.tokens[s]);
      } else {
        tokens = kAnnounced ? announced_.tokens(s) : segmentOf(s, 0).tokens;
      }
      tokensOf()[s] = tokens;
      team_.segmentOf(s) = Segment::of(tokens, segment_, team_->segments);
      // begin() has set this rank's segment, which other groups may still use to send.
      if (crossesNodes() && s != team_->rank) team_.batchFrom(s) = team_.batchOf(tokens, segment_);
    }
  }

  // Whether rows are padded. If so, the largest number of rows is that of an expert, otherwise that of a rank.
  PROXYCCL_DEVICE bool isPadded() const { return team_->padded_rows != 0; }
  // Rounds an expert's rows up, to include the gap after them.
  PROXYCCL_DEVICE uint32_t alignedRows(uint32_t rows) const {
    const uint32_t alignment = team_->expert_alignment;
    return alignment > 1 ? (rows + alignment - 1) / alignment * alignment : rows;
  }
  PROXYCCL_DEVICE bool crossesNodes() const { return !kAnnounced && team_->nodes > 1; }
  PROXYCCL_DEVICE bool isNear(uint32_t source) const { return kAnnounced || team_.isNear(source); }
  // Whether receive() writes the descriptor's entries apart from copying rows.
  PROXYCCL_DEVICE bool describesApart() const { return !call_.redispatch && (kAnnounced || describesSlots()); }

  // The ids under which this block's slots are counted, from the slots of token i of its segment on.
  PROXYCCL_DEVICE const int32_t* ownIds(uint32_t i) const {
    return (cachesIds() ? cachedIds() : idsOf(team_->node, own_.begin)) + i * topk_;
  }
  PROXYCCL_DEVICE bool cachesIds() const { return own_.tokens * topk_ <= PROXYCCL_ANNOUNCED_SEGMENT_SLOTS; }
  static PROXYCCL_DEVICE int32_t* cachedIds() {
    __shared__ int32_t ids[PROXYCCL_ANNOUNCED_SEGMENT_SLOTS];
    return ids;
  }

  // What the block's threads have found in the announcements.
  struct AnnouncedState {
    uint32_t bad_slot;  // the first slot with a bad expert id, with the slot's rank in the upper 16 bits, or ~0; with
                        // masks the rank
    uint32_t wanted_tokens;
    bool incomplete;  // whether a packet did not arrive
  };
  static PROXYCCL_DEVICE AnnouncedState& announcedState() {
    __shared__ AnnouncedState state;
    return state;
  }

  PROXYCCL_DEVICE uint32_t segmentSlots() const { return team_->segment_tokens * topk_; }
  // The positions of the slots in this block's segments, [ranks][segmentSlots()], if ids are announced.
  static PROXYCCL_DEVICE uint16_t* positions() {
    __shared__ uint16_t positions[PROXYCCL_ANNOUNCED_OWN_SLOTS];
    return positions;
  }
  // Returns slot k of token i of a source's segment.
  PROXYCCL_DEVICE ProxycclExpertSlot slotOf(uint32_t source, uint32_t i, uint32_t k) const {
    const uint32_t slot = i * topk_ + k;
    if constexpr (kIds) {
      const uint32_t expert = announced_.expert(source, team_.segmentOf(source).begin * topk_ + slot);
      if (expert >= team_.experts()) return {PROXYCCL_NO_EXPERT, 0};
      return {expert, positions()[source * segmentSlots() + slot]};
    }
    return slotsOf(routingOf(source))[slot];
  }
  PROXYCCL_DEVICE uint64_t weightOf(uint32_t source, uint32_t i, uint32_t k) const {
    const uint32_t slot = i * topk_ + k;
    if constexpr (kAnnounced) return announced_.carried(source, team_.segmentOf(source).begin * topk_ + slot);
    return weightIn(routingOf(source), slot);
  }
  PROXYCCL_DEVICE uint64_t weightIn(const char* routing, uint32_t slot) const {
    const uint32_t bytes = team_->weight_bytes;
    return loadRaw(routing + team_->weights_offset + static_cast<uint64_t>(slot) * bytes, bytes);
  }

  // -- a slab's routing ---
  PROXYCCL_DEVICE uint32_t* countsOf(const char* routing) const {
    return reinterpret_cast<uint32_t*>(const_cast<char*>(routing) + team_->counts_offset);
  }
  PROXYCCL_DEVICE ProxycclExpertSlot* slotsOf(const char* routing) const {
    return reinterpret_cast<ProxycclExpertSlot*>(const_cast<char*>(routing) + team_->slots_offset);
  }
  PROXYCCL_DEVICE int32_t* placesOf(const char* routing) const {
    return reinterpret_cast<int32_t*>(const_cast<char*>(routing) + team_->places_offset);
  }
  // The routing of this block's segment of a source.
  PROXYCCL_DEVICE const char* routingOf(uint32_t source) const { return slabOf(source) + team_.routingAt(segment_); }
  PROXYCCL_DEVICE const ProxycclExpertSegment& segmentOf(uint32_t source, uint32_t block) const {
    return *reinterpret_cast<const ProxycclExpertSegment*>(slabOf(source) + team_.routingAt(block));
  }

  // -- the descriptor ---
  // Writes the id of a slot of this block's tokens; an id that is out of range drops its slot.
  PROXYCCL_DEVICE void writeId(uint32_t slot, int32_t id) const {
    const uint32_t experts = team_.experts();
    idsOf(team_->node, own_.begin)[slot] = static_cast<uint32_t>(id) < experts ? id : static_cast<int32_t>(experts);
  }
  PROXYCCL_DEVICE int32_t* idsOf(uint32_t node, uint32_t token) const {
    return call_.layout.expert_ids + (static_cast<uint64_t>(node) * team_->max_tokens + token) * topk_;
  }
  PROXYCCL_DEVICE int32_t* sentPlaces(uint32_t node) const {
    return call_.layout.sent_places + static_cast<uint64_t>(node) * team_->max_tokens + own_.begin;
  }

  // -- shared by the block ---
  static PROXYCCL_DEVICE uint32_t* tokensOf() {
    __shared__ uint32_t tokens[PROXYCCL_MAX_EXPERT_RANKS];
    return tokens;
  }
  // For each rank: the first row on it of this rank's tokens or of this block's tokens, and the output buffer that the
  // rank named.
  struct Outgoing {
    uint32_t row, buffer;
  };
  static PROXYCCL_DEVICE Outgoing* outgoing() {
    __shared__ Outgoing outgoing[PROXYCCL_MAX_EXPERT_RANKS];
    return outgoing;
  }
  // Which rows of a table of all ranks' rows are this rank's.
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
  // With a row for each rank, in the block that reports them: how many slots chose each of this rank's experts. The
  // choices follow the bases, which are few in that case.
  PROXYCCL_DEVICE uint32_t* chosen() const { return bases() + 2 * team_.experts(); }
  PROXYCCL_DEVICE uint32_t countersUsed() const { return 2 * team_.experts() + team_->chosen_per_rank; }
  static constexpr uint32_t kStoredPiecesLog2 = 1,
                            kStoredPieces = 1u << kStoredPiecesLog2;  // pieces of a row, taken in turn
  static constexpr uint32_t kScratch = PROXYCCL_EXPERT_COUNTERS;
  static PROXYCCL_DEVICE uint32_t* scratch() {
    __shared__ uint32_t words[kScratch];
    return words;
  }

  // -- rows on their way ---
  // The inbox of rank `local` of the node for rows from rank `source_local`. If choices are announced, there are two
  // inboxes, for odd and for even announcements. A rank writes the rows of announcement n + 2 after it has received
  // announcement n + 1 of every rank, which each rank makes after it has read the rows of announcement n;
  // awaitPreviousReaders() acquires the flag that says so. A repeated dispatch uses the inbox of the last announcement,
  // and waits until all ranks have read it. If counts are sent, there is an inbox for each of the `kept_calls`.
  PROXYCCL_DEVICE char* inbox(uint32_t local, uint32_t source_local) const {
    return team_.inbox(inbox_, local, source_local);
  }
  // The data that `source` sent to this rank or its node.
  PROXYCCL_DEVICE char* slabOf(uint32_t source) const {
    const uint32_t local = team_.localOf(source), node = team_.nodeOf(source);
    return node == team_->node ? inbox(team_->local_rank, local) : team_.peer(local) + team_.rail(number_, node);
  }
  // Returns a row's offset in its slab, by its place among the rows of this block's segment.
  PROXYCCL_DEVICE uint64_t rowAt(uint32_t place) const {
    return team_.rowAt(segment_, place, rowStride(call_.row_bytes));
  }
  // Returns a row's offset in its slab, by its place in a batch that travels between nodes.
  PROXYCCL_DEVICE uint64_t batchRowAt(const Batch& batch, uint32_t place) const {
    return team_.rowAt(batch.first, place, rowStride(call_.row_bytes));
  }

  const ExpertTeam team_;
  const ProxycclDispatch& call_;
  const uint64_t number_;
  const Choices choices_;
  const typename AnnouncementIf<typename Mode::Announces>::Type announced_;
  const uint32_t inbox_;  // the number of the inbox that the call uses
  const uint32_t segment_, topk_;
  const Segment own_;
};

}  // namespace proxyccl

#endif
