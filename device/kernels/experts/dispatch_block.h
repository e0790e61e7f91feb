// One block's part of a MoE dispatch: the block's data, the data's addresses, and when memory may be reused.
//
// experts/dispatch.h calls this class's methods, most of which other files define. Rows are numbered in
// experts/dispatch_counts.h, experts/dispatch_ids.h or experts/dispatch_masks.h. Rows are moved in
// experts/dispatch_send.h and experts/dispatch_receive.h or, to output buffers, in experts/dispatch_store.h. In this
// file, "by masks" and "by ids" mean a dispatch whose ranks announce masks or ids (experts/announcement.h), and "by
// counts" one whose ranks send counts.
#pragma once

#include "experts/announcement_ids.h"
#include "experts/announcement_masks.h"

namespace proxyccl {

template <class T, class U>
constexpr bool kIsSame = false;
template <class T>
constexpr bool kIsSame<T, T> = true;

// The template parameters of a dispatch kernel. A is the class by which the kernel announces choices, on one node only,
// or the base class `Announcement` if the kernel sends counts. T is the element type of rows that the kernel converts
// to float8 while it stores the rows in output buffers, or uint8_t if the kernel stores rows unchanged. kOnlyStores
// selects a kernel with less code, which serves only dispatches that one launch completes and whose rows go to output
// buffers.
template <class A, class T, bool kOnlyStores = false>
struct DispatchMode {
  using Announces = A;
  using Quantized = T;
  static constexpr bool kStores = kOnlyStores;
};

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

  struct Gathered {
    uint32_t rows;                // number of rows that this rank receives
    uint32_t bad_rank, bad_slot;  // the first slot whose expert id is out of range, or ~0
    uint32_t wanted_tokens;       // the greatest wanted_tokens of all ranks (ProxycclDispatch)
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

  // Called by the block, before anything else: sends the data for which other ranks wait.
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
    if (kAnnounced) {  // initial values for gather(), set here so that gather() needs no barrier
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
      __syncthreads();  // after this barrier, other ranks' masks may overwrite the memory from which the block sent its
                        // own
    if (!acknowledges() && (routes || call_.redispatch))
      raiseRead((threadIdx.x + blockDim.x / 2) % blockDim.x, number_ - 1);
    if (!acknowledges() && call_.redispatch) {
      awaitReaders();
      __syncthreads();
    }
    if (!kAnnounced && routes && !onlySends()) route();
  }

  // Called by the block: waits for the choices or counts of all ranks, and computes the first rows of the block's
  // slots. Returns false to all threads if some rank's data did not arrive.
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
  // Called by all blocks. In block 0, one thread per other node waits for the routing from this rank's counterpart on
  // that node, and raises the routing's flag on every rank of this node.
  PROXYCCL_DEVICE void forwardRouting() const;
  // gather() for dispatches by counts: for each of this rank's experts and each source, sets bases()[expert * ranks +
  // source] to the first row of this block's segment.
  PROXYCCL_DEVICE bool gatherCounts(const Group& group, Gathered* gathered) const;
  // Called by the block: sets the segments of all sources and this rank's range of rows. `rows` is this rank's number
  // of rows, from gatherCounts().
  PROXYCCL_DEVICE void prepareReceive(uint32_t rows) const;
  PROXYCCL_DEVICE void publishReceivedRows(const Gathered& gathered) const;
  // Called by the block. On entry, `first` has the number of rows that each of this rank's experts gets from each
  // source, and `before` the number of these rows that precede the rows of this block's segment. Replaces each number
  // in `first` by the first row of this block's segment for that expert and source. Returns the number of this rank's
  // rows.
  PROXYCCL_DEVICE uint32_t placeRows(uint32_t* first, const uint32_t* before) const;
  // Called by the block. `rows` has the number of rows that each of this rank's experts gets from each source. Pads an
  // expert's rows to a multiple of the alignment, by increasing the last source's number of rows. Block 0 also reports
  // each expert's number of rows to the CPU.
  PROXYCCL_DEVICE void alignExperts(uint32_t* rows) const;
  // Called by one block: writes the counts of all ranks to the layout, and updates most_rows.
  PROXYCCL_DEVICE void writeCounts(uint32_t rows) const;

