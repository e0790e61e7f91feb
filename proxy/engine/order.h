/* Memory order: for each atomic access whose order matters, this file has one function, named for the purpose of the
 * access. A function's comment names its pairing: a release and the acquires that observe it
 * (device/include/MEMORY_ORDER.md). The functions of some pairings are in the files that use them: ring.h, trace.h and
 * observe.c, calls.c, thread.c, staged_transport.c. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "proxyccl/control.h"

struct Schedule;

/* -- counters and statistics: each has one writer, and readers in other processes ---
 *
 * Accesses to counters are relaxed, because counters order nothing, and atomic, so that no reader sees half of a
 * value. */

static inline void counter_add(uint64_t *counter, uint64_t amount) {
  __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + amount, __ATOMIC_RELAXED);
}

static inline void counter_set(uint64_t *counter, uint64_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELAXED);
}

/* -- words that a thread or stream waits for: a peer's semaphore, a flush word, a staged connection's counts --- */

/* Pairings signal, flush, bell, post, ticket, staged-signal, rail-state and rail-change, release, for words that the
 * CPU stores. Semaphore::wait, waitFlushed, waitComplete, a waiting stream, a peer's worker or another thread of the
 * proxy acquires the word. The thread that acquires the word sees everything that was complete before the store. */
static inline void word_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Pairings flush, staged-message, staged-signal, bell, post, gate, rail-state, rail-change and rail-mail, acquire. The
 * writer (a stream, a network adapter or the CPU) stored the word after the events that the word reports. */
static inline uint64_t word_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Relaxed: the caller uses the value only to decide whether it has to wait or to act; no data depends on it. */
static inline uint64_t word_peek(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

/* Pairing abort, acquire: if the abort word is set, every rank's word `failed_rank` is set too. */
static inline int abort_is_up(const ProxycclControl *control) {
  return __atomic_load_n(&control->abort, __ATOMIC_ACQUIRE) != PROXYCCL_OK;
}

/* Returns 1 once this rank knows of a failure. `failed_rank` is set on every rank before any kernel is stopped. */
static inline int failure_is_told(const ProxycclControl *control) {
  return abort_is_up(control) || __atomic_load_n(&control->failed_rank, __ATOMIC_ACQUIRE) != 0;
}

/* -- locks: the value is 1 while a thread holds the lock --- */

/* Pairings turn and wire-turn, acquire: the thread sees the writes of the lock's last holder. Returns 1 if the caller
 * took the lock, or 0 if another thread holds the lock. */
static inline int turn_taken(int *turn) { return __atomic_exchange_n(turn, 1, __ATOMIC_ACQUIRE) == 0; }

/* Pairings turn and wire-turn, release. */
static inline void turn_give(int *turn) { __atomic_store_n(turn, 0, __ATOMIC_RELEASE); }

/* -- lists that grow while a worker runs --- */

/* Pairing worker-list, release: the new entry is stored before the number of entries. Only one thread at a time adds
 * entries. */
static inline void list_grow(uint32_t *count) { __atomic_store_n(count, *count + 1, __ATOMIC_RELEASE); }

/* Pairing worker-list, acquire, by the worker: this load of the number comes before the loads of entries. */
static inline uint32_t list_count(const uint32_t *count) { return __atomic_load_n(count, __ATOMIC_ACQUIRE); }

/* -- schedules --- */

/* Pairing schedule, release: all of a schedule is stored before the pointer to it in the table. */
static inline void schedule_publish(struct Schedule **place, struct Schedule *schedule) {
  __atomic_store_n(place, schedule, __ATOMIC_RELEASE);
}

/* Pairing schedule, acquire: this load of the pointer comes before the loads of the schedule. */
static inline struct Schedule *schedule_load(struct Schedule **place) {
  return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}

/* Pairing schedule-start, release, by worker 0: the schedule's number is stored before the count of started schedules.
 */
static inline void schedule_start(uint32_t *started) { __atomic_store_n(started, *started + 1, __ATOMIC_RELEASE); }

/* Pairing schedule-start, acquire, by the other workers: this load of the count comes before the load of the
 * number. */
static inline uint32_t schedules_started(const uint32_t *started) { return __atomic_load_n(started, __ATOMIC_ACQUIRE); }

/* Pairing schedule-end: each worker's completed transfers come before the last worker's report that the schedule is
 * done. Returns the number of workers that have not completed their part of the schedule. */
static inline uint32_t part_end(uint32_t *parts) { return __atomic_sub_fetch(parts, 1, __ATOMIC_ACQ_REL); }

/* Pairing schedule-end, acquire. Returns the number of workers that have not completed their part of the schedule. */
static inline uint32_t parts_left(const uint32_t *parts) { return __atomic_load_n(parts, __ATOMIC_ACQUIRE); }

/* Pairing stage, release, by any worker: a stream that has waited for the stage sees the data that arrived. */
static inline void stage_add(uint64_t *stage) { __atomic_fetch_add(stage, 1, __ATOMIC_RELEASE); }

/* -- requests to a running worker, which answers with the request's number --- */

typedef struct {
  uint32_t asked, answered; /* numbers of the last request and of the last answered request */
} Request;

/* Pairing request, release: the worker sees everything that the caller did before the request. Returns the request's
 * number. */
static inline uint32_t request_make(Request *request) {
  return __atomic_add_fetch(&request->asked, 1, __ATOMIC_RELEASE);
}

/* Pairing request, acquire: the worker reads the number of the last request. */
static inline uint32_t request_asked(const Request *request) {
  return __atomic_load_n(&request->asked, __ATOMIC_ACQUIRE);
}

/* Pairing answer, release: the caller sees everything that the worker did before the answer, and changes tables only
 * after the worker's last read of them. */
static inline void request_answer(Request *request, uint32_t number) {
  if (request->answered != number) __atomic_store_n(&request->answered, number, __ATOMIC_RELEASE);
}

/* Pairing answer, acquire: the caller reads the number of the last answered request. */
static inline uint32_t request_answered(const Request *request) {
  return __atomic_load_n(&request->answered, __ATOMIC_ACQUIRE);
}

/* Pairing request, release and acquire. A request to end a worker is a flag that is never cleared. */
static inline void flags_set(int *flags, int flag) { __atomic_fetch_or(flags, flag, __ATOMIC_RELEASE); }
static inline int flags_load(const int *flags) { return __atomic_load_n(flags, __ATOMIC_ACQUIRE); }
