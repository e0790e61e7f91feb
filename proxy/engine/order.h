/* Memory order: each choice of the engine is one operation, named for what it does. Its comment names the pairing that
 * it belongs to; device/include/MEMORY_ORDER.md lists all of them. Pairings that only one file uses are in that file:
 * ring.h, trace.h and observe.c, calls.c, thread.c, staged_transport.c.
 */
#ifndef PROXYCCL_ORDER_H
#define PROXYCCL_ORDER_H

#include <stddef.h>
#include <stdint.h>

#include "proxyccl/control.h"

struct Schedule;

/* -- counters and statistics: each has one writer, and readers in other processes ---
 *
 * Relaxed: they order nothing. Atomic: no reader may see half of a value. */

static inline void counter_add(uint64_t *counter, uint64_t amount) {
  __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + amount, __ATOMIC_RELAXED);
}

static inline void counter_set(uint64_t *counter, uint64_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELAXED);
}

/* -- words that somebody waits for: a peer's semaphore, a flush word, a staged connection's counts --- */

/* Pairings signal, flush, bell, post, ticket and staged-signal, release, where the CPU stores the word.
 * Semaphore::wait, waitFlushed, waitComplete, a waiting stream or a peer's worker acquires the word: everything
 * complete here is visible there. */
static inline void word_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Pairings flush, staged-message, staged-signal, bell, post and gate, acquire. A stream, an adapter or the CPU stored
 * the word after the events that the word reports. */
static inline uint64_t word_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Relaxed: the caller only learns whether there is something to wait for. */
static inline uint64_t word_peek(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

/* Pairing abort, acquire: if the abort word is up, all ranks know the rank that failed. */
static inline int abort_is_up(const ProxycclControl *control) {
  return __atomic_load_n(&control->abort, __ATOMIC_ACQUIRE) != PROXYCCL_OK;
}

/* Returns 1 once this rank has been told of a failure, which happens before any kernel is stopped. */
static inline int failure_is_told(const ProxycclControl *control) {
  return abort_is_up(control) || __atomic_load_n(&control->failed_rank, __ATOMIC_ACQUIRE) != 0;
}

/* -- lists that grow while a worker runs --- */

/* Pairing worker-list, release: the new entry before the number of entries. One thread adds at a time. */
static inline void list_grow(uint32_t *count) { __atomic_store_n(count, *count + 1, __ATOMIC_RELEASE); }

/* Pairing worker-list, acquire, by the worker. */
static inline uint32_t list_count(const uint32_t *count) { return __atomic_load_n(count, __ATOMIC_ACQUIRE); }

/* -- schedules --- */

/* Pairing schedule, release: all of a schedule before its place in the table. */
static inline void schedule_publish(struct Schedule **place, struct Schedule *schedule) {
  __atomic_store_n(place, schedule, __ATOMIC_RELEASE);
}

/* Pairing schedule, acquire. */
static inline struct Schedule *schedule_load(struct Schedule **place) {
  return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}

/* Pairing schedule-start, release, by worker 0: the schedule's number before the count of schedules that were started.
 */
static inline void schedule_start(uint32_t *started) { __atomic_store_n(started, *started + 1, __ATOMIC_RELEASE); }

/* Pairing schedule-start, acquire, by the other workers. */
static inline uint32_t schedules_started(const uint32_t *started) { return __atomic_load_n(started, __ATOMIC_ACQUIRE); }

/* Pairing schedule-end: the transfers that each worker saw complete, before the last one's report. Returns how many
 * remain. */
static inline uint32_t part_end(uint32_t *parts) { return __atomic_sub_fetch(parts, 1, __ATOMIC_ACQ_REL); }

/* Pairing schedule-end, acquire. */
static inline uint32_t parts_left(const uint32_t *parts) { return __atomic_load_n(parts, __ATOMIC_ACQUIRE); }

/* Pairing stage, release, by any worker: arrived data, before a stream that waits for the stage works on it. */
static inline void stage_add(uint64_t *stage) { __atomic_fetch_add(stage, 1, __ATOMIC_RELEASE); }

/* -- requests to a running worker, which answers with the request's number --- */

typedef struct {
  uint32_t asked, answered; /* numbers of the last request and of the last answered request */
} Request;

/* Pairing request, release: the worker sees everything that the caller did before. Returns the request's number. */
static inline uint32_t request_make(Request *request) {
  return __atomic_add_fetch(&request->asked, 1, __ATOMIC_RELEASE);
}

/* Pairing request, acquire: the worker's read of a request. */
static inline uint32_t request_asked(const Request *request) {
  return __atomic_load_n(&request->asked, __ATOMIC_ACQUIRE);
}

/* Pairing answer, release: the caller sees everything that the worker did before, and changes tables only after the
 * worker's last read. */
static inline void request_answer(Request *request, uint32_t number) {
  if (request->answered != number) __atomic_store_n(&request->answered, number, __ATOMIC_RELEASE);
}

/* Pairing answer, acquire, by the caller. */
static inline uint32_t request_answered(const Request *request) {
  return __atomic_load_n(&request->answered, __ATOMIC_ACQUIRE);
}

/* Pairing request, for the request to end, which has flags instead of a number. Flags are set and never cleared. */
static inline void flags_set(int *flags, int flag) { __atomic_fetch_or(flags, flag, __ATOMIC_RELEASE); }
static inline int flags_load(const int *flags) { return __atomic_load_n(flags, __ATOMIC_ACQUIRE); }

#endif
