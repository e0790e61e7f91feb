/* The log of a rank's collective calls, which lets ranks find that their calls differ before they wait for each other.
 * Also issues a call with a prepared launch or with stream operations.
 *
 * The log is a ring in memory that all ranks of the host map. Of two ranks, the one that makes a call later compares
 * the two entries of its number. No call completes before that, because every collective needs every rank.
 *
 * A rank that queues further ahead than the log reaches overwrites entries that a peer has yet to compare. So each
 * entry also holds a digest of all calls before it: a difference among the earlier calls is found with the first entry
 * that both ranks see, as PROXYCCL_CALL_DIFFERED.
 */
#ifndef PROXYCCL_CALLS_H
#define PROXYCCL_CALLS_H

#include <stdint.h>

#include "launch.h"
#include "proxyccl/control.h"
#include "stream_operations.h"

/* Numbers wrap around: at one call per microsecond, after half a year. No rank is that far ahead of another. */
enum { PROXYCCL_CALL_LOG_ENTRIES = 256, PROXYCCL_CALL_FIELDS = 7, PROXYCCL_CALL_NUMBER_BITS = 44 };
/* Collectives that are counted separately, execution plans included; all further collectives share one count. A power
 * of two. */
enum { PROXYCCL_CALL_KINDS = 64 };
/* Calls for which choices are kept. Drivers' queues are shorter, so no rank is ahead of another by this many calls. */
enum { PROXYCCL_CALL_CHOICES = 1024 };
enum { PROXYCCL_CALL_WAYS = 4 }; /* ways of making a call, among which ranks choose */

/* The fields of a call, which must be equal on all ranks, as channels/segment/calls.py names them. */
typedef struct ProxycclCall {
  uint64_t fields[PROXYCCL_CALL_FIELDS];
} ProxycclCall;

typedef struct ProxycclCallEntry {
  uint64_t stamp; /* the low bits of the call's number, from 1, below a digest of the calls before it; 0 while the entry
                     is being written, and for the rare call whose two parts are 0, which is not compared */
  ProxycclCall call;
} ProxycclCallEntry;

/* The calls of one collective that a rank has made. Only that rank writes the count; observers read it. */
typedef struct ProxycclCallCount {
  uint64_t collective; /* the call's first field; 0 in the count of the rest */
  uint64_t calls;
} ProxycclCallCount;

typedef struct ProxycclCallers {
  const ProxycclControl *control;
  ProxycclCallEntry *own;
  ProxycclCallCount *counts; /* PROXYCCL_CALL_KINDS counts, and one for all other collectives */
  const ProxycclCallEntry *const *peers;
  uint64_t *choices; /* PROXYCCL_CALL_CHOICES words in memory of all ranks, zeroed at first: a call's number and way */
  uint32_t peer_count;
  uint64_t sequence;                /* calls made */
  uint64_t history;                 /* a digest of the calls made */
  uint32_t differing;               /* index of the peer that made a different call */
  ProxycclCall different;           /* the call of that peer */
  uintptr_t waited;                 /* the stream of `wait_on` */
  int (*synchronize)(void *stream); /* the driver's call of `wait_on`; NULL if calls do not wait */
} ProxycclCallers;

/* DIFFERED: the calls with this number are equal, but earlier calls, which were not compared, differ. */
enum { PROXYCCL_CALL_ABORTED = -2, PROXYCCL_CALL_DIFFERS = -3, PROXYCCL_CALL_DIFFERED = -4 };

/* Makes calls on this stream return only when their work has ended. `synchronize` is the address of the driver's call
 * that waits for a stream. */
void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize);
/* Reads the call with this number from a log. Returns 1 if the log has the call, otherwise 0. Any thread may call it.
 */
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
/* Returns the way of this rank's next call, below PROXYCCL_CALL_WAYS: the wish of the rank that reached this call
 * first. A rank that lags too far behind gets its own wish; if the other ranks chose another way, the log detects the
 * difference. */
uint32_t proxyccl_calls_choose(const ProxycclCallers *callers, uint32_t wish);
/* Logs a call and compares it with the peers' calls of the same number. Returns 0 or a status above. */
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
/* Logs and compares a call as proxyccl_calls_agree does, then launches unless a rank has failed, and waits for the
 * launch if its stream is the stream of `wait_on`. Returns the driver's status or a status above, because a rank may
 * also fail during the wait; or PROXYCCL_OTHER_CONTEXT, in which case nothing was launched or logged. Without a call,
 * the launch is part of a call that was logged before; without a launch, the call is only logged. */
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream);
/* Does the same as proxyccl_calls_issue, with stream operations in place of a launch. Returns
 * PROXYCCL_STREAM_OTHER_CONTEXT, which has the same value, if nothing was done. */
int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, ProxycclStreamOperations *operations,
                        uintptr_t stream);

#endif
