/* An entry is a sequence lock: its writer takes the number away, writes, and puts the new number there; a reader that
 * does not find the same number before and after has read nothing. */
#include "calls.h"

#include <string.h>

static void write_entry(ProxycclCallEntry *entry, uint64_t sequence, const ProxycclCall *call) {
  __atomic_store_n(&entry->sequence, 0, __ATOMIC_RELAXED);
  /* The fields below must not become visible before the 0 above. */
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    __atomic_store_n(&entry->call.fields[i], call->fields[i], __ATOMIC_RELAXED);
  /* Pairs with the acquire load in read_entry(). */
  __atomic_store_n(&entry->sequence, sequence, __ATOMIC_RELEASE);
}

static int read_entry(const ProxycclCallEntry *entry, uint64_t sequence, ProxycclCall *call) {
  if (__atomic_load_n(&entry->sequence, __ATOMIC_ACQUIRE) != sequence) return 0;
  for (int i = 0; i < PROXYCCL_CALL_FIELDS; ++i)
    call->fields[i] = __atomic_load_n(&entry->call.fields[i], __ATOMIC_RELAXED);
  /* Pairs with the fence in write_entry(): who has read a later field sees that the number was taken away. */
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&entry->sequence, __ATOMIC_RELAXED) == sequence;
}

int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call) {
  return read_entry(&log[sequence % PROXYCCL_CALL_LOG_ENTRIES], sequence, call);
}

int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call) {
  if (__atomic_load_n(&callers->control->abort, __ATOMIC_ACQUIRE) != PROXYCCL_OK) return PROXYCCL_CALL_ABORTED;
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

int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream) {
  if (!proxyccl_is_current(launch)) return PROXYCCL_OTHER_CONTEXT;
  const int status = proxyccl_calls_agree(callers, call);
  return status != 0 ? status : proxyccl_launch_current(launch, stream);
}
