/* The registrations of an agent's memory, and the checks that those of a transfer are valid. See transfers.h. */
#include <errno.h>

#include "parts.h"

void proxyccl_ledger_begin(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i)
    __atomic_store_n(&ledger->words[numbers[i] % PROXYCCL_LEDGER_WORDS], numbers[i], __ATOMIC_RELEASE);
}

void proxyccl_ledger_end(ProxycclLedger *ledger, const uint64_t *numbers, uint64_t count, int freed) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = numbers[i];
    uint64_t *word = &ledger->words[number % PROXYCCL_LEDGER_WORDS], before = number;
    if (!__atomic_compare_exchange_n(word, &before, freed ? ~number : 0, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
      if (freed || before != ~number) continue;
      __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    }
    /* Release: a reader of the count also sees the word above. */
    __atomic_add_fetch(&ledger->words[0], 1, __ATOMIC_RELEASE);
  }
}

uint64_t proxyccl_ledger_count(const ProxycclLedger *ledger) {
  return __atomic_load_n(&ledger->words[0], __ATOMIC_ACQUIRE);
}

/* Finds the first registration that has ended, and records its block as the transfer's fault. Returns 1, or 0 if no
 * registration has ended. */
static int find_ended(ProxycclTransfer *transfer, int remote, uint64_t now) {
  Guard *guard = &transfer->guards[remote];
  for (uint64_t i = 0; i < guard->count; ++i) {
    const uint64_t number = guard->rows[2 * i];
    const uint64_t word = __atomic_load_n(&guard->ledger->words[number % PROXYCCL_LEDGER_WORDS], __ATOMIC_ACQUIRE);
    if (word == number) continue;
    const ProxycclFaultKind kind = word == ~number ? (remote ? PROXYCCL_FAULT_FREED : PROXYCCL_FAULT_FREED_HERE)
                                   : remote        ? PROXYCCL_FAULT_DEREGISTERED
                                                   : PROXYCCL_FAULT_ENDED_HERE;
    transfer->fault = (ProxycclFault){kind, guard->rows[2 * i + 1]};
    return 1;
  }
  guard->seen = now;
  return 0;
}

static int side_stands(ProxycclTransfer *transfer, int remote) {
  const Guard *guard = &transfer->guards[remote];
  if (guard->ledger == NULL) return 1;
  const uint64_t now = proxyccl_ledger_count(guard->ledger);
  return now == guard->seen || !find_ended(transfer, remote, now);
}

int transfer_stands(ProxycclTransfer *transfer) { return side_stands(transfer, 0) && side_stands(transfer, 1); }

int request_stands(Request *request) {
  const ProxycclFault *fault = &request->transfer->fault;
  if (side_stands(request->transfer, 0)) return 1;
  request->refusal = fault->kind == PROXYCCL_FAULT_ENDED_HERE ? EACCES : EPERM;
  request->fault = *fault;
  return 0;
}

void proxyccl_transfer_guard(ProxycclTransfer *transfer, int remote, const ProxycclLedger *ledger, const uint64_t *rows,
                             uint64_t count) {
  pthread_mutex_lock(&transfer->agent->lock);
  transfer->guards[remote] = (Guard){ledger, rows, count, UINT64_MAX};
  pthread_mutex_unlock(&transfer->agent->lock);
}
