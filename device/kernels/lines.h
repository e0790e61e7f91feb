// Packets of whole lines: eight threads exchange 240 bytes of data in two lines of 128 bytes; the last 8 bytes of each
// line are its flag (NCCL's LL128 protocol). So 15 of 16 bytes are data; in an LL16Packet, 8 of 16 are. One instruction
// of a warp stores a line, which arrives whole, so the flag shows that the whole line has arrived. If lines may be
// torn, the flag is stored after the line's data and loaded before it.
//
// Data is in units of 16 bytes. Thread t of the eight has unit t and, except for thread 7, unit 8 + t. Line 0 holds
// units 0 to 6 and the first half of unit 7; line 1 holds units 8 to 14 and the second half of unit 7. A thread stores
// its own units in the lines, so threads exchange no values.
#pragma once

#include "integers.h"
#include "packets.h"
#include "proxyccl/element.h"
#include "reduce_ranks.h"

namespace proxyccl {

// Returns whether a unit lies within an array of bytes that can be accessed as words of 4 bytes, such as a share of a
// gather of float32 values.
template <class T>
PROXYCCL_DEVICE bool isInWords(const T* array, uint64_t count, uint64_t unit) {
  return sizeof(T) == 1 && reinterpret_cast<uintptr_t>(array) % 4 == 0 && (unit + 1) * 16 <= count;
}
// Load and store a unit of array[count]; values beyond the end are loaded as zero and not stored. The last unit, and
// all units of an unaligned array, are moved by words or by values, in a loop that is not unrolled, because the kernels
// contain many copies of the code.
template <class T>
PROXYCCL_DEVICE Bytes16 loadUnit(const T* array, uint64_t count, uint64_t unit) {
  constexpr uint32_t kWide = 16 / sizeof(T);
  const uint64_t begin = unit * kWide;
  if (isAligned16(array) && begin + kWide <= count)
    return __builtin_bit_cast(Bytes16, Pack<T, kWide>::load(array + begin));
  if (isInWords(array, count, unit)) return loadUnit(reinterpret_cast<const uint32_t*>(array), count / 4, unit);
  Bytes16 bytes = {};
#pragma unroll 1
  for (uint32_t k = 0; k < kWide && begin + k < count; ++k) {
    const uint64_t bits = __builtin_bit_cast(typename PieceOf<sizeof(T)>::Type, array[begin + k]);
    const uint32_t shift = 8 * sizeof(T) * k;
    if (shift < 64)
      bytes.low |= bits << shift;
    else
      bytes.high |= bits << (shift - 64);
  }
  return bytes;
}
template <class T>
PROXYCCL_DEVICE void storeUnit(T* array, uint64_t count, uint64_t unit, Bytes16 bytes) {
  constexpr uint32_t kWide = 16 / sizeof(T);
  const uint64_t begin = unit * kWide;
  if (isAligned16(array) && begin + kWide <= count)
    return __builtin_bit_cast(Pack<T, kWide>, bytes).store(array + begin);
  if (isInWords(array, count, unit)) return storeUnit(reinterpret_cast<uint32_t*>(array), count / 4, unit, bytes);
#pragma unroll 1
  for (uint32_t k = 0; k < kWide && begin + k < count; ++k) {
    const uint32_t shift = 8 * sizeof(T) * k;
    const uint64_t bits = shift < 64 ? bytes.low >> shift : bytes.high >> (shift - 64);
    array[begin + k] = __builtin_bit_cast(T, static_cast<typename PieceOf<sizeof(T)>::Type>(bits));
  }
}

// A packet is one thread's part of two lines; the data of a share are consecutive units. All threads of a warp call
// each function together, for consecutive packets p.
struct LineForm {
  // A thread's two units of data; the last of eight threads has no second unit.
  struct Payload {
    Bytes16 units[2];
  };
  struct Words {
    Bytes16 lines[2];
  };
  static constexpr uint32_t kAtOnce = 4;
  using Chunk = Bytes16;

  // Returns the number of packets of `units` units, padded to whole warps.
  static PROXYCCL_DEVICE uint32_t packetsOf(uint64_t units) {
    return static_cast<uint32_t>(divideUp(units, kWarpLines * kUnits)) * kWarpLines * kThreads;
  }
  // The numbers of packets and of threads are multiples of a warp's size, so the threads of a warp do not diverge.
  template <class Body>
  static PROXYCCL_DEVICE void forEach(uint32_t packets, Body body) {
#pragma unroll 1
    for (uint32_t p = threadIdx.x; p < packets; p += blockDim.x) body(p);
  }
  template <class T>
  static PROXYCCL_DEVICE Payload load(const T* array, uint64_t count, uint64_t share, uint32_t number, uint64_t p) {
    Payload payload{};
    forChunks(p, share,
              [&](uint32_t u, uint64_t unit) { payload.units[u] = loadUnit(array, count, number * share + unit); });
    return payload;
  }
  template <class T>
  static PROXYCCL_DEVICE void store(T* array, uint64_t count, uint64_t share, uint32_t number, uint64_t p,
                                    const Payload& payload) {
    forChunks(p, share,
              [&](uint32_t u, uint64_t unit) { storeUnit(array, count, number * share + unit, payload.units[u]); });
  }

