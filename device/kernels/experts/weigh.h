// Does the local work of a backward pass: in one pass, multiplies rows by their weights, computes their scalar products
// with other rows, and clears rows that no dispatch has filled.
#pragma once

#include "experts/expert_team.h"

namespace proxyccl {

// Weighs one row; a group of threads calls the methods.
template <class T>
class WeighedRow {
 public:
  using A = typename Element<T>::Accumulator;

  PROXYCCL_DEVICE WeighedRow(const ProxycclWeighing& call, uint64_t row)
      : values_(reinterpret_cast<T*>(call.values) + row * call.hidden),
        others_(call.others == nullptr ? nullptr : reinterpret_cast<const T*>(call.others) + row * call.hidden),
        hidden_(call.hidden),
        units_((reinterpret_cast<uintptr_t>(call.values) | reinterpret_cast<uintptr_t>(call.others) |
                call.hidden * sizeof(T)) %
                           16 ==
                       0
                   ? hidden_ / kUnit
                   : 0) {}

  PROXYCCL_DEVICE void clear(const Group& group) const {
    for (uint64_t u = group.lane; u < units_; u += kGroupLanes) store128(values_ + u * kUnit, 0, 0);
    for (uint64_t i = units_ * kUnit + group.lane; i < hidden_; i += kGroupLanes) values_[i] = Element<T>::narrow(A{});
  }

  // If `scales` is true, multiplies the row by `weight`. Returns this thread's part of the scalar product of the row,
  // before the multiplication, and its row of `others`.
  PROXYCCL_DEVICE A weigh(const Group& group, A weight, bool scales) const {
    A sum{};
    for (uint64_t first = group.lane; first < units_; first += kAtOnce * kGroupLanes) {
      Bytes16 values[kAtOnce], others[kAtOnce] = {};
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const uint64_t u = first + k * kGroupLanes;
        if (u >= units_) continue;
        values[k] = reinterpret_cast<const Bytes16*>(values_)[u];
        if (others_ != nullptr) others[k] = reinterpret_cast<const Bytes16*>(others_)[u];
      }
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const uint64_t u = first + k * kGroupLanes;
        if (u >= units_) continue;
        Unit unit = __builtin_bit_cast(Unit, values[k]);
        const Unit other = __builtin_bit_cast(Unit, others[k]);
#pragma unroll
        for (uint32_t i = 0; i < kUnit; ++i) unit.at[i] = weighed(unit.at[i], other.at[i], weight, &sum);
        const Bytes16 made = __builtin_bit_cast(Bytes16, unit);
        if (scales) store128(values_ + u * kUnit, made.low, made.high);
      }
    }
    for (uint64_t i = units_ * kUnit + group.lane; i < hidden_; i += kGroupLanes) {
      const T scaled = weighed(values_[i], others_ == nullptr ? values_[i] : others_[i], weight, &sum);
      if (scales) values_[i] = scaled;
    }
    return sum;
  }

 private:
  static constexpr uint32_t kUnit = 16 / sizeof(T), kAtOnce = PROXYCCL_ON_HOST ? 1 : 4;
  struct alignas(16) Unit {
    T at[kUnit];
  };

  PROXYCCL_DEVICE T weighed(T value, T other, A weight, A* sum) const {
    const A wide = Element<T>::widen(value);
    if (others_ != nullptr) *sum += wide * Element<T>::widen(other);
    return Element<T>::narrow(weight * wide);
  }

  T* values_;
  const T* others_;
  uint64_t hidden_, units_;
};

// Multiplies rows by weights as ProxycclWeighing describes. Each product is rounded once.
template <class T>
PROXYCCL_DEVICE void expert_weigh(const ProxycclExperts&, const ProxycclWeighing& call) {
  using A = typename Element<T>::Accumulator;
  const Group group;
  for (uint64_t row = blockIdx.x * Group::count() + group.number; row < call.rows; row += gridDim.x * Group::count()) {
    const WeighedRow<T> own(call, row);
    const bool comes = (call.received == nullptr || row < static_cast<uint64_t>(*call.received)) &&
                       (call.row_slots == nullptr || call.row_slots[row] >= 0);
    A sum{};
    if (!comes) {
      own.clear(group);
    } else if (call.weights != nullptr || call.others != nullptr) {
      const A weight = call.weights == nullptr ? A{1} : static_cast<A>(call.weights[row]);
      sum = own.weigh(group, weight, call.weights != nullptr);
    }
    if (call.products == nullptr) continue;
#if !PROXYCCL_ON_HOST
    for (uint32_t distance = kGroupLanes / 2; distance > 0; distance /= 2) sum += shuffle(sum, group.lane ^ distance);
#endif
    if (group.lane == 0) call.products[row] = static_cast<float>(sum);
  }
}

}  // namespace proxyccl
