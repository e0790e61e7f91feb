/* Grants of blocks, which their owner may revoke. See transfers.h.
 *
 * While a transfer of granted blocks is active, it locks one byte of the owner's ledger file. The lock tells the owner
 * that the transfer is active, and the kernel releases the lock if the transfer's process ends. The byte may lie beyond
 * the end of the file, because a lock needs no data. */
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "parts.h"

/* Each grant has a range of bytes. A transfer's byte in this range is the transfer's address in units of 64 bytes; user
 * addresses have 47 bits. Two grants share a range only if the ledger assigned a multiple of RANGES numbers in between.
 * The owner then waits for the transfers of both. */
#define RANGES (1ull << 22)
#define RANGE_BYTES (1ull << 41)
#define PAUSE_NS 50000 /* between two queries of the locks, which take 1 us each */

static struct flock lock_of(short type, uint64_t grant, uint64_t at, uint64_t bytes) {
  const uint64_t start = grant / PROXYCCL_LEDGER_WORDS % RANGES * RANGE_BYTES;
  return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)(start + at), .l_len = (off_t)bytes};
}

/* Locks or unlocks a transfer's byte. Returns 0 or an errno. */
static int set_lock(const ProxycclTransfer *transfer, short type) {
  struct flock lock = lock_of(type, transfer->granted.grant, (uintptr_t)transfer / 64 % RANGE_BYTES, 1);
  return fcntl(transfer->granted.locks, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

void proxyccl_ledger_revoke(uint64_t *ledger, const uint64_t *numbers, uint64_t count, int ends) {
  for (uint64_t i = 0; i < count; ++i)
    __atomic_store_n(&ledger[numbers[i] % PROXYCCL_LEDGER_WORDS], ends ? 0 : ~numbers[i], __ATOMIC_RELAXED);
  /* Pairing grant, release: the words are stored before the memory is overwritten. Pairing grant-lock: the words are
   * stored before the locks are queried. */
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

uint64_t proxyccl_ledger_revoked(const uint64_t *ledger, const uint64_t *numbers, uint64_t count, int starts) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE); /* Pairing grant, acquire: after the memory was copied. */
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t word = __atomic_load_n(&ledger[numbers[i] % PROXYCCL_LEDGER_WORDS], __ATOMIC_RELAXED);
    if (word != numbers[i] && (starts || word != ~numbers[i])) return i;
  }
  return count;
}

int proxyccl_ledger_wait(int ledger_file, uint64_t grant, uint64_t timeout_ns) {
  const uint64_t deadline = now_ns() + timeout_ns;
  for (;;) {
    struct flock lock = lock_of(F_WRLCK, grant, 0, RANGE_BYTES);
    if (fcntl(ledger_file, F_OFD_GETLK, &lock) != 0) return errno;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* Pairing grant-unlock, acquire: before the memory is overwritten. */
    if (lock.l_type == F_UNLCK) return 0;
    if (now_ns() >= deadline) return EBUSY;
    nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
  }
}

void proxyccl_transfer_set_grant(ProxycclTransfer *transfer, const ProxycclGranted *granted) {
  pthread_mutex_lock(&transfer->agent->lock);
  transfer->granted = *granted;
  pthread_mutex_unlock(&transfer->agent->lock);
}

static int holds(const ProxycclGranted *granted, int starts) {
  if (granted->deadline != 0 && now_ns() >= granted->deadline) return 0;
  return proxyccl_ledger_revoked(granted->ledger, granted->numbers, granted->count, starts) == granted->count;
}

int grant_enter(ProxycclTransfer *transfer) {
  if (transfer->granted.count == 0) return 0;
  const int error = set_lock(transfer, F_RDLCK);
  if (error != 0) return error;
  __atomic_thread_fence(__ATOMIC_SEQ_CST); /* Pairing grant-lock: the lock is set before the words are read. */
  if (holds(&transfer->granted, 1)) return 0;
  set_lock(transfer, F_UNLCK);
  return ESTALE;
}

int grant_leave(ProxycclTransfer *transfer) {
  if (transfer->granted.count == 0) return 1;
  const int whole = holds(&transfer->granted, 0);
  __atomic_thread_fence(__ATOMIC_RELEASE); /* Pairing grant-unlock, release: after the copies and the words' reads. */
  set_lock(transfer, F_UNLCK);
  return whole;
}
