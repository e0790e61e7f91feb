/* The log of a rank's collective calls, which lets ranks see that they disagree before they wait for each other; and
 * the issue of a call whose launch is prepared.
 *
 * The log is a ring in memory that all ranks of the host map. Whoever comes second to a call of one number compares:
 * nothing can complete before, since every collective needs every rank.
 */
#ifndef PROXYCCL_CALLS_H
#define PROXYCCL_CALLS_H

#include <stdint.h>

#include "launch.h"
#include "proxyccl/control.h"

enum { PROXYCCL_CALL_LOG_ENTRIES = 256, PROXYCCL_CALL_FIELDS = 6 };

/* What must agree between ranks, as channels/control.py names it. */
typedef struct ProxycclCall {
  uint64_t fields[PROXYCCL_CALL_FIELDS];
} ProxycclCall;

typedef struct ProxycclCallEntry {
  uint64_t sequence; /* the call's number, from 1; 0 while the entry is being written */
  ProxycclCall call;
  uint64_t reserved;
} ProxycclCallEntry;

typedef struct ProxycclCallers {
  const ProxycclControl *control;
  ProxycclCallEntry *own;
  const ProxycclCallEntry *const *peers;
  uint32_t peer_count;
  uint64_t sequence;      /* calls made */
  uint32_t differing;     /* index of the peer that made another call … */
  ProxycclCall different; /* … and what that was */
} ProxycclCallers;

enum { PROXYCCL_CALL_ABORTED = -2, PROXYCCL_CALL_DIFFERS = -3 };

/* Reads the call of this number from a log. Returns whether it is there. For any thread. */
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
/* Logs a call and compares it with those of the same number that peers have logged. 0, or one of the above. */
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
/* The same, then the launch, and its status. With PROXYCCL_OTHER_CONTEXT nothing was done, not even logged. */
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream);

#endif
