// The common part of the packet algorithms: their scratch memory, and values as packet payloads.
//
// A Form is the layout of data and flags in scratch memory: PacketForm, with one LL16Packet per thread, or LineForm
// (lines.h). In both forms a thread's part is called a packet.
//
// Blocks are independent: each block has its own epoch and its own packets on every rank, and exchanges packets only
// with the peers' blocks of the same number. All ranks launch the same grid, so blocks of the same number have the same
// epoch on all ranks.
//
// A packet's memory is reused two epochs later, by any rank and any algorithm. No flag protects the packet, because its
// reader has read it before the reuse. Proof: let rank x, in epoch e + 2, write a packet of rank y that y read in epoch
// e.
//   - If epochs e, e + 1 and e + 2 are in three different kernels, x has finished the kernel of epoch e + 1, so it has
//     received data that y sent in that kernel. So y had started that kernel, and had ended the kernel of epoch e.
//   - If epochs e + 1 and e + 2 are in one kernel, a thread has the same packets in both. Before the thread sends a
//     packet of epoch e + 2, it has received the packets of epoch e + 1 from the same thread of y. The thread of y sent
//     these packets after it had read its packets of epoch e, or after y had ended an earlier kernel with epoch e.
//   - If epochs e and e + 1 are in one kernel and epoch e + 2 in the next one, whose threads may have other packets,
//     all threads of x have finished epoch e + 1, so all threads of y had finished epoch e. The last epoch is padded
//     for this case: a thread with packets in epoch e must also have packets in epoch e + 1.
// The proof requires of every algorithm that a rank finishes an epoch only with data of every other rank.
#pragma once

#include "integers.h"
#include "proxyccl/proxyccl.h"
#include "packet_team.h"

namespace proxyccl {

template <class T>
struct alignas(8) PayloadOf {
  static constexpr uint32_t kCount = sizeof(LL16Packet::Payload) / sizeof(T);
  T values[kCount];

  PROXYCCL_DEVICE LL16Packet::Payload pack() const { return __builtin_bit_cast(LL16Packet::Payload, *this); }
  static PROXYCCL_DEVICE PayloadOf unpack(LL16Packet::Payload payload) {
    return __builtin_bit_cast(PayloadOf, payload);
  }
};

template <class T>
PROXYCCL_DEVICE bool isWholePayload(const T* array, uint64_t count, uint64_t i) {
  return reinterpret_cast<uintptr_t>(array) % sizeof(PayloadOf<T>) == 0 && (i + 1) * PayloadOf<T>::kCount <= count;
}
// Load and store payload number i of array[count]; values beyond the end are loaded as zero and not stored.
template <class T>
PROXYCCL_DEVICE PayloadOf<T> loadPayload(const T* array, uint64_t count, uint64_t i) {
  if (isWholePayload(array, count, i)) return reinterpret_cast<const PayloadOf<T>*>(array)[i];
  PayloadOf<T> payload{};
  for (uint32_t k = 0; k < PayloadOf<T>::kCount; ++k)
    if (i * PayloadOf<T>::kCount + k < count) payload.values[k] = array[i * PayloadOf<T>::kCount + k];
  return payload;
}
template <class T>
PROXYCCL_DEVICE void storePayload(T* array, uint64_t count, uint64_t i, const PayloadOf<T>& payload) {
  if (isWholePayload(array, count, i)) {
    reinterpret_cast<PayloadOf<T>*>(array)[i] = payload;
    return;
  }
  for (uint32_t k = 0; k < PayloadOf<T>::kCount; ++k)
    if (i * PayloadOf<T>::kCount + k < count) array[i * PayloadOf<T>::kCount + k] = payload.values[k];
}

// Reduces one payload's values in rank order, so that all ranks get the same bits.
template <class T, class Op, class Payload = LL16Packet::Payload>
class PacketReduction {
 public:
  explicit PROXYCCL_DEVICE PacketReduction(uint32_t ranks) : ranks_(ranks) {}

