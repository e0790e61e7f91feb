/* The worker's side of the trace (observe.h): a ring that is written over, whoever reads it.
 *
 * The clock takes longer than most triggers, so triggers that follow fast on each other share a look at it: as many as
 * took TRACE_CLOCK_INTERVAL_NS together, by the last look. One that takes longer has times of its own.
 */
#ifndef PROXYCCL_TRACE_H
#define PROXYCCL_TRACE_H

#include "observe.h"

typedef struct {
  uint64_t next;  /* number of the next record */
  uint32_t share; /* how many triggers share a look at the clock; 0: not known yet */
} Trace;

enum { TRACE_CLOCK_INTERVAL_NS = 2000 };

static inline void trace_record(ProxycclTraceRecord *record, uint64_t word0, uint64_t word1) {
  __atomic_store_n(&record->word0, word0, __ATOMIC_RELAXED);
  __atomic_store_n(&record->word1, word1, __ATOMIC_RELAXED);
}

static inline void trace_trigger(ProxycclTraceRecord *record, ProxycclTrigger trigger) {
  trace_record(record, trigger.word0, trigger.word1 & ~(1ull << PROXYCCL_PARITY_SHIFT));
}

/* Where the next record goes, and how many go there one behind the other. */
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

/* How many triggers share the next look, after so many took that long; at most `most`. */
static inline uint32_t trace_share(uint32_t triggers, uint64_t took_ns, uint32_t most) {
  const uint64_t share = (uint64_t)triggers * TRACE_CLOCK_INTERVAL_NS / (took_ns + 1);
  return share == 0 ? 1 : share > most ? most : (uint32_t)share;
}

/* Before what is written over: pairs with the acquire fence in proxyccl_trace_read(), which so learns of the last
 * store to `traced` at least. */
static inline void trace_begin(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

/* Tells readers of all that was written. Pairs with their acquire. */
static inline void trace_tell(const Trace *trace, ProxycclWorkerStats *stats) {
  __atomic_store_n(&stats->traced, trace->next, __ATOMIC_RELEASE);
}

#endif