  // -- rows (experts/dispatch_send.h, experts/dispatch_receive.h) ---
  // Called by the block with number `block` of the `blocks` blocks that send: sends its share of the rows of all
  // segments, in the order in which the receivers process them. If every block sends and has a segment, a block's share
  // is its segment.
  PROXYCCL_DEVICE void send(const Group& group, uint32_t block, uint32_t blocks, uint32_t* finished) const;
  // Called by a group, after a barrier that follows the block's stores of rows: raises one flag for all these rows on
  // every rank of the node. A release per group would take more time. The single release delays no receiver, because a
  // small dispatch's rows arrive at nearly the same time.
  PROXYCCL_DEVICE void publishSent(const Group& group) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.raise(l, team_.sent(team_->rank, segment_), flagValue(number_, kAllItems));
  }
  // Called by every group whose other work is done: receives items that no other group has taken, until none is left.
  PROXYCCL_DEVICE void receive(const Group& group, uint32_t* next_item, const Gathered& gathered) const;

  // Called by every block of a single node if tokens have one row per rank: writes all tokens' entries of the layout.
  PROXYCCL_DEVICE void describeSlots() const {
    if constexpr (kMasks) {
      describeMasked(blockIdx.x * blockDim.x + threadIdx.x, team_->blocks * blockDim.x);
    } else {
      describeCounted();
    }
  }

  // If tokens have one row per rank, marks the output's unused rows as rows without experts. Called by each of
  // `threads` threads of the grid.
  PROXYCCL_DEVICE void clearPastEnd(uint32_t rows, uint32_t thread, uint32_t threads) const {
    if (team_->chosen_per_rank == 0) return;
    const uint64_t first = static_cast<uint64_t>(rows) * topk_, end = static_cast<uint64_t>(call_.capacity) * topk_;
#pragma unroll 1
    for (uint64_t i = first + thread; i < end; i += threads) storeOwnExpert(i, PROXYCCL_NO_ROW);
  }

  // -- rows in output buffers (experts/dispatch_store.h) ---
  PROXYCCL_DEVICE bool storesRows() const { return call_.output_buffer != 0; }
  PROXYCCL_DEVICE bool storesMasked() const {
    constexpr uint32_t kBoth = PROXYCCL_EXPERT_SEND | PROXYCCL_EXPERT_RECEIVE;
    return kOnlyStores || (kMasks && storesRows() && (call_.phases & kBoth) == kBoth);
  }
  // Returns whether one kernel both counts and stores rows, in a dispatch by counts. If true, the last block reports
  // the counts to the CPU; if false, block 0 reports the counts.
  PROXYCCL_DEVICE bool storesCounted() const {
    return !kAnnounced && storesRows() && call_.phases & PROXYCCL_EXPERT_SEND && movesRows();
  }
  // Called by the block after it has announced masks (storeMaskedRows) or sent counts (storeCountedRows): executes the
  // rest of the dispatch.
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

  // Returns whether a call ends by signalling to the other ranks that this rank has read its slabs. If false, the next
  // call begins with this signal.
  static PROXYCCL_DEVICE constexpr bool acknowledges() { return !kAnnounced || kSharedMasks; }
  // Called by the block after it has received its rows: allows the node's ranks to write the slabs again.
  PROXYCCL_DEVICE void acknowledge() const {
    __syncthreads();
    raiseRead(threadIdx.x, number_);
  }
  // Called by the block if some rank's data did not arrive: records that this call has not written its layout.
  PROXYCCL_DEVICE void giveUp() const {
    if (threadIdx.x == 0) storeRelaxedDevice<uint32_t>(&team_->counters->has_failed, 1);
  }
  // Called by one thread of each block of a call's last kernel, after the block has read the counters: counts the call.
  PROXYCCL_DEVICE void countCall() const {
    if (advance(*team_, &team_->counters->dispatches) && !call_.redispatch)
      storeRelaxedDevice<uint64_t>(&team_->counters->routings, team_->counters->routings + 1);
  }