  PROXYCCL_DEVICE void operator()(uint32_t rank, const Payload& payload) {
    const Values values = __builtin_bit_cast(Values, payload);
#pragma unroll
    for (uint32_t k = 0; k < kCount; ++k) {
      const A value = contribution<T, Op>(values.values[k], ranks_);
      sums_[k] = rank == 0 ? value : Op::combine(sums_[k], value);
    }
  }
  PROXYCCL_DEVICE Payload finish() const {
    using E = Element<T>;
    if constexpr (sizeof(T) < sizeof(A) && sizeof(T) == 2) {
      Words result;
#pragma unroll
      for (uint32_t k = 0; k < kCount; k += 2)
        result.at[k / 2] = E::narrowTwo(finished<T, Op>(sums_[k], ranks_), finished<T, Op>(sums_[k + 1], ranks_));
      return __builtin_bit_cast(Payload, result);
    } else {
      Values result;
#pragma unroll
      for (uint32_t k = 0; k < kCount; ++k) result.values[k] = E::narrow(finished<T, Op>(sums_[k], ranks_));
      return __builtin_bit_cast(Payload, result);
    }
  }

 private:
  using A = typename Element<T>::Accumulator;
  static constexpr uint32_t kCount = sizeof(Payload) / sizeof(T);
  struct Values {
    T values[kCount];
  };
  struct Words {
    uint32_t at[sizeof(Payload) / sizeof(uint32_t)];
  };

  uint32_t ranks_;
  A sums_[kCount] = {};
};

// The form with one LL16Packet per thread. The data of a share are consecutive payloads.
struct PacketForm {
  using Payload = LL16Packet::Payload;
  using Words = LL16Packet::Words;
  static constexpr uint32_t kAtOnce = 8;
  using Chunk = Payload;

  // Calls body(p) for this thread's packets, which are the same in every epoch.
  template <class Body>
  static PROXYCCL_DEVICE void forEach(uint32_t packets, Body body) {
    proxyccl::forEach(packets, threadIdx.x, blockDim.x, body);
  }
  // Load and store the data of packet p of share `number`. array[count] consists of consecutive shares of `share`
  // payloads. Padding is neither loaded nor stored, because the memory beyond a share's end is the next share, which
  // other threads handle.
  template <class T>
  static PROXYCCL_DEVICE Payload load(const T* array, uint64_t count, uint64_t share, uint32_t number, uint64_t p) {
    return p < share ? loadPayload(array, count, number * share + p).pack() : Payload{};
  }
  template <class T>
  static PROXYCCL_DEVICE void store(T* array, uint64_t count, uint64_t share, uint32_t number, uint64_t p,
                                    const Payload& payload) {
    if (p < share) storePayload(array, count, number * share + p, PayloadOf<T>::unpack(payload));
  }

  // Calls body(c, chunk) for each chunk c of packet p's data; `chunk` is c's number in the share.
  template <class Index, class Body>
  static PROXYCCL_DEVICE void forChunks(Index p, Index share, Body body) {
    if (p < share) body(0, p);
  }
  static PROXYCCL_DEVICE Chunk chunkOf(const Payload& payload, uint32_t) { return payload; }
  static PROXYCCL_DEVICE void setChunk(Payload& payload, uint32_t, Chunk chunk) { payload = chunk; }

