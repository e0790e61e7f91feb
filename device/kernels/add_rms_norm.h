// Adds residuals to rows and norms the rows (rms_norm.h), for rows that another launch has reduced.
#pragma once

#include "instance.h"
#include "rms_norm.h"

namespace proxyccl {

template <class Form, class T>
PROXYCCL_DEVICE void addAndNorm(const Rows<T>& rows) {
  NormedRow<Form, T, false, 1> row(rows);
  if (rows.weight != nullptr) row.forEachPacket([&](uint32_t epoch, uint32_t p) { row.keepWeights(epoch, p); });
  for (; row.exists(); row.goOn()) {
    row.forEachPacket(
        [&](uint32_t epoch, uint32_t p) { row.take(epoch, p, row.load(epoch, p), row.residual(epoch, p)); });
    row.norm();
  }
}

template <class T>
PROXYCCL_DEVICE void add_rms_norm_packets(const Rows<T>& rows) {
  addAndNorm<PacketForm>(rows);
}
template <class T>
PROXYCCL_DEVICE void add_rms_norm_lines(const Rows<T>& rows) {
  addAndNorm<LineForm>(rows);
}

}  // namespace proxyccl

#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                                 \
  PROXYCCL_TEAM_KERNEL name(PROXYCCL_ROWS_PARAMETERS(T)) { ::proxyccl::kernel<T>({PROXYCCL_ROWS_ARGUMENTS}); } \
  PROXYCCL_EXPORT_KERNEL(name)