  PROXYCCL_DEVICE bool onlySends() const { return blockIdx.x >= team_->segments; }
  PROXYCCL_DEVICE bool movesRows() const { return call_.phases & PROXYCCL_EXPERT_RECEIVE; }
  PROXYCCL_DEVICE bool describesSlots() const {
    return team_->chosen_per_rank != 0 && team_->nodes == 1 && !call_.redispatch;
  }

 private:
  // For each expert, counts the segment's slots that chose the expert, and stores the number of each slot among the
  // slots of its expert. The function handles tiles of slots, with one bit per expert and slot: a slot's number in its
  // tile is the number of set bits of its expert before the slot's own bit.
  PROXYCCL_DEVICE void countSlots(uint32_t n, uint32_t* counts) const;
  // Called by the block if tokens have one row per rank: of a token's slots with the same target, keeps only the first.
  PROXYCCL_DEVICE void dropLaterTargets() const;
  // Returns the id under which slot s of this block's tokens is counted; if the slot is not counted, returns a value
  // not less than the number of experts.
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
  // Returns whether the block keeps the targets of its tokens' slots in shared memory while it counts the slots.
  PROXYCCL_DEVICE bool keepsTargets() const {
    return own_.tokens * topk_ <= PROXYCCL_KEPT_TARGETS && team_.experts() < 0xffff;
  }
  static PROXYCCL_DEVICE uint16_t* keptTargets() {
    __shared__ uint16_t targets[PROXYCCL_KEPT_TARGETS];
    return targets;
  }
  // Called by the block: for each node, numbers the segment's tokens that go to that node, beginning after the tokens
  // of the batch's earlier segments. The numbers are the positions of the tokens' rows in the batch.
  PROXYCCL_DEVICE void placeTokens() const;
  // Called by the block: awaitRouting() waits for the counts of all ranks; hasRouting() then returns whether all
  // threads' waits succeeded. Both end with a barrier of the block.
  PROXYCCL_DEVICE void awaitRouting() const;
  PROXYCCL_DEVICE bool hasRouting() const {
    __shared__ bool is_aborted;
    if (threadIdx.x == 0) is_aborted = aborted(team_->control);
    __syncthreads();
    return !is_aborted;
  }
  PROXYCCL_DEVICE void clearOutgoing() const {
#pragma unroll 1
    for (uint32_t rank = threadIdx.x; rank < team_->world_size; rank += blockDim.x)
      outgoing()[rank] = {0, rank == team_->rank ? call_.output_buffer : 0};
  }
  // Called by the block after clearOutgoing(): computes the first row of each of this rank's segments on each rank.
  PROXYCCL_DEVICE void placeOutgoing() const;
  // Computes the first row that each segment of each source has on this rank. Returns the number of this rank's rows.
  PROXYCCL_DEVICE uint32_t placeIncoming() const;
  // The results of placeOutgoing() and placeIncoming(): [world_size][segments].
  PROXYCCL_DEVICE uint32_t* firstRowsThere() const {
    const uint32_t n = 2 * team_->world_size * team_->segments;
    return n <= kScratch ? scratch() : team_->bases + static_cast<uint64_t>(blockIdx.x) * n;
  }
  PROXYCCL_DEVICE uint32_t* firstRowsHere() const { return firstRowsThere() + team_->world_size * team_->segments; }
  enum class Stored { own, of_peers, all };  // rows for this rank itself, for its peers, or for both
  // Stores the rows of kind `stored`, in items that are pieces of rows. Each group of the storing blocks calls
  // storeItems(). For i < n, find(item, i, &rank, &row) gives a rank and the row on that rank to which an item goes.
  template <class Find>
  PROXYCCL_DEVICE void storeItems(const Group& group, Stored stored, uint32_t n, Find find) const;
  // Called by the block when the targets of many tokens' rows are known: stores the rows and writes the layout's
  // entries. Some blocks store rows to peers; in each of these blocks some groups first call describe(thread, threads),
  // while the other groups' rows keep the links busy. The other blocks store the rows for this rank, because a
  // multiprocessor's stores to local memory would wait behind its stores over a busy link. If rows are converted to
  // float8, which takes longer than storing them, all blocks store rows for peers and for this rank. Groups take the
  // next item from a counter, because not all multiprocessors store equally fast.
  template <class Describe, class Find>
  PROXYCCL_DEVICE void storeInTurns(const Group& group, uint32_t rows, uint32_t n, Describe describe, Find find) const;
  PROXYCCL_DEVICE bool storesAll() const { return team_->blocks == 1 || kQuantizes; }
  PROXYCCL_DEVICE uint32_t storingBlocks() const { return storesAll() ? team_->blocks : team_->senders; }
  static PROXYCCL_DEVICE uint32_t describingGroups() { return Group::count() < 4 ? Group::count() : 4; }
  PROXYCCL_DEVICE void describeAll(uint32_t thread, uint32_t threads) const;
  // Store the rows and write the layout's entries in a dispatch by masks. In storeFewRows(), for few tokens, the first
  // blocks write the entries and the other blocks, if any, store the rows, because a block's loads wait behind its
  // stores over a busy link.
  PROXYCCL_DEVICE void storeFewRows(const Group& group, uint32_t* next_item) const;
  PROXYCCL_DEVICE void storeManyRows(const Group& group) const;
  // Returns the number of blocks that write the layout's entries, one for each slot of all ranks, in storeFewRows().
  PROXYCCL_DEVICE uint32_t describingBlocks() const {
    const uint32_t wanted = (team_->world_size * team_->max_tokens * topk_ + kSlotsOfBlock - 1) / kSlotsOfBlock;
    const uint32_t most = team_->blocks < 8 ? 1 : team_->blocks / 8;  // so that the other blocks saturate the links
    return wanted < most ? wanted : most;
  }
  static constexpr uint32_t kSlotsOfBlock =
      1024;  // writing the entries of 2048 slots takes as long as storing the rows of 128 tokens
  // The two implementations of describeSlots(). In a dispatch by counts, each block describes its own slots. In a
  // dispatch by masks, `threads` threads describe the slots of all blocks.
  PROXYCCL_DEVICE void describeCounted() const;
  PROXYCCL_DEVICE void describeMasked(uint32_t thread, uint32_t threads) const;
  // Called by `threads` threads, in a dispatch by masks: writes the layout's entries of this rank's tokens.
  PROXYCCL_DEVICE void describeSent(uint32_t thread, uint32_t threads) const;
  // A slot of a token: the token's row on this rank, whether the slot is the first that sends the token to this rank,
  // and the slot's expert and weight.
  struct OwnChoice {
    int32_t row;
    bool is_first;
    uint32_t expert;  // the expert's number among all ranks' experts
    float weight;
  };
  PROXYCCL_DEVICE void describeSlot(uint32_t source, uint64_t token, uint32_t k, const OwnChoice& own) const;
  // Returns the argument `own` of describeSlot() for slot k, in a dispatch by counts. `first` is the segment's first
  // row on this rank.
  template <class SlotOf>
  PROXYCCL_DEVICE OwnChoice findOwnChoice(uint32_t k, uint32_t first, uint64_t carried, SlotOf slotOf) const;
  // Called by a group: stores an item (a piece of a token's row, with its scales) to each rank and row that find(i,
  // &rank, &row) returns for i < n.
  template <class Find>
  PROXYCCL_DEVICE void storeRow(const Group& group, uint64_t token, const Segment& segment, uint32_t item, uint32_t n,
                                Find find) const;
  template <class Find>
  PROXYCCL_DEVICE void storeQuantized(const Group& group, uint64_t token, const Segment& segment, uint32_t item,
                                      uint32_t n, Find find) const;
  // Finds the i-th rank after this one (i < world_size), and the row that one of this rank's tokens has on the found
  // rank. Returns false if the found rank has no row of the token.
  PROXYCCL_DEVICE bool findMasked(uint32_t token, uint32_t i, uint32_t* rank, int32_t* row) const;
  // The number of 16-byte words of a row that a thread loads while the block waits for announcements; these loads take
  // about as long as the wait. A group's words hold half a row of 14 KiB. In a dispatch of 128 such rows, each group
  // then has at most one half row to store.
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
  // A group calls these functions for a piece of one of this rank's rows: loadPiece() loads the piece; listPiece()
  // lists its targets, which needs only this rank's own masks; storePiece() stores it.
  PROXYCCL_DEVICE void loadPiece(const Group& group, uint32_t piece, Bytes16* words) const {
    const uint64_t token = piece / piecesOfRow();
    const Bytes16* from = inGlobal(reinterpret_cast<const Bytes16*>(call_.input + token * call_.row_bytes));
    forEachWord(group, piece, [&](uint32_t w, uint32_t at) { words[w] = from[at]; });
  }
  PROXYCCL_DEVICE void listPiece(const Group& group, uint32_t piece) const;
  PROXYCCL_DEVICE void storePiece(const Group& group, uint32_t piece, const Bytes16* words) const;
  // Returns the number of a token's row on the rank of its slot's expert. `first` is the segment's first row there.
  PROXYCCL_DEVICE int32_t rowAtRank(const ProxycclExpertSlot& slot, uint32_t first) const {
    return slot.expert == PROXYCCL_NO_EXPERT ? static_cast<int32_t>(PROXYCCL_NO_ROW) : inBuffer(first + slot.position);
  }
  PROXYCCL_DEVICE int32_t inBuffer(uint32_t row) const {
    return row < team_->output_rows ? static_cast<int32_t>(row) : static_cast<int32_t>(PROXYCCL_PAST_END);
  }
  // If a rank has named no output buffer, because it makes a different call, records an error, and moves the rows for
  // that rank past the end of its buffer, so that none of the rows is stored.
  PROXYCCL_DEVICE void checkBufferOn(uint32_t rank) const {
    const WaitFor what = {PROXYCCL_WAIT_NONE, rank, PROXYCCL_NO_CHANNEL, 0};
    if (outgoing()[rank].buffer - 1 < team_->output_buffers) return;
    if (!aborted(team_->control)) recordError(team_->control, PROXYCCL_ERROR_MISMATCH, what, 0);
    atomicAdd(&outgoing()[rank].row, team_->output_rows);
  }
  PROXYCCL_DEVICE char* bufferOn(uint32_t rank) const {
    return team_.outputOf(team_.localOf(rank), outgoing()[rank].buffer);
  }

