/* Each rank logs its collective calls, so that ranks with different calls get an error instead of waiting for each
 * other forever. The functions of this file also issue a call's prepared launch or stream operations.
 *
 * The log is a ring in memory that all ranks of the host map. Of two ranks, the rank that is later to make call number
 * N compares entry N of both logs. No call completes before the comparison, because every collective needs every rank.
 *
 * If a rank is ahead of a peer by more calls than the log has entries, the rank overwrites entries that the peer has
 * not compared yet. So each entry also has a digest of all earlier calls. If earlier calls differ, the comparison of
 * the next entry that is still in the log returns the status PROXYCCL_CALL_DIFFERED. */
#pragma once

#include <stdint.h>

#include "launch.h"
#include "proxyccl/control.h"
#include "stream_operations.h"

/* At one call per microsecond, the numbers of calls wrap around after half a year. No rank is ever half a year ahead of
 * another rank. */
enum { PROXYCCL_CALL_LOG_ENTRIES = 256, PROXYCCL_CALL_FIELDS = 7, PROXYCCL_CALL_NUMBER_BITS = 44 };
/* The number of collectives and execution plans that are counted separately, a power of two. All other collectives and
 * plans share one count. */
enum { PROXYCCL_CALL_KINDS = 64 };

/* The fields of a call, which must be equal on all ranks. channels/segment/calls.py names them. */
typedef struct ProxycclCall {
  uint64_t fields[PROXYCCL_CALL_FIELDS];
} ProxycclCall;

typedef struct ProxycclCallEntry {
  uint64_t stamp; /* the call's number, counted from 1, in the low PROXYCCL_CALL_NUMBER_BITS bits; a digest of all
                     earlier calls in the other bits; 0 while the entry is being written. A call whose stamp happens to
                     be 0 is not compared. */
  ProxycclCall call;
} ProxycclCallEntry;

/* Counts a rank's calls of one collective. Only the rank itself writes the count; observers read the count. */
typedef struct ProxycclCallCount {
  uint64_t collective; /* the first field of the counted calls; 0 in the count for all further collectives */
  uint64_t calls;
} ProxycclCallCount;

typedef struct ProxycclCallers {
  const ProxycclControl *control;
  ProxycclCallEntry *own;
  ProxycclCallCount *counts; /* PROXYCCL_CALL_KINDS counts, then the count of all further collectives */
  const ProxycclCallEntry *const *peers;
  uint32_t peer_count;
  uint64_t sequence;                /* number of calls that this rank has made */
  uint64_t history;                 /* a digest of this rank's calls */
  uint32_t differing;               /* index of the peer that made a different call */
  ProxycclCall different;           /* the call of the peer `differing` */
  uintptr_t waited;                 /* the stream on which calls wait (proxyccl_calls_wait_on) */
  int (*synchronize)(void *stream); /* the driver's function that waits for a stream; NULL if calls do not wait */
} ProxycclCallers;

/* PROXYCCL_CALL_DIFFERS: the peer's call with this number differs. PROXYCCL_CALL_DIFFERED: the calls with this number
 * are equal, but earlier calls, which were not compared, differ. */
enum { PROXYCCL_CALL_ABORTED = -2, PROXYCCL_CALL_DIFFERS = -3, PROXYCCL_CALL_DIFFERED = -4 };

/* Makes later calls on `stream` return only when the stream's work has ended. `synchronize` is the address of the
 * driver's function that waits for a stream. */
void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize);
/* Reads call number `sequence` from a log. Returns 1 if the log has the call, otherwise 0. Any thread may call this
 * function. */
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
/* Logs a call, and compares the call with the peers' calls of the same number. Returns 0 or a negative PROXYCCL_CALL_
 * status. */
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
/* Logs and compares a call as proxyccl_calls_agree does, then launches the call's kernel unless a rank has failed. If
 * proxyccl_calls_wait_on has named `stream`, waits for the launch. Returns the driver's status; a negative
 * PROXYCCL_CALL_ status, for example if a rank fails during the wait; or PROXYCCL_OTHER_CONTEXT if another context is
 * current, so that nothing was logged or launched. If `call` is NULL, the launch belongs to a call that is already
 * logged. If `launch` is NULL, the call is only logged and compared. */
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const ProxycclLaunch *launch,
                         uintptr_t stream);
/* Does the same as proxyccl_calls_issue, but issues stream operations instead of a launch. If another context is
 * current, does nothing and returns PROXYCCL_STREAM_OTHER_CONTEXT, which has the same value as
 * PROXYCCL_OTHER_CONTEXT. */
int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, ProxycclStreamOperations *operations,
                        uintptr_t stream);
