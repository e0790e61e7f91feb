/* Reads a worker's trace, for observers. See observe.h. */
#include "observe.h"

/* Returns the number of the oldest record that the worker is not overwriting, given the number of published records. */
static uint64_t oldest(uint64_t traced) {
  enum { KEPT = PROXYCCL_TRACE_RECORDS - PROXYCCL_TRACE_UNPUBLISHED };
  return traced > KEPT ? traced - KEPT : 0;
}

/* Pairing trace-records, acquire: this load of the number of records comes before the loads of the records. */
static uint64_t traced_acquire(const ProxycclWorkerStats *stats) {
  return __atomic_load_n(&stats->traced, __ATOMIC_ACQUIRE);
}

/* Pairing trace-records, acquire: loads the number of records again after the loads of the records. The second number
 * shows which of the loaded records the worker may have overwritten. */
static uint64_t traced_behind_reads(const ProxycclWorkerStats *stats) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&stats->traced, __ATOMIC_RELAXED);
}

uint32_t proxyccl_trace_read(const ProxycclWorkerStats *stats, uint64_t *next, ProxycclTraceRecord *records,
                             uint32_t room, uint64_t *lost) {
  const uint64_t traced = traced_acquire(stats);
  uint64_t first = *next, end, kept;
  if (oldest(traced) > first) {
    *lost += oldest(traced) - first;
    first = oldest(traced);
  }
  end = traced - first > room ? first + room : traced;
  for (uint64_t i = first; i < end; ++i) {
    const ProxycclTraceRecord *record = &stats->records[i % PROXYCCL_TRACE_RECORDS];
    records[i - first].word0 = __atomic_load_n(&record->word0, __ATOMIC_RELAXED);
    records[i - first].word1 = __atomic_load_n(&record->word1, __ATOMIC_RELAXED);
  }
  *next = end;
  kept = oldest(traced_behind_reads(stats));
  if (kept <= first) return (uint32_t)(end - first);
  if (kept > end) kept = end;
  *lost += kept - first;
  for (uint64_t i = kept; i < end; ++i) records[i - kept] = records[i - first];
  return (uint32_t)(end - kept);
}
