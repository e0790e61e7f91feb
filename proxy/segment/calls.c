/* An entry of the log is a sequence lock: its writer zeroes the stamp, writes the fields, and stores the new stamp. A
 * reader ignores the fields unless it has found the same stamp before and after reading them. */
#include "calls.h"

#include <string.h>

#include "order.h"

static const uint64_t kNumber = ((uint64_t)1 << PROXYCCL_CALL_NUMBER_BITS) - 1;

static void write_entry(ProxycclCallEntry *entry, uint64_t stamp, const ProxycclCall *call) {
  __atomic_store_n(&entry->stamp, 0, __ATOMIC_RELAXED);
  /* Pairing call-entry, release: no field that is stored after this fence becomes visible before the zeroed stamp. */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    __atomic_store_n(&entry->call.fields[i], call->fields[i], __ATOMIC_RELAXED);
  /* Pairing call-entry, release: the fields are stored before the stamp. */
  __atomic_store_n(&entry->stamp, stamp, __ATOMIC_RELEASE);
}

/* Reads an entry. Returns the entry's stamp, or 0 if the entry does not hold call `sequence`. */
static uint64_t read_entry(const ProxycclCallEntry *entry, uint64_t sequence, ProxycclCall *call) {
  /* Pairing call-entry, acquire: this load of the stamp comes before the loads of the fields. */
  const uint64_t stamp = __atomic_load_n(&entry->stamp, __ATOMIC_ACQUIRE);
  if ((stamp & kNumber) != (sequence & kNumber)) return 0;
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    call->fields[i] = __atomic_load_n(&entry->call.fields[i], __ATOMIC_RELAXED);
  /* Pairing call-entry, acquire: a reader that has read a later call's field sees that the stamp was zeroed. */
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&entry->stamp, __ATOMIC_RELAXED) == stamp ? stamp : 0;
}

int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call) {
  return read_entry(&log[sequence % PROXYCCL_CALL_LOG_ENTRIES], sequence, call) != 0;
}

void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize) {
  callers->waited = stream;
  callers->synchronize = (int (*)(void *))synchronize;
}

/* Adds a call to `history`, the digest of all earlier calls. Returns the new digest. */
static uint64_t history_with(uint64_t history, const ProxycclCall *call) {
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i) {
    history = (history ^ call->fields[i]) * 0x9e3779b97f4a7c15u;
    history ^= history >> 32;
  }
  return history;
}

/* Counts a call in a hash table, which begins as zeroed memory and from which nothing is removed. Fields are written
 * with plain 8-byte stores, so observers may read the table at any time. */
static void count_call(ProxycclCallCount *counts, uint64_t collective) {
  for (uint32_t probe = 0; probe < PROXYCCL_CALL_KINDS; ++probe) {
    ProxycclCallCount *const count = &counts[(collective + probe) % PROXYCCL_CALL_KINDS];
    if (count->collective != collective && count->calls != 0) continue;
    count->collective = collective;
    ++count->calls;
    return;
  }
  ++counts[PROXYCCL_CALL_KINDS].calls;
}

int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call) {
  if (abort_is_up(callers->control)) return PROXYCCL_CALL_ABORTED;
  const uint64_t sequence = ++callers->sequence, slot = sequence % PROXYCCL_CALL_LOG_ENTRIES;
  const uint64_t stamp = (sequence & kNumber) | (callers->history & ~kNumber);
  callers->history = history_with(callers->history, call);
  write_entry(&callers->own[slot], stamp, call);
  count_call(callers->counts, call->fields[0]);
  /* Pairing call-comparison, with the same fence of a peer: if two ranks log calls concurrently, at least one of the
   * ranks finds the other rank's entry in the loop below. With only a release and an acquire, both ranks' loads could
   * come before both stores. */
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (uint32_t peer = 0; peer < callers->peer_count; ++peer) {
    const uint64_t theirs = read_entry(&callers->peers[peer][slot], sequence, &callers->different);
    if (theirs == 0) continue;
    const int same = memcmp(&callers->different, call, sizeof *call) == 0;
    if (same && theirs == stamp) continue;
    callers->differing = peer;
    return same ? PROXYCCL_CALL_DIFFERED : PROXYCCL_CALL_DIFFERS;
  }
  return 0;
}

/* Calls proxyccl_calls_agree, then checks for failures again, because a kernel that begins after a failure must not use
 * memory that a peer may have freed. */
static int agree_to_issue(ProxycclCallers *callers, const ProxycclCall *call) {
  const int status = call == NULL ? 0 : proxyccl_calls_agree(callers, call);
  return status == 0 && failure_is_told(callers->control) ? PROXYCCL_CALL_ABORTED : status;
}

/* Waits for the stream's work if proxyccl_calls_wait_on has named the stream. Returns the call's status. */
static int end_call(const ProxycclCallers *callers, uintptr_t stream, int status) {
  if (callers->synchronize == NULL || stream != callers->waited) return status;
  const int ended = callers->synchronize((void *)stream);
  /* A failure is reported even if this rank's kernel was not stopped, because the kernel may have received data from a
   * kernel that was stopped. */
  if (failure_is_told(callers->control)) return PROXYCCL_CALL_ABORTED;
  return status != 0 ? status : ended;
}

int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream) {
  if (launch == NULL) return agree_to_issue(callers, call);
  if (!proxyccl_is_current(launch->current, launch->context)) return PROXYCCL_OTHER_CONTEXT;
  const int status = agree_to_issue(callers, call);
  return status != 0 ? status : end_call(callers, stream, proxyccl_launch_current(launch, stream));
}

int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, ProxycclStreamOperations *operations,
                        uintptr_t stream) {
  if (!proxyccl_is_current(operations->current, operations->context)) return PROXYCCL_OTHER_CONTEXT;
  const int status = agree_to_issue(callers, call);
  return status != 0 ? status : end_call(callers, stream, proxyccl_stream_issue_current(operations, stream));
}