  static PROXYCCL_DEVICE void write(LL16Packet* slot, uint64_t p, const Payload& payload, uint32_t flag) {
    slot[p].write(payload, flag);
  }
  static PROXYCCL_DEVICE Words read(const LL16Packet* slot, uint64_t p) { return slot[p].load(); }
  static PROXYCCL_DEVICE bool carries(const Words& words, uint64_t, uint32_t flag) { return words.carries(flag); }
  static PROXYCCL_DEVICE uint64_t flagOf(const Words& words) { return words.low >> 32; }
  static PROXYCCL_DEVICE Payload payloadOf(const Words& words, uint64_t) { return words.payload(); }
  template <class Ready>
  static PROXYCCL_DEVICE bool wait(ProxycclControl* control, const WaitFor& what, Ready ready) {
    return waitUntil(control, what, ready);
  }
};

// Waits for packet p of a slot in local memory, which `peer` sends with this flag, and returns the packet's data.
template <class Form>
PROXYCCL_DEVICE typename Form::Payload receivePacket(ProxycclControl* control, uint32_t peer, const LL16Packet* slot,
                                                     uint64_t p, uint64_t flag) {
  typename Form::Words words;
  Form::wait(control, {PROXYCCL_WAIT_PACKET, peer, PROXYCCL_NO_CHANNEL, flag}, [&](uint64_t* seen) {
    words = Form::read(slot, p);
    *seen = Form::flagOf(words);
    return Form::carries(words, p, flag);
  });
  return Form::payloadOf(words, p);
}

template <class Form>
class Lanes {
 public:
  using Payload = typename Form::Payload;

  PROXYCCL_DEVICE explicit Lanes(const ProxycclPacketTeam& team)
      : team_(team), slots_(PROXYCCL_PACKET_SLOTS_PER_PEER * (team.world_size - 1)), epoch_(team.epochs[blockIdx.x]) {}

  // Calls body(first) for each epoch of the call; `first` is the number, among the call's packets, of the block's
  // packet 0 of the epoch. The kernel must not use this object afterwards.
  template <class Body>
  PROXYCCL_DEVICE void forEachEpoch(Body body) {
    for (uint32_t e = 0; e < team_.call_epochs; ++e) {
      body((static_cast<uint64_t>(e) * gridDim.x + blockIdx.x) * team_.epoch_packets);
      const uint32_t since_clear = epoch_ & (kClearInterval - 1);
      if (since_clear < 2) clear();
      if (since_clear == 2) fenceSystem();  // orders the peers' second clear() before this block's next packets
      ++epoch_;
    }
    __syncthreads();  // after this barrier, all threads have read the old epoch
    if (threadIdx.x == 0) team_.epochs[blockIdx.x] = epoch_;
  }

  // Calls body(p) for this thread's packets of an epoch, which are the same in every epoch.
  template <class Body>
  PROXYCCL_DEVICE void forEachPacket(Body body) const {
    Form::forEach(team_.epoch_packets, body);
  }

  // Loads and stores the data of packet p of the call in share `number` of an array.
  template <class T>
  PROXYCCL_DEVICE Payload load(const T* array, uint64_t count, uint32_t number, uint64_t p) const {
    return Form::load(array, count, team_.share, number, p);
  }
  template <class T>
  PROXYCCL_DEVICE void store(T* array, uint64_t count, uint32_t number, uint64_t p, const Payload& payload) const {
    Form::store(array, count, team_.share, number, p, payload);
  }

  PROXYCCL_DEVICE void send(uint32_t peer, uint32_t slot, uint64_t p, const Payload& payload) const {
    Form::write(slotAt(peer, slot), p, payload, flag());
  }
  // Sends a packet to every other rank. Each rank begins with the next rank, so that ranks begin with different peers.
  PROXYCCL_DEVICE void sendToAll(uint32_t slot, uint64_t p, const Payload& payload) const {
    for (uint32_t i = 1; i < team_.world_size; ++i) send(peerAt(i), slot, p, payload);
  }
  // Sends payload(rank) to every other rank. Several payloads are loaded before any is sent, because a store between
  // two loads would delay the second load.
  template <class PayloadFor>
  PROXYCCL_DEVICE void sendToEach(uint32_t slot, uint64_t p, PayloadFor payload) const {
    for (uint32_t first = 1; first < team_.world_size; first += kAtOnce) {
      Payload payloads[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i < team_.world_size) payloads[i] = payload(peerAt(first + i));
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i < team_.world_size) send(peerAt(first + i), slot, p, payloads[i]);
    }
  }