  // Calls body(u, unit) for each unit u of packet p that is in the share; `unit` is u's number in the share.
  template <class Index, class Body>
  static PROXYCCL_DEVICE void forChunks(Index p, Index share, Body body) {
    const Index unit = p / kThreads * kUnits + p % kThreads;
    if (unit < share) body(0, unit);
    if (!hasFlag(p) && unit + kThreads < share) body(1, unit + kThreads);
  }
  static PROXYCCL_DEVICE Chunk chunkOf(const Payload& payload, uint32_t u) { return payload.units[u]; }
  static PROXYCCL_DEVICE void setChunk(Payload& payload, uint32_t u, Chunk chunk) { payload.units[u] = chunk; }

  static PROXYCCL_DEVICE void write(LL16Packet* slot, uint64_t p, const Payload& payload, uint64_t flag) {
    uint64_t* const words = wordsIn(slot, p);
    const bool flagged = hasFlag(p);
    const Bytes16 first = payload.units[0], second = payload.units[1];
#if PROXYCCL_WHOLE_LINES
    syncWarp();  // rejoins threads after a branch, so that one instruction stores a whole line
    storePacket128(words, first.low, flagged ? flag : first.high);
    storePacket128(words + kLineWords, flagged ? first.high : second.low, flagged ? flag : second.high);
#else
    if (flagged) {
      storeRelaxedSystem(words, first.low);
      storeRelaxedSystem(words + kLineWords, first.high);
    } else {
      storePacket128(words, first.low, first.high);
      storePacket128(words + kLineWords, second.low, second.high);
    }
    fenceSystem();
    syncWarp();
    if (flagged) {
      storeRelaxedSystem(words + 1, flag);
      storeRelaxedSystem(words + kLineWords + 1, flag);
    }
#endif
  }
  static PROXYCCL_DEVICE Words read(const LL16Packet* slot, uint64_t p) {
    const uint64_t* const words = wordsIn(slot, p);
    Words result;
#if PROXYCCL_WHOLE_LINES
    syncWarp();  // rejoins threads after a branch, so that one instruction loads a line's data and its flag
    loadLines(words, &result);
#else
    const bool flagged = hasFlag(p);
    if (flagged) {
      result.lines[0].high = loadRelaxedSystem(words + 1);
      result.lines[1].high = loadRelaxedSystem(words + kLineWords + 1);
      fenceSystem();
    }
    syncWarp();
    if (flagged) {  // the flag and the data next to it need separate loads
      result.lines[0].low = loadRelaxedSystem(words);
      result.lines[1].low = loadRelaxedSystem(words + kLineWords);
    } else {
      loadLines(words, &result);
    }
#endif
    return result;
  }
  static PROXYCCL_DEVICE bool carries(const Words& words, uint64_t p, uint64_t flag) {
    return !hasFlag(p) || (words.lines[0].high == flag && words.lines[1].high == flag);
  }
  static PROXYCCL_DEVICE uint64_t flagOf(const Words& words) { return words.lines[0].high; }
  static PROXYCCL_DEVICE Payload payloadOf(const Words& words, uint64_t p) {
    const Bytes16 first = words.lines[0], second = words.lines[1];
    return hasFlag(p) ? Payload{{{first.low, second.low}, {}}} : Payload{{first, second}};
  }
  // Like waitUntil(), but waits until all threads of the warp are ready or one of them gives up.
  template <class Ready>
  static PROXYCCL_DEVICE bool wait(ProxycclControl* control, const WaitFor& what, Ready ready) {
    uint64_t seen = 0, started = 0;
    for (uint32_t spins = 0;; ++spins) {
      const bool is_ready = ready(&seen);
      if (ballotWarp(!is_ready) == 0) return true;
      if (spins % kSpinsPerCheck == kFirstCheck) {
        if (!is_ready) started = checkWait(control, what, seen, started);
        if (ballotWarp(!is_ready && started == 0) != 0) return false;
      }
      spinHint(spins);
    }
  }

 private:
  static constexpr uint32_t kThreads = 8, kUnits = 15, kLineWords = 2 * kThreads;
  static constexpr uint32_t kWarpLines = 4;  // pairs of lines that the 32 threads of a warp store

  static PROXYCCL_DEVICE bool hasFlag(uint64_t p) { return p % kThreads == kThreads - 1; }
  // Returns the thread's words in line 0; its words in line 1 are kLineWords further on.
  static PROXYCCL_DEVICE uint64_t* wordsIn(const LL16Packet* slot, uint64_t p) {
    return const_cast<uint64_t*>(reinterpret_cast<const uint64_t*>(slot + p / kThreads * 2 * kThreads + p % kThreads));
  }
  static PROXYCCL_DEVICE void loadLines(const uint64_t* words, Words* result) {
    loadPacket128(words, &result->lines[0].low, &result->lines[0].high);
    loadPacket128(words + kLineWords, &result->lines[1].low, &result->lines[1].high);
  }
};

}  // namespace proxyccl
