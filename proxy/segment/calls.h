/* The log of a rank's collective calls, by which ranks notice that their calls differ before they wait for each other.
 * The functions also issue a call's prepared launch or stream operations.
 *
 * The log is a ring in memory that all ranks of the host map. Of two ranks, the one that makes a call later compares
 * the two ranks' entries with the call's number. No call completes before the comparison, because every collective
 * needs every rank.
 *
 * A rank that is ahead of a peer by more calls than the log has entries overwrites entries that the peer has not
 * compared yet. So each entry also has a digest of all earlier calls. If earlier calls differ, the ranks notice it at
 * the next entry that they can compare, and the status is PROXYCCL_CALL_DIFFERED.
 */
#ifndef PROXYCCL_CALLS_H
#define PROXYCCL_CALLS_H

#include <stdint.h>

#include "launch.h"
#include "proxyccl/control.h"
#include "stream_operations.h"

/* The numbers of calls wrap around, at one call per microsecond after half a year. No rank is ever that far ahead of
 * another. */
enum { PROXYCCL_CALL_LOG_ENTRIES = 256, PROXYCCL_CALL_FIELDS = 7, PROXYCCL_CALL_NUMBER_BITS = 44 };
/* The number of collectives, execution plans included, that are counted separately; all further collectives share one
 * count. A power of two. */
enum { PROXYCCL_CALL_KINDS = 64 };
/* The number of latest calls for which choices are kept. Drivers' queues are shorter, so no rank is ahead of another by
 * this many calls. */
enum { PROXYCCL_CALL_CHOICES = 1024 };
enum { PROXYCCL_CALL_WAYS = 4 }; /* alternative ways of making a call, of which all ranks must choose the same */

/* The fields of a call, which must be equal on all ranks. channels/segment/calls.py names them. */
typedef struct ProxycclCall {
  uint64_t fields[PROXYCCL_CALL_FIELDS];
} ProxycclCall;

typedef struct ProxycclCallEntry {
  uint64_t stamp; /* the low bits of the call's number, which begins at 1, below a digest of all earlier calls; 0 while
                     the entry is being written. A call whose stamp happens to be 0 is not compared. */
  ProxycclCall call;
} ProxycclCallEntry;

/* The number of calls of one collective that a rank has made. Only that rank writes the count; observers read it. */
typedef struct ProxycclCallCount {
  uint64_t collective; /* the first field of these calls; 0 in the count that all further collectives share */
  uint64_t calls;
} ProxycclCallCount;

typedef struct ProxycclCallers {
  const ProxycclControl *control;
  ProxycclCallEntry *own;
  ProxycclCallCount *counts; /* PROXYCCL_CALL_KINDS counts, then the count of all further collectives */
  const ProxycclCallEntry *const *peers;
  uint64_t *choices; /* PROXYCCL_CALL_CHOICES words that all ranks map, zeroed at first: each has a call's number and
                        its chosen way */
  uint32_t peer_count;
  uint64_t sequence;                /* number of calls that this rank has made */
  uint64_t history;                 /* a digest of these calls */
  uint32_t differing;               /* index of the peer that made a different call */
  ProxycclCall different;           /* the call of that peer */
  uintptr_t waited;                 /* the stream on which calls wait (proxyccl_calls_wait_on) */
  int (*synchronize)(void *stream); /* the driver's function that waits for a stream; NULL if calls do not wait */
} ProxycclCallers;

/* PROXYCCL_CALL_DIFFERS: the peer's call with this number differs. PROXYCCL_CALL_DIFFERED: the calls with this number
 * are equal, but earlier calls, which were not compared, differ. */
enum { PROXYCCL_CALL_ABORTED = -2, PROXYCCL_CALL_DIFFERS = -3, PROXYCCL_CALL_DIFFERED = -4 };

/* Makes later calls on this stream return only when their work has ended. `synchronize` is the address of the driver's
 * function that waits for a stream. */
void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize);
/* Reads the call with this number from a log. Returns 1 if the log has the call, otherwise 0. Any thread may call this
 * function.
 */
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
/* Returns the way (below PROXYCCL_CALL_WAYS) in which this rank must make its next call: the `wish` of the rank that
 * was the first to ask about this call. A rank that is too many calls behind gets its own wish; if the other ranks
 * chose another way, the comparison of calls detects the difference. */
uint32_t proxyccl_calls_choose(const ProxycclCallers *callers, uint32_t wish);
/* Logs a call and compares it with the peers' calls of the same number. Returns 0 or a negative PROXYCCL_CALL_
 * status. */
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
/* Logs and compares a call as proxyccl_calls_agree does, then launches its kernel unless a rank has failed. If `stream`
 * is that of proxyccl_calls_wait_on, waits for the launch. Returns the driver's status, or a negative PROXYCCL_CALL_
 * status, also if a rank fails during the wait; or PROXYCCL_OTHER_CONTEXT if nothing was logged or launched. If `call`
 * is NULL, the launch is part of a call that was logged before; if `launch` is NULL, the call is only logged. */
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream);
/* Does the same as proxyccl_calls_issue, with stream operations in place of a launch. If nothing was done, returns
 * PROXYCCL_STREAM_OTHER_CONTEXT, whose value is the same as PROXYCCL_OTHER_CONTEXT. */
int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, ProxycclStreamOperations *operations,
                        uintptr_t stream);

#endif