  PROXYCCL_DEVICE void writeRowTotals(uint32_t rows, uint32_t most) const {
    const uint32_t received = rows < call_.capacity ? rows : call_.capacity;
    if (call_.received != nullptr) *call_.received = static_cast<int32_t>(received);
    if (most > loadRelaxedSystem(&team_->received_rows->most_rows))
      storeRelaxedSystem(&team_->received_rows->most_rows, most);
  }
  // Called by a group: computes the totals and writes them by writeRowTotals(). rowsOf(rank), called once for each
  // rank, returns the number of rows of the rank or, with padded rows, of its fullest expert.
  template <class RowsOf>
  PROXYCCL_DEVICE void writeTotals(const Group& group, uint32_t rows, RowsOf rowsOf) const;

  // The implementations of gather() for dispatches by ids and by masks, in which prepareReceive() does nothing.
  PROXYCCL_DEVICE bool awaitIds(Gathered* gathered) const;
  PROXYCCL_DEVICE bool awaitMasks(Gathered* gathered) const;
  // Computes the position of each slot in this block's segments: the number of earlier slots of its segment with the
  // same expert.
  PROXYCCL_DEVICE void numberOwnSlots() const;
  // Called by one block if tokens have one row per rank: counts the slots that chose each of this rank's experts.
  PROXYCCL_DEVICE void countChosen() const;
  // From the masks of all ranks, placeLeaving() computes the first row of this rank's tokens on each rank, and
  // placeArriving() the first row of each source on this rank. After a barrier of the block, arriving() returns the
  // totals.
  PROXYCCL_DEVICE void placeLeaving(const Group& group) const;
  PROXYCCL_DEVICE void placeArriving(uint32_t thread, uint32_t threads) const;
  PROXYCCL_DEVICE Gathered arriving() const {
    const AnnouncedState& state = announcedState();
    const uint32_t bad_rank = state.bad_slot == ~0u ? ~0u : state.bad_slot >> 16;
    return {bases()[team_->world_size], bad_rank, bad_rank == ~0u ? ~0u : announced_.badSlot(bad_rank),
            state.wanted_tokens};
  }
  PROXYCCL_DEVICE int32_t maskedRow(uint32_t source, uint32_t token) const {
    const auto mask = announced_.from(source);
    return mask.has(token) ? within(bases()[source] + mask.countBefore(token)) : static_cast<int32_t>(PROXYCCL_NO_ROW);
  }
  PROXYCCL_DEVICE int32_t within(uint64_t row) const {
    return row < call_.capacity ? static_cast<int32_t>(row) : static_cast<int32_t>(PROXYCCL_PAST_END);
  }
  // Returns whether the CPU has asked for the number of slots that chose each expert. The CPU asks only if it also
  // waits for the number of rows and launches another kernel to move the rows.
  PROXYCCL_DEVICE bool tellsChosen() const {
    return team_->chosen_per_rank != 0 && call_.phases & PROXYCCL_EXPERT_TELL;
  }
  // Called by a group of each block: do the work of writeCounts() in a dispatch by announcements. writeIdCounts()
  // counts the choices of each source: block b handles sources b, b + segments, …; the last block also counts the
  // choices of all sources together.
  PROXYCCL_DEVICE void writeIdCounts(const Group& group, uint32_t rows) const;
  PROXYCCL_DEVICE void writeMaskCounts(const Group& group, uint32_t rows) const;

