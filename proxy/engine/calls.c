/* An entry is a sequence lock: its writer zeroes the number, writes the fields, and stores the new number. A reader
 * that does not find the same number before and after its reads ignores them. */
#include "calls.h"

#include <string.h>

#include "order.h"

static void write_entry(ProxycclCallEntry *entry, uint64_t sequence, const ProxycclCall *call) {
  __atomic_store_n(&entry->sequence, 0, __ATOMIC_RELAXED);
  /* Pairing 24, release: no field below becomes visible before the 0 above. */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    __atomic_store_n(&entry->call.fields[i], call->fields[i], __ATOMIC_RELAXED);
  /* Pairing 24, release: the fields before the number. */
  __atomic_store_n(&entry->sequence, sequence, __ATOMIC_RELEASE);
}

static int read_entry(const ProxycclCallEntry *entry, uint64_t sequence, ProxycclCall *call) {
  /* Pairing 24, acquire: the number before the fields. */
  if (__atomic_load_n(&entry->sequence, __ATOMIC_ACQUIRE) != sequence) return 0;
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    call->fields[i] = __atomic_load_n(&entry->call.fields[i], __ATOMIC_RELAXED);
  /* Pairing 24, acquire: a reader that has read a later call's field sees that the number was zeroed. */
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&entry->sequence, __ATOMIC_RELAXED) == sequence;
}

int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call) {
  return read_entry(&log[sequence % PROXYCCL_CALL_LOG_ENTRIES], sequence, call);
}

void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize) {
  callers->waited = stream;
  callers->synchronize = (int (*)(void *))synchronize;
}

int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call) {
  if (abort_is_up(callers->control)) return PROXYCCL_CALL_ABORTED;
  const uint64_t sequence = ++callers->sequence, slot = sequence % PROXYCCL_CALL_LOG_ENTRIES;
  write_entry(&callers->own[slot], sequence, call);
  for (uint32_t peer = 0; peer < callers->peer_count; ++peer) {
    if (read_entry(&callers->peers[peer][slot], sequence, &callers->different) &&
        memcmp(&callers->different, call, sizeof *call) != 0) {
      callers->differing = peer;
      return PROXYCCL_CALL_DIFFERS;
    }
  }
  return 0;
}

/* Waits for a launch with a status, if calls on its stream do. */
static int end_call(const ProxycclCallers *callers, uintptr_t stream, int status) {
  if (callers->synchronize == NULL || stream != callers->waited) return status;
  const int ended = callers->synchronize((void *)stream);
  /* Even if nothing stopped the kernel here: what it received may be of one that was stopped. */
  if (failure_is_told(callers->control)) return PROXYCCL_CALL_ABORTED;
  return status != 0 ? status : ended;
}

int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream) {
  if (!proxyccl_is_current(launch)) return PROXYCCL_OTHER_CONTEXT;
  const int status = proxyccl_calls_agree(callers, call);
  return status != 0 ? status : end_call(callers, stream, proxyccl_launch_current(launch, stream));
}

int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, ProxycclStreamOperations *operations,
                        uintptr_t stream) {
  if (!proxyccl_stream_is_current(operations)) return PROXYCCL_OTHER_CONTEXT;
  const int status = proxyccl_calls_agree(callers, call);
  return status != 0 ? status : end_call(callers, stream, proxyccl_stream_issue_current(operations, stream));
}
