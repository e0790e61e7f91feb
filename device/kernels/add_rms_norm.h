// Adds residuals to rows that another launch has reduced, and normalizes the rows (rms_norm.h). A kernel whose name
// ends with "_apart" takes arrays that are not aligned to 16 bytes, or rows whose size is not a multiple of 16 bytes.
#pragma once

#include "instance.h"
#include "rms_norm.h"

namespace proxyccl {

template <class Form, class T, bool kWhole>
PROXYCCL_DEVICE void addAndNorm(const Rows<T>& rows) {
  NormedRow<Form, T, kWhole, 1> row(rows);
  if (rows.weight != nullptr) row.forEachPacket([&](uint32_t epoch, uint32_t p) { row.keepWeights(epoch, p); });
  for (; row.exists(); row.goOn()) {
    row.forEachPacket([&](uint32_t epoch, uint32_t p) {
      row.take(epoch, p, row.load(epoch, p, row.number()), row.residual(epoch, p));
    });
    row.norm();
  }
}

template <class T>
PROXYCCL_DEVICE void add_rms_norm_packets(const Rows<T>& rows) {
  addAndNorm<PacketForm, T, true>(rows);
}
template <class T>
PROXYCCL_DEVICE void add_rms_norm_packets_apart(const Rows<T>& rows) {
  addAndNorm<PacketForm, T, false>(rows);
}
template <class T>
PROXYCCL_DEVICE void add_rms_norm_lines(const Rows<T>& rows) {
  addAndNorm<LineForm, T, true>(rows);
}
template <class T>
PROXYCCL_DEVICE void add_rms_norm_lines_apart(const Rows<T>& rows) {
  addAndNorm<LineForm, T, false>(rows);
}

}  // namespace proxyccl

#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                                 \
  PROXYCCL_TEAM_KERNEL name(PROXYCCL_ROWS_PARAMETERS(T)) { ::proxyccl::kernel<T>({PROXYCCL_ROWS_ARGUMENTS}); } \
  PROXYCCL_EXPORT_KERNEL(name)
