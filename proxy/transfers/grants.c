/* Grants of blocks, which their owner may revoke. See transfers.h.
 *
 * The owner learns from counts in the ledger which transfers are active. Each process that maps the ledger has its own
 * counts, and locks one byte of the ledger's file. The kernel releases the lock when the process has ended, and the
 * owner then ignores the process's counts. The byte may lie beyond the end of the file, because a lock needs no
 * data. */
#include <errno.h>
#include <fcntl.h>
#include <time.h>

#include "clock.h"
#include "parts.h"

enum { PAUSE_NS = 50000 }; /* between two looks at the counts */

static struct flock lock_of(short type, uint32_t place) {
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = place, .l_len = 1};
}

/* Returns a process's count for a grant. Grants with equal hashes share a count, so the owner waits for both. */
static uint32_t *count_of(ProxycclLedger *ledger, uint32_t place, uint64_t grant) {
  return &ledger->active[place][grant * 0x9e3779b97f4a7c15u >> 52];
}

int proxyccl_ledger_join(ProxycclLedger *ledger, int file) {
  for (uint32_t place = 0; place < PROXYCCL_LEDGER_PLACES; ++place) {
    struct flock lock = lock_of(F_WRLCK, place);
    if (fcntl(file, F_OFD_SETLK, &lock) == 0) {
      uint32_t used = __atomic_load_n(&ledger->places, __ATOMIC_ACQUIRE); /* a killed process may have had the lock */
      if (place < used) memset(ledger->active[place], 0, sizeof ledger->active[place]); /* of a killed process */
      while (used <= place &&
             !__atomic_compare_exchange_n(&ledger->places, &used, place + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
      return (int)place;
    }
    if (errno != EAGAIN && errno != EACCES) return -errno;
  }
  return -EUSERS;
}

void proxyccl_ledger_revoke(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int ends) {
  for (uint64_t i = 0; i < count; ++i)
    __atomic_store_n(&ledger->words[numbers[i] % PROXYCCL_LEDGER_WORDS], ends ? 0 : ~numbers[i], __ATOMIC_RELAXED);
  /* Pairing grant, release: the words are stored before the memory is overwritten. Pairing grant-start: the words are
   * stored before the counts are read. */
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

uint64_t proxyccl_ledger_revoked(const ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int starts) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE); /* Pairing grant, acquire: after the memory was copied. */
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t word = __atomic_load_n(&ledger->words[numbers[i] % PROXYCCL_LEDGER_WORDS], __ATOMIC_RELAXED);
    if (word != numbers[i] && (starts || word != ~numbers[i])) return i;
  }
  return count;
}

/* Returns EBUSY if a transfer of the grant is active in a process that has not ended, else 0 or an errno. */
static int look(ProxycclLedger *ledger, int file, uint32_t own, uint64_t grant) {
  const uint32_t places = __atomic_load_n(&ledger->places, __ATOMIC_RELAXED);
  for (uint32_t place = 0; place < places; ++place) {
    /* Pairing grant-end, acquire: before the memory is overwritten. */
    if (__atomic_load_n(count_of(ledger, place, grant), __ATOMIC_ACQUIRE) == 0) continue;
    if (place == own) return EBUSY;
    struct flock lock = lock_of(F_WRLCK, place);
    if (fcntl(file, F_OFD_GETLK, &lock) != 0) return errno;
    if (lock.l_type != F_UNLCK) return EBUSY;
  }
  return 0;
}

int proxyccl_ledger_wait(ProxycclLedger *ledger, int file, uint32_t own, uint64_t grant, uint64_t timeout_ns) {
  const uint64_t deadline = now_ns() + timeout_ns;
  for (;;) {
    const int status = look(ledger, file, own, grant);
    if (status != EBUSY || now_ns() >= deadline) return status;
    nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
  }
}

void proxyccl_transfer_set_grant(ProxycclTransfer *transfer, const ProxycclGranted *granted) {
  pthread_mutex_lock(&transfer->agent->lock);
  transfer->granted = *granted;
  pthread_mutex_unlock(&transfer->agent->lock);
}

static int holds(const ProxycclGranted *granted, int starts) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE); /* Pairing lease: the clock is read after the memory was copied. */
  /* The ledger has the deadline of a grant with a key. If the word below is unchanged, no later grant had stored its
   * own deadline when this thread loaded it (pairing lease). */
  const uint64_t deadline = __atomic_load_n(granted->deadline, __ATOMIC_RELAXED);
  if (deadline != 0 && now_ns() >= deadline) return 0;
  return proxyccl_ledger_revoked(granted->ledger, granted->numbers, granted->count, starts) == granted->count;
}

/* Pairing grant-end, release: after the copies and the words' reads. */
static void count_end(const ProxycclGranted *granted) {
  __atomic_sub_fetch(count_of(granted->ledger, granted->place, granted->grant), 1, __ATOMIC_RELEASE);
}

int grant_enter(const ProxycclGranted *granted) {
  if (granted->count == 0) return 0;
  __atomic_add_fetch(count_of(granted->ledger, granted->place, granted->grant), 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_SEQ_CST); /* Pairing grant-start: the transfer is counted before the words are read. */
  if (holds(granted, 1)) return 0;
  count_end(granted);
  return ESTALE;
}

int grant_stands(const ProxycclTransfer *transfer) {
  return !transfer->writes || transfer->granted.count == 0 || holds(&transfer->granted, 0);
}

int grant_leave(const ProxycclGranted *granted) {
  if (granted->count == 0) return 1;
  const int whole = holds(granted, 0);
  count_end(granted);
  return whole;
}
