// Bounded waits: every wait on the device checks the abort word and the clock.
#pragma once

#include "proxyccl/control.h"
#include "proxyccl/platform.h"

namespace proxyccl {

using Control = ProxycclControl;

// The time-out of a wait without a control block, as in a kernel that no communicator compiled.
constexpr uint64_t kDefaultTimeoutNs = 30ull * 1000 * 1000 * 1000;

struct WaitFor {
  uint32_t kind;     // ProxycclWaitKind
  uint32_t peer;     // rank waited for, or PROXYCCL_NO_PEER
  uint32_t channel;  // channel id, or PROXYCCL_NO_CHANNEL
  uint64_t expected;
};

// Returns the given control block; if null, the control block of the communicator that compiled the kernel.
PROXYCCL_DEVICE Control* controlOr(Control* given) { return given != nullptr ? given : defaultControl(); }

/// Returns whether the communicator has ended; a kernel's own loop must then end. Any thread may call aborted(), which
/// reads a word in host memory.
/// @param given  the communicator's control block; null for the module's
PROXYCCL_DEVICE bool aborted(const Control* given = nullptr) {
  const Control* control = given != nullptr ? given : defaultControl();
  // The acquire orders spreadAbort()'s stores of `failed_rank` on all ranks before anything that this thread does next.
  return control != nullptr && loadRelaxedSystem(&control->abort) != PROXYCCL_OK &&
         loadAcquireSystem(&control->abort) != PROXYCCL_OK;
}

struct Transfer {
  uint32_t operation;
  uint64_t offset, size;
};

// Stores this rank in `failed_rank` of all ranks of the host, then raises the abort words of all ranks, its own last.
//
// A kernel whose wait has been aborted continues with incomplete data and signals its peers, so the peers' waits may
// succeed. `failed_rank` is stored before any wait ends, so that a rank that has used incomplete data learns of the
// failure at its next check.
PROXYCCL_DEVICE void spreadAbort(Control* control, uint32_t code) {
  // The first rank that failed stays in `failed_rank`, because that rank's error record says why.
  for (uint32_t i = 0; i < control->peer_count; ++i) {
    uint32_t* failed_rank = &control->peers[i]->failed_rank;
    if (loadRelaxedSystem(failed_rank) == 0) storeReleaseSystem(failed_rank, control->rank + 1);
  }
  for (uint32_t i = 0; i < control->peer_count; ++i) storeReleaseSystem(&control->peers[i]->abort, code);
  storeReleaseSystem(&control->abort, code);
}

/// Fills in the rank's error record unless it is already filled, and ends the waits of all ranks of the host. Without a
/// control block, recordError() does nothing. Any thread may call it.
/// @param given     the communicator's control block; null for the module's
/// @param code      ProxycclErrorCode
/// @param what what the thread waited for, or which peer the error concerns
/// @param seen      the value last seen
/// @param transfer  the transfer that the error is about, if any
PROXYCCL_OUT_OF_LINE void recordError(Control* given, uint32_t code, WaitFor what, uint64_t seen,
                                      Transfer transfer = {}) {
  Control* control = controlOr(given);
  if (control == nullptr) return;
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

// Stores a description of this wait for the CPU. The CPU requests descriptions of a kernel's waits by setting a new
// request number, here `question`. If several waits for one peer see the request, only the first one is described.
PROXYCCL_OUT_OF_LINE void describeWait(Control* control, uint32_t question, WaitFor what, uint64_t seen) {
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
  // Pairs with the acquire load of `answered` by the CPU that asked.
  storeReleaseSystem(&wait->answered, question);
}

// Checks the abort word and the clock for a spinning wait. Returns the time of the wait's first check (`started`,
// unless it is 0), or 0 if the wait must be given up.
PROXYCCL_OUT_OF_LINE uint64_t checkWait(Control* given, WaitFor what, uint64_t seen, uint64_t started) {
  Control* control = controlOr(given);
  if (control != nullptr) {
    const uint32_t abort = loadRelaxedSystem(&control->abort), asked = loadRelaxedSystem(&control->asked);
    if (abort != PROXYCCL_OK || asked != 0)
      describeWait(control, abort != PROXYCCL_OK ? PROXYCCL_LAST_QUESTION : asked, what, seen);
    if (abort != PROXYCCL_OK && aborted(control)) return 0;
  }
  const uint64_t now = nanoseconds();
  if (started == 0) return now;
  const uint64_t bound = control != nullptr ? loadRelaxedSystem(&control->timeout_ns) : kDefaultTimeoutNs;
  // A wait for another block of the grid, or for the proxy, has twice the time-out, so that a wait for a peer gives up
  // first and its error names the missing peer.
  const bool last = what.kind == PROXYCCL_WAIT_GRID || what.kind == PROXYCCL_WAIT_STAGE;
  if (now - started <= (last ? 2 * bound : bound)) return started;
  if (control != nullptr) {
    describeWait(control, PROXYCCL_LAST_QUESTION, what, seen);  // must precede recordError(), which ends other waits
    recordError(control, PROXYCCL_ERROR_TIMEOUT, what, seen);
  }
  return 0;
}

/// Spins until ready(&seen) is true. Any thread may call waitUntil().
/// @param given  the communicator's control block; null for the module's
/// @param what describes the wait, for the error record
/// @param ready  called repeatedly; stores the value that it saw in *seen
/// @return false if the communicator has ended or the time-out passed: the caller must then give up its work. A
///         time-out fills in the error record, with the value last seen
template <class Ready>
PROXYCCL_DEVICE bool waitUntil(Control* given, const WaitFor& what, Ready ready) {
  uint64_t seen = 0, started = 0;
  bool given_up = false;
  for (uint32_t spins = 0; !ready(&seen); ++spins) {
    if (spins % kSpinsPerCheck == kFirstCheck) {
      started = checkWait(given, what, seen, started);
      given_up = started == 0;
    }
    // Inside the check's branch, the return would take up to 28 more registers (in the two-shot all-reduce of float32).
    if (given_up) return false;
    spinHint(spins);
  }
  return true;
}

}  // namespace proxyccl
