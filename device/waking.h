/* The sleeping threads of a proxy, for code that is about to launch work for them. A thread that sleeps needs tens of
 * microseconds to run again, which pass while the launch is under way.
 *
 * Waking is only a hint. A thread that falls asleep just after its word was read sleeps for its full time, and no work
 * is lost. So the words are relaxed: the system compares a word once more as the thread begins to wait, under the lock
 * under which it looks for waiting threads. */
#pragma once

#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PROXYCCL_MOST_SLEEPERS = 128 };

/* Each word is 1 while its thread sleeps and may be woken. The words may be in another process's memory. */
typedef struct ProxycclSleepers {
  uint32_t count; /* only grows; pairing sleeper */
  uint32_t* asleep[PROXYCCL_MOST_SLEEPERS];
} ProxycclSleepers;

/* Adds a thread's word. Only one thread may add words at a time; others may wake threads during the call. Returns 0 if
 * there is no room. */
static inline int proxyccl_sleepers_add(ProxycclSleepers* self, uint32_t* asleep) {
  if (self->count == PROXYCCL_MOST_SLEEPERS) return 0;
  self->asleep[self->count] = asleep;
  /* Pairing sleeper, release: this store of the number of words comes after the store of the word's address. */
  __atomic_store_n(&self->count, self->count + 1, __ATOMIC_RELEASE);
  return 1;
}

/* Wakes a thread if it sleeps. */
static inline void proxyccl_wake_one(uint32_t* asleep) {
  if (__atomic_load_n(asleep, __ATOMIC_RELAXED) == 0) return;
  __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
  syscall(SYS_futex, asleep, FUTEX_WAKE, 1, NULL, NULL,
          0); /* not FUTEX_PRIVATE: the thread may be in another process */
}

/* Wakes the sleeping threads. If none sleeps, this costs one load for each thread. */
static inline void proxyccl_wake(const ProxycclSleepers* self) {
  const uint32_t count = __atomic_load_n(&self->count, __ATOMIC_ACQUIRE); /* pairing sleeper, acquire */
  for (uint32_t i = 0; i < count; ++i) proxyccl_wake_one(self->asleep[i]);
}

/* Wakes the sleepers of a list that ends with NULL. The list may be NULL. */
static inline void proxyccl_wake_all(const ProxycclSleepers* const* list) {
  for (; list != NULL && *list != NULL; ++list) proxyccl_wake(*list);
}
