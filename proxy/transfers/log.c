/* Writes and reads the records of ended transfers, for `proxyccl trace`. See transfers.h. */
#include "parts.h"

void proxyccl_transfer_set_label(ProxycclTransfer *transfer, uint32_t label) { transfer->label = label; }

void log_end(const ProxycclTransfer *transfer, ProxycclTransferState state) {
  ProxycclTransferLog *log = transfer->agent->log;
  if (log == NULL || transfer->times.ended > __atomic_load_n(&log->until, __ATOMIC_RELAXED)) return;
  const uint64_t number = log->count;
  log->records[number % PROXYCCL_TRANSFER_RECORDS] = (ProxycclTransferRecord){
      .posted = transfer->times.posted,
      .ended = transfer->times.ended,
      .bytes = transfer->bytes,
      .blocks = transfer->blocks,
      .label = transfer->label,
      .writes = (uint16_t)transfer->writes,
      .state = (uint16_t)state,
  };
  __atomic_store_n(&log->count, number + 1, __ATOMIC_RELEASE);
}

uint32_t proxyccl_transfer_log_read(const ProxycclTransferLog *log, uint64_t *next, ProxycclTransferRecord *records,
                                    uint32_t room, uint64_t *lost) {
  const uint64_t count = __atomic_load_n(&log->count, __ATOMIC_ACQUIRE);
  uint64_t first = *next;
  *lost = 0;
  if (count - first >= PROXYCCL_TRANSFER_RECORDS) { /* a writer may be overwriting the oldest record */
    *lost = count - first - (PROXYCCL_TRANSFER_RECORDS - 1);
    first += *lost;
  }
  const uint32_t taken = count - first < room ? (uint32_t)(count - first) : room;
  for (uint32_t i = 0; i < taken; ++i) records[i] = log->records[(first + i) % PROXYCCL_TRANSFER_RECORDS];
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  /* Records that a writer has overwritten during the copy are lost too. */
  const uint64_t after = __atomic_load_n(&log->count, __ATOMIC_RELAXED);
  const uint64_t kept = after >= PROXYCCL_TRANSFER_RECORDS ? after - (PROXYCCL_TRANSFER_RECORDS - 1) : 0;
  const uint32_t gone = kept <= first ? 0 : kept - first < taken ? (uint32_t)(kept - first) : taken;
  memmove(records, records + gone, (taken - gone) * sizeof *records);
  *lost += gone;
  *next = first + taken;
  return taken - gone;
}