  PROXYCCL_DEVICE Payload receive(uint32_t peer, uint32_t slot, uint64_t p) const {
    return receivePacket<Form>(team_.control, peer, slotAt(team_.rank, slot), p, flag());
  }
  // Calls use(rank, payload) for every rank in turn: with `own` for this rank, and with the packet in slot first_slot +
  // rank for every other rank. Packets of several ranks are loaded concurrently, because a load takes longer than the
  // wait for the data.
  template <class Use>
  PROXYCCL_DEVICE void receiveFromAll(uint32_t first_slot, uint64_t p, const Payload& own, Use&& use) const {
    for (uint32_t first = 0; first < team_.world_size; first += kAtOnce) {
      typename Form::Words words[kAtOnce];
      WaitFor what = {PROXYCCL_WAIT_PACKET, first, PROXYCCL_NO_CHANNEL, flag()};
      Form::wait(team_.control, what, [&](uint64_t* seen) {
        bool complete = true;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          if (isPeer(first + i)) words[i] = Form::read(slotAt(team_.rank, first_slot + first + i), p);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          if (!isPeer(first + i) || Form::carries(words[i], p, flag())) continue;
          complete = false;
          what.peer = first + i;
          *seen = Form::flagOf(words[i]);
        }
        return complete;
      });
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + i >= team_.world_size) continue;
        Payload payload = own;
        if (isPeer(first + i)) payload = Form::payloadOf(words[i], p);
        use(first + i, payload);
      }
    }
  }

 private:
  static constexpr uint32_t kAtOnce = Form::kAtOnce;
  // Flags wrap after 2^32 epochs, but a packet may stay unused for longer. So before flags repeat, a block clears its
  // packets of both parities, at the end of the epochs that are 0 or 1 modulo kClearInterval.
  static constexpr uint32_t kClearInterval = 1u << 30;

  // Returns the epoch's flag: the epoch plus one. In the last epoch before the wrap this sum is 0, the content of
  // zeroed memory, so the flag is 1 << 31.
  PROXYCCL_DEVICE uint32_t flag() const { return epoch_ == ~0u ? 1u << 31 : epoch_ + 1; }
  PROXYCCL_DEVICE bool isPeer(uint32_t rank) const { return rank < team_.world_size && rank != team_.rank; }
  PROXYCCL_DEVICE uint32_t peerAt(uint32_t distance) const {
    const uint32_t peer = team_.rank + distance;
    return peer < team_.world_size ? peer : peer - team_.world_size;
  }
  // Returns this block's packets of the epoch's parity in the memory of rank `at`.
  PROXYCCL_DEVICE LL16Packet* packetsAt(uint32_t at) const {
    const uint32_t before = (2 * blockIdx.x + (epoch_ & 1)) * slots_;
    return reinterpret_cast<LL16Packet*>(team_.memory[at]) + static_cast<uint64_t>(before) * team_.slot_packets;
  }
  PROXYCCL_DEVICE LL16Packet* slotAt(uint32_t at, uint32_t slot) const {
    const uint32_t ranks = team_.world_size;
    const uint32_t place = slot < ranks ? slotOf(at, slot) : ranks - 1 + slotOf(at, slot - ranks);
    return packetsAt(at) + static_cast<uint64_t>(place) * team_.slot_packets;
  }

  // Clears the block's packets at the end of epoch e, when all threads have read them. No peer sends packets of epoch e
  // + 2 before it has this block's packets of epoch e + 1. Packets do not order other accesses, so each thread makes
  // two fences: one between clearing and its packets of epoch e + 1, and one at the end of epoch e + 1, between the
  // received packets and its packets of epoch e + 2.
  PROXYCCL_DEVICE void clear() const {
    __syncthreads();
    LL16Packet* packets = packetsAt(team_.rank);
    forEach(slots_ * team_.slot_packets, threadIdx.x, blockDim.x, [&](uint64_t p) { packets[p].write({0, 0}, 0); });
    syncThreadsSystem();
    fenceSystem();
  }

  const ProxycclPacketTeam& team_;
  uint32_t slots_;
  uint32_t epoch_;
};

}  // namespace proxyccl