  // Called by a group: writes item number `round` of a part, if the part has this item, to every rank that needs the
  // item, and raises the part's flag on those ranks.
  PROXYCCL_DEVICE void sendItem(const Group& group, uint32_t part, uint32_t round) const;

  // Called by a group of each block: the first block of a batch waits for the batch's message from this rank's
  // counterpart on another node, and raises the batch's flag on every rank of this node.
  PROXYCCL_DEVICE void forwardRows(const Group& group) const;
  // Called by a group: waits until an item of a source has arrived. A source's bit in `arrived` is set when all items
  // of the source are known to have arrived, so that a group waits for a source only once.
  PROXYCCL_DEVICE void awaitItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const;
  // Called by a group: copies an item of a source to the rows that the item's token has on this rank.
  PROXYCCL_DEVICE void receiveItem(const Group& group, uint32_t item, uint32_t source, uint64_t* arrived) const;
  // Called by a group: for each slot of a segment's token i, stores the number of the slot's row on this rank in
  // space.row and, if `describe`, in the layout.
  PROXYCCL_DEVICE void findTokenRows(const Group& group, uint32_t source, uint32_t i, bool describe) const;
  // Returns a slot's row on this rank, or PROXYCCL_NO_ROW or PROXYCCL_PAST_END.
  PROXYCCL_DEVICE int32_t rowOf(const ProxycclExpertSlot& slot, uint32_t source, uint64_t token, uint32_t k) const;
  // Called by a group: copies scales, bytes [begin, end) of a sent row, to the scales of each row in the group's list.
  PROXYCCL_DEVICE void copyScales(const Group& group, const char* from, uint64_t begin, uint64_t end) const;
  // Returns the index of one of a row's scales if rows are padded and their scales are stored column by column.
  PROXYCCL_DEVICE uint64_t placeInColumn(uint32_t row, uint64_t columns, uint64_t column) const {
    const uint32_t expert = row / call_.padded_rows;
    return (expert * columns + column) * call_.scale_column + (row - expert * call_.padded_rows);
  }
  PROXYCCL_DEVICE void describeToken(const Group& group, uint32_t source, uint32_t i) const {
    if (i >= team_.segmentOf(source).tokens) return;
    findTokenRows(group, source, i, true);
    describeRows(group, source, i);
    group.sync();
  }
  PROXYCCL_DEVICE void describeRows(const Group& group, uint32_t source, uint32_t i) const;
  PROXYCCL_DEVICE void storeOwnExpert(uint64_t entry, int32_t expert) const {
    if (call_.id_bytes == sizeof(int64_t))
      reinterpret_cast<int64_t*>(call_.layout.row_experts)[entry] = expert;
    else
      call_.layout.row_experts[entry] = expert;
  }
  PROXYCCL_DEVICE void describeChoices(const Group& group, uint32_t source, uint32_t i, int32_t row) const;

