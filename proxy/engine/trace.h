/* Writes a worker's trace (observe.h): a ring of records. The worker overwrites records even if no observer has read
 * them.
 *
 * Reading the clock takes longer than issuing most triggers. So consecutive triggers that together take about
 * TRACE_CLOCK_INTERVAL_NS share one reading of the clock. A trigger that takes longer has its own reading. */
#pragma once

#include "clock.h"
#include "observe.h"

typedef struct {
  uint64_t next;  /* number of the next record */
  uint32_t share; /* number of triggers that share one reading of the clock; 0 until the first estimate */
} Trace;

enum { TRACE_CLOCK_INTERVAL_NS = 2000 };

static inline void trace_record(ProxycclTraceRecord *record, uint64_t word0, uint64_t word1) {
  __atomic_store_n(&record->word0, word0, __ATOMIC_RELAXED);
  __atomic_store_n(&record->word1, word1, __ATOMIC_RELAXED);
}

static inline void trace_trigger(ProxycclTraceRecord *record, ProxycclTrigger trigger) {
  trace_record(record, trigger.word0, trigger.word1 & ~(1ull << PROXYCCL_PARITY_SHIFT));
}

/* Returns the address of the next record. trace_room() returns how many records fit contiguously from this address
 * on. */
static inline ProxycclTraceRecord *trace_next(const Trace *trace, ProxycclWorkerStats *stats) {
  return &stats->records[trace->next % PROXYCCL_TRACE_RECORDS];
}

static inline uint32_t trace_room(const Trace *trace) {
  return (uint32_t)(PROXYCCL_TRACE_RECORDS - trace->next % PROXYCCL_TRACE_RECORDS);
}

static inline void trace_mark(Trace *trace, ProxycclWorkerStats *stats, ProxycclTraceMark mark, uint64_t number,
                              uint64_t now_ns) {
  ProxycclTraceRecord *record = trace_next(trace, stats);
  ++trace->next;
  trace_record(record, now_ns, 1ull << PROXYCCL_PARITY_SHIFT | (uint64_t)mark << PROXYCCL_MARK_SHIFT | number);
}

static inline void trace_seen(Trace *trace, ProxycclWorkerStats *stats, uint32_t ring, uint64_t ticket,
                              uint64_t now_ns) {
  trace_mark(trace, stats, PROXYCCL_MARK_SEEN, (uint64_t)ring << 48 | (ticket & ((1ull << 48) - 1)), now_ns);
}

/* Returns how many triggers should share the next reading of the clock, at most `most`. The last `triggers` triggers
 * took `took_ns` in total. */
static inline uint32_t trace_share(uint32_t triggers, uint64_t took_ns, uint32_t most) {
  const uint64_t share = (uint64_t)triggers * TRACE_CLOCK_INTERVAL_NS / (took_ns + 1);
  return share == 0 ? 1 : share > most ? most : (uint32_t)share;
}

/* Pairing trace-records, release: called before records are overwritten. A reader that has read part of a new record
 * sees in `traced` that the old record may have been overwritten. */
static inline void trace_begin(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

/* Pairing trace-records, release: the records are stored before their number. */
static inline void trace_publish(const Trace *trace, ProxycclWorkerStats *stats) {
  __atomic_store_n(&stats->traced, trace->next, __ATOMIC_RELEASE);
}

/* Returns the present time if an observer wants records, otherwise 0. Zeroes an expired request, unless the observer is
 * extending the request, so that later calls need not read the clock. Relaxed: the request orders nothing. */
static inline uint64_t trace_wanted(ProxycclWorkerStats *stats) {
  uint64_t until = __atomic_load_n(&stats->trace_until, __ATOMIC_RELAXED);
  if (__builtin_expect(until == 0, 1)) return 0;
  const uint64_t now = now_ns();
  trace_begin();
  if (now <= until) return now;
  __atomic_compare_exchange_n(&stats->trace_until, &until, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return 0;
}
