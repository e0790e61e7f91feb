/* Wakes the sleeping threads of a proxy before a launch gives them work, because a thread takes tens of microseconds to
 * wake up.
 *
 * Waking is only a hint: a thread that falls asleep just after its word was read sleeps for its full time, and no work
 * is lost. So accesses to the words may be relaxed. FUTEX_WAIT compares the word again under Linux's lock on the word's
 * waiters, so a thread that already sleeps is woken. */
#pragma once

#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PROXYCCL_MOST_SLEEPERS = 128 };

/* Words in shared memory, each of which is 1 while its thread sleeps and may be woken. */
typedef struct ProxycclSleepers {
  uint32_t count; /* only grows, except while no thread wakes these; pairing sleeper */
  uint32_t* asleep[PROXYCCL_MOST_SLEEPERS];
} ProxycclSleepers;

/* Adds the word of a proxy's thread to the list. Only one thread at a time may add words, but during the call other
 * threads may wake those in the list. Returns 0 if the list is full. */
static inline int proxyccl_sleepers_add(ProxycclSleepers* self, uint32_t* asleep) {
  if (self->count == PROXYCCL_MOST_SLEEPERS) return 0;
  self->asleep[self->count] = asleep;
  /* Pairing sleeper, release: the store of the count comes after the store of the word's address. */
  __atomic_store_n(&self->count, self->count + 1, __ATOMIC_RELEASE);
  return 1;
}

/* Wakes a thread if it sleeps. */
static inline void proxyccl_wake_one(uint32_t* asleep) {
  if (__atomic_load_n(asleep, __ATOMIC_RELAXED) == 0) return;
  __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
  syscall(SYS_futex, asleep, FUTEX_WAKE, 1, NULL, NULL,
          0); /* not FUTEX_PRIVATE, because the thread may be in another process */
}

/* Wakes the sleeping threads. Costs one load per thread that is awake. */
static inline void proxyccl_wake(const ProxycclSleepers* self) {
  const uint32_t count = __atomic_load_n(&self->count, __ATOMIC_ACQUIRE); /* pairing sleeper, acquire */
  for (uint32_t i = 0; i < count; ++i) proxyccl_wake_one(self->asleep[i]);
}

/* Wakes the sleepers of a list that ends with NULL. The list may be NULL. */
static inline void proxyccl_wake_all(const ProxycclSleepers* const* list) {
  for (; list != NULL && *list != NULL; ++list) proxyccl_wake(*list);
}