  // Called by a group: waits, by an acquire, until all ranks have read the block's data of the previous dispatch.
  PROXYCCL_DEVICE void awaitPreviousReaders(const Group& group) const {
#pragma unroll 1
    for (uint32_t l = group.lane; l < team_->local_size; l += kGroupLanes)
      team_.await(team_.read(l, segment_), number_ - 1, team_.nearRank(l));
  }
  // On every rank of the node, raises the flag for this block to `number`, the last call whose data the block has read.
  PROXYCCL_DEVICE void raiseRead(uint32_t thread, uint64_t number) const {
#pragma unroll 1
    for (uint32_t l = thread; l < team_->local_size; l += blockDim.x)
      team_.raiseBehindLoads(l, team_.read(team_->local_rank, segment_), number);
  }
  // Waits until the node's ranks have read the slabs that this dispatch reuses: those of the previous dispatch or, with
  // kept_calls = 2, of the one before it. Every block reads the routing of all segments, but only the rows of its own
  // segment. So this block waits for one block per rank if it writes only rows of its own segment, otherwise for all
  // blocks.
  PROXYCCL_DEVICE void awaitReaders() const {
    const bool rows_alone = kAnnounced || (call_.redispatch && team_->segments == team_->blocks);
    const uint32_t first = rows_alone ? segment_ : 0, count = rows_alone ? 1 : team_->segments;
#pragma unroll 1
    for (uint32_t i = (threadIdx.x + blockDim.x / 2) % blockDim.x; i < team_->local_size * count; i += blockDim.x)
      team_.await(team_.read(i / count, first + i % count), number_ - (kAnnounced ? 1 : team_->kept_calls),
                  team_.member(team_->node, i / count));
  }
  // Called by `threads` threads of the block: sets this block's segment of each source.
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
      // This rank's own batch was set by begin(), and is not set again, because groups may be reading it.
      if (crossesNodes() && s != team_->rank) team_.batchFrom(s) = team_.batchOf(tokens, segment_);
    }
  }

  // Returns whether rows are padded. most_rows is then the largest number of rows of any expert, otherwise of any rank.
  PROXYCCL_DEVICE bool isPadded() const { return team_->padded_rows != 0; }
  PROXYCCL_DEVICE uint32_t alignedRows(uint32_t rows) const {
    const uint32_t alignment = team_->expert_alignment;
    return alignment > 1 ? (rows + alignment - 1) / alignment * alignment : rows;
  }
  PROXYCCL_DEVICE bool crossesNodes() const { return !kAnnounced && team_->nodes > 1; }
  PROXYCCL_DEVICE bool isNear(uint32_t source) const { return kAnnounced || team_.isNear(source); }
  PROXYCCL_DEVICE bool describesApart() const { return !call_.redispatch && (kAnnounced || describesSlots()); }

  // Returns the ids under which this block's slots are counted, from token i of its segment on.
  PROXYCCL_DEVICE const int32_t* ownIds(uint32_t i) const {
    return (cachesIds() ? cachedIds() : idsOf(team_->node, own_.begin)) + i * topk_;
  }
  PROXYCCL_DEVICE bool cachesIds() const { return own_.tokens * topk_ <= PROXYCCL_ANNOUNCED_SEGMENT_SLOTS; }
  static PROXYCCL_DEVICE int32_t* cachedIds() {
    __shared__ int32_t ids[PROXYCCL_ANNOUNCED_SEGMENT_SLOTS];
    return ids;
  }

  struct AnnouncedState {
    uint32_t bad_slot;  // the first slot whose expert id is out of range, with its rank in the upper 16 bits, or ~0; in
                        // a dispatch by masks only the rank
    uint32_t wanted_tokens;
    bool incomplete;  // whether a packet did not arrive
  };
  static PROXYCCL_DEVICE AnnouncedState& announcedState() {
    __shared__ AnnouncedState state;
    return state;
  }

  PROXYCCL_DEVICE uint32_t segmentSlots() const { return team_->segment_tokens * topk_; }
  // Returns the positions, in a dispatch by ids, of the slots in this block's segments: [ranks][segmentSlots()].
  static PROXYCCL_DEVICE uint16_t* positions() {
    __shared__ uint16_t positions[PROXYCCL_ANNOUNCED_OWN_SLOTS];
    return positions;
  }
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
  PROXYCCL_DEVICE const char* routingOf(uint32_t source) const { return slabOf(source) + team_.routingAt(segment_); }
  PROXYCCL_DEVICE const ProxycclExpertSegment& segmentOf(uint32_t source, uint32_t block) const {
    return *reinterpret_cast<const ProxycclExpertSegment*>(slabOf(source) + team_.routingAt(block));
  }

  // -- the layout ---

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
  // For each rank r: the first row that this rank's tokens have on rank r, and the output buffer that rank r named.
  struct Outgoing {
    uint32_t row, buffer;
  };
  static PROXYCCL_DEVICE Outgoing* outgoing() {
    __shared__ Outgoing outgoing[PROXYCCL_MAX_EXPERT_RANKS];
    return outgoing;
  }
  // The range of this rank's rows in the sequence of all ranks' rows.
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
  // Returns an array with one counter for each of this rank's experts: the number of slots that chose the expert. Only
  // the block that reports to the CPU counts, and only if tokens have one row per rank. The array follows bases(),
  // which is short if tokens have one row per rank.
  PROXYCCL_DEVICE uint32_t* chosen() const { return bases() + 2 * team_.experts(); }
  PROXYCCL_DEVICE uint32_t countersUsed() const { return 2 * team_.experts() + team_->chosen_per_rank; }
  static constexpr uint32_t kStoredPiecesLog2 = 1,
                            kStoredPieces = 1u << kStoredPiecesLog2;  // pieces of a row; storeItems() stores them as
                                                                      // separate items
  static constexpr uint32_t kScratch = PROXYCCL_EXPERT_COUNTERS;
  static PROXYCCL_DEVICE uint32_t* scratch() {
    __shared__ uint32_t words[kScratch];
    return words;
  }

  // -- rows on their way ---

  // Returns the inbox of rank `local` of the node for rows from rank `source_local`. In a dispatch by announcements,
  // odd and even announcements have separate inboxes. A rank writes the rows of announcement n + 2 only after it has
  // received announcement n + 1 of every rank. Every rank makes announcement n + 1 only after it has read the rows of
  // announcement n (awaitPreviousReaders()). A repeated dispatch uses the inbox of the last announcement, and waits
  // until all ranks have read that inbox. In a dispatch by counts, there are `kept_calls` inboxes.
  PROXYCCL_DEVICE char* inbox(uint32_t local, uint32_t source_local) const {
    return team_.inbox(inbox_, local, source_local);
  }
  PROXYCCL_DEVICE char* slabOf(uint32_t source) const {
    const uint32_t local = team_.localOf(source), node = team_.nodeOf(source);
    return node == team_->node ? inbox(team_->local_rank, local) : team_.peer(local) + team_.rail(number_, node);
  }
  // Returns the offset, in the slab, of row `place` of this block's segment.
  PROXYCCL_DEVICE uint64_t rowAt(uint32_t place) const {
    return team_.rowAt(segment_, place, rowStride(call_.row_bytes));
  }
  // Returns the offset, in the slab, of row `place` of a batch, which is sent between nodes.
  PROXYCCL_DEVICE uint64_t batchRowAt(const Batch& batch, uint32_t place) const {
    return team_.rowAt(batch.first, place, rowStride(call_.row_bytes));
  }

  const ExpertTeam team_;
  const ProxycclDispatch& call_;
  const uint64_t number_;
  const Choices choices_;
  const typename Mode::Announces announced_;
  const uint32_t inbox_;
  const uint32_t segment_, topk_;
  const Segment own_;
};

}  // namespace proxyccl
