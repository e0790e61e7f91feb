// Accesses to single elements that another device may read or write at the same time.
//
// An element is accessed in pieces as large as its type's alignment, at most 16 bytes, each by one relaxed access of
// system scope. So an element whose size is its alignment (a number, a pointer, int4, a packet) is never seen half
// written. The exception is the host runtime, which splits an access of 16 bytes into two of 8; we assume that no GPU
// does. An element of several pieces may be seen half written.
#pragma once

#include "proxyccl/copy.h"

namespace proxyccl {

template <size_t Alignment>
struct PieceOf {
  using Type = Bytes16;
};
#define PROXYCCL_PIECE(alignment, T) \
  template <>                        \
  struct PieceOf<alignment> {        \
    using Type = T;                  \
  };
PROXYCCL_PIECE(1, uint8_t)
PROXYCCL_PIECE(2, uint16_t)
PROXYCCL_PIECE(4, uint32_t)
PROXYCCL_PIECE(8, uint64_t)
#undef PROXYCCL_PIECE

template <class T>
struct Pieces {
  static_assert(__is_trivially_copyable(T), "an element must be trivially copyable: its bytes are moved");
  using Piece = typename PieceOf<alignof(T)>::Type;
  static constexpr size_t kCount = sizeof(T) / sizeof(Piece);
  Piece pieces[kCount];
};

template <class Piece>
PROXYCCL_DEVICE void loadPiece(const Piece* from, Piece* to) {
  *to = loadRelaxedSystem(from);
}
template <class Piece>
PROXYCCL_DEVICE void storePiece(Piece* to, Piece piece) {
  storeRelaxedSystem(to, piece);
}

PROXYCCL_DEVICE void loadPiece(const Bytes16* from, Bytes16* to) { loadRelaxed128(&from->low, &to->low, &to->high); }
PROXYCCL_DEVICE void storePiece(Bytes16* to, Bytes16 piece) { storeRelaxed128(&to->low, piece.low, piece.high); }

/// Loads an element of any trivially copyable type. The access orders nothing.
/// @param from  aligned to T
template <class T>
PROXYCCL_DEVICE T loadElement(const T* from) {
  using Piece = typename Pieces<T>::Piece;
  Pieces<T> value;
#pragma unroll
  for (size_t i = 0; i < Pieces<T>::kCount; ++i) loadPiece(reinterpret_cast<const Piece*>(from) + i, &value.pieces[i]);
  return __builtin_bit_cast(T, value);
}

/// Stores an element of any trivially copyable type. The access orders nothing.
template <class T>
PROXYCCL_DEVICE void storeElement(T* to, const T& element) {
  using Piece = typename Pieces<T>::Piece;
  const auto value = __builtin_bit_cast(Pieces<T>, element);
#pragma unroll
  for (size_t i = 0; i < Pieces<T>::kCount; ++i) storePiece(reinterpret_cast<Piece*>(to) + i, value.pieces[i]);
}

}  // namespace proxyccl
