// Bounded waits. Nothing on the device spins without end: every wait looks at the abort word and at the clock.
#ifndef PROXYCCL_WAIT_H
#define PROXYCCL_WAIT_H

#include "proxyccl/control.h"
#include "proxyccl/platform.h"

namespace proxyccl {

using Control = ProxycclControl;

// The bound of a wait that was given no control block (a DeviceSyncer of the user's own).
constexpr uint64_t kDefaultTimeoutNs = 30ull * 1000 * 1000 * 1000;

// What a wait is about, for the error record if it fails.
struct WaitFor {
  uint32_t kind;     // ProxycclWaitKind
  uint32_t peer;     // rank waited for, or PROXYCCL_NO_PEER
  uint32_t channel;  // channel id, where there is one
  uint64_t expected;
};

PROXYCCL_DEVICE bool aborted(const Control* control) {
  // Acquired where it is up: what this thread does next comes after all ranks were told (reportError).
  return control != nullptr && loadRelaxedSystem(&control->abort) != PROXYCCL_OK &&
         loadAcquireSystem(&control->abort) != PROXYCCL_OK;
}

// The transfer that an error is about, where it is about one.
struct Transfer {
  uint32_t operation;
  uint64_t offset, size;
};

// Tells the CPUs of all ranks of the host that this one has failed, then raises their abort words, its own last.
//
// A kernel whose wait has ended this way goes on with what it has, and signals its peers, whose waits may succeed on
// that. So nothing ends that way before every rank is told: whoever has used such data finds out at its next check.
PROXYCCL_DEVICE void spreadAbort(Control* control, uint32_t code) {
  // The first that tells is the one that is believed. A word that is up already is as good as stored here.
  for (uint32_t i = 0; i < control->peer_count; ++i) {
    uint32_t* told = &control->peers[i]->told;
    if (loadRelaxedSystem(told) == 0) storeReleaseSystem(told, control->rank + 1);
  }
  for (uint32_t i = 0; i < control->peer_count; ++i) storeReleaseSystem(&control->peers[i]->abort, code);
  storeReleaseSystem(&control->abort, code);
}

// Files the error record, if no other has been filed, and ends the waits of all ranks of the host.
PROXYCCL_OUT_OF_LINE void reportError(Control* control, uint32_t code, WaitFor what, uint64_t seen,
                                      Transfer transfer = {}) {
  ProxycclErrorRecord* record = &control->error;
  if (compareExchangeSystem<uint32_t>(&record->state, PROXYCCL_RECORD_EMPTY, PROXYCCL_RECORD_CLAIMED)) {
    storeRelaxedSystem(&record->code, code);
    storeRelaxedSystem(&record->rank, control->rank);
    storeRelaxedSystem(&record->peer, what.peer);
    storeRelaxedSystem(&record->wait, what.kind);
    storeRelaxedSystem(&record->channel, what.channel);
    storeRelaxedSystem(&record->expected, what.expected);
    storeRelaxedSystem(&record->seen, seen);
    storeRelaxedSystem(&record->operation, transfer.operation);
    storeRelaxedSystem(&record->offset, transfer.offset);
    storeRelaxedSystem(&record->size, transfer.size);
    // Pairs with the acquire load of `state` by the CPU that reads the record.
    storeReleaseSystem<uint32_t>(&record->state, PROXYCCL_RECORD_VALID);
  }
  spreadAbort(control, code);
}

// Says what a wait is about, for the question of this number, unless another wait for the same peer already has.
PROXYCCL_OUT_OF_LINE void tellWait(Control* control, uint32_t question, WaitFor what, uint64_t seen) {
  const bool of_peer = what.peer != PROXYCCL_NO_PEER;
  const uint32_t place = of_peer ? what.peer % PROXYCCL_WAIT_PEERS : PROXYCCL_WAIT_PEERS + what.kind;
  ProxycclWait* wait = &control->waits[place];
  const uint32_t claimed = loadRelaxedSystem(&wait->claimed);
  if (claimed == question || !compareExchangeSystem<uint32_t>(&wait->claimed, claimed, question)) return;
  storeRelaxedSystem(&wait->kind, what.kind);
  storeRelaxedSystem(&wait->peer, what.peer);
  storeRelaxedSystem(&wait->channel, what.channel);
  storeRelaxedSystem(&wait->expected, what.expected);
  storeRelaxedSystem(&wait->seen, seen);
  // Pairs with the acquire load of `told` by the CPU that asked.
  storeReleaseSystem(&wait->told, question);
}

// Spins until ready(&seen) is true. Returns false, and the caller must give up its work, when the communicator was
// aborted or the time-out passed; the latter is reported with the value last seen.
template <class Ready>
PROXYCCL_DEVICE bool waitUntil(Control* control, const WaitFor& what, Ready ready) {
  uint64_t seen = 0, started = 0;
  for (uint32_t spins = 0; !ready(&seen); ++spins) {
    if (spins % kSpinsPerCheck == kSpinsPerCheck - 1) {
      if (control != nullptr) {
        const uint32_t abort = loadRelaxedSystem(&control->abort), asked = loadRelaxedSystem(&control->asked);
        if (abort != PROXYCCL_OK || asked != 0)
          tellWait(control, abort != PROXYCCL_OK ? PROXYCCL_LAST_QUESTION : asked, what, seen);
        if (abort != PROXYCCL_OK && aborted(control)) return false;
      }
      const uint64_t now = nanoseconds();
      if (started == 0) started = now;
      const uint64_t bound = control != nullptr ? loadRelaxedSystem(&control->timeout_ns) : kDefaultTimeoutNs;
      // Blocks that wait for one of their grid give up last: that one waits for a peer, and knows for which.
      if (now - started > (what.kind == PROXYCCL_WAIT_GRID ? 2 * bound : bound)) {
        if (control != nullptr) {
          tellWait(control, PROXYCCL_LAST_QUESTION, what, seen);  // before the others are told to stop
          reportError(control, PROXYCCL_ERROR_TIMEOUT, what, seen);
        }
        return false;
      }
    }
    spinHint(spins);
  }
  return true;
}

}  // namespace proxyccl

#endif
