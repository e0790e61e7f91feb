"""Declares the extension `proxyccl.proxy._engine`: the C engine and its transports. Run by setuptools at build time."""

import cffi

ffi = cffi.FFI()

ffi.cdef("""
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTrigger;
typedef struct { uint32_t abort; ...; } ProxycclControl;
typedef struct {
  uint64_t triggers; uint64_t puts; uint64_t bytes; uint64_t signals; uint64_t flushes; uint64_t flush_ns;
  uint64_t timed_flushes; uint64_t errors; ...;
} ProxycclCounters;

enum { PROXYCCL_OBSERVE_FORMAT, PROXYCCL_TRACE_RECORDS, PROXYCCL_TRACE_UNTOLD, ... };
#define PROXYCCL_PLACE_HANDLER ...
enum { PROXYCCL_MARK_SHIFT, PROXYCCL_MARK_BITS, ... };
typedef enum {
  PROXYCCL_MARK_SEEN, PROXYCCL_MARK_ISSUED, PROXYCCL_MARK_COMPLETED, PROXYCCL_MARK_HANDLED, ...
} ProxycclTraceMark;
typedef struct { uint32_t connection; uint16_t worker; uint16_t ring; ...; } ProxycclChannelPlace;
typedef struct {
  uint64_t issued; uint64_t completed; uint64_t errors; uint32_t in_use; uint32_t peer; char transport[...]; ...;
} ProxycclConnectionStats;
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTraceRecord;
typedef struct {
  uint64_t looks; uint64_t idle_ns; uint64_t sleeps; uint64_t slept_ns; uint64_t started_ns; uint64_t traced;
  uint64_t trace_until; ProxycclConnectionStats connections[...]; ...;
} ProxycclWorkerStats;
typedef struct { ProxycclChannelPlace channels[...]; ProxycclWorkerStats workers[]; ...; } ProxycclObserved;
uint32_t proxyccl_trace_read(const ProxycclWorkerStats *stats, uint64_t *next, ProxycclTraceRecord *records,
                             uint32_t room, uint64_t *lost);

typedef struct ProxycclConnection ProxycclConnection;
typedef enum { PROXYCCL_EXIT_STOPPED, PROXYCCL_EXIT_HANDLER, PROXYCCL_EXIT_ERROR, PROXYCCL_EXIT_ABORTED,
  PROXYCCL_EXIT_NO_WORKERS, ... } ProxycclExit;
typedef struct ProxycclWorker ProxycclWorker;
typedef struct {
  ProxycclWorker *worker;
  ProxycclTrigger trigger; uint64_t ticket; uint32_t channel; uint32_t code; int32_t status; const char *reason;
  ProxycclConnection *connection; ...;
} ProxycclExitInfo;
typedef struct { uint64_t spin_ns; uint64_t yield_ns; uint64_t max_sleep_ns; ...; } ProxycclIdlePolicy;
enum { PROXYCCL_MAX_RINGS, PROXYCCL_MAX_CONNECTIONS, ... };

typedef struct ProxycclService ProxycclService;
typedef struct ProxycclThread ProxycclThread;

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters);
void proxyccl_service_destroy(ProxycclService *service);
int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key,
                                uint32_t keyed);
int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed);
int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed);
ProxycclWorker *proxyccl_worker_create(ProxycclService *service, ProxycclWorkerStats *stats);
void proxyccl_worker_destroy(ProxycclWorker *worker);
int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2);
int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection);
void proxyccl_worker_enter_context(ProxycclWorker *worker, uintptr_t make_current, uintptr_t context);
void proxyccl_worker_stop(ProxycclWorker *worker);
void proxyccl_worker_abandon(ProxycclWorker *worker);
uint32_t proxyccl_worker_drain(ProxycclWorker *worker);
uint32_t proxyccl_worker_drained(const ProxycclWorker *worker);
uint32_t proxyccl_worker_pause(ProxycclWorker *worker);
uint32_t proxyccl_worker_paused(const ProxycclWorker *worker);
void proxyccl_worker_resume(ProxycclWorker *worker);
void proxyccl_worker_handled(ProxycclWorker *worker);
ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle);
void proxyccl_thread_destroy(ProxycclThread *thread);
void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker);
ProxycclExit proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info);

typedef struct { ...; } ProxycclRuntimeTable;
void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64, uintptr_t event_record,
                                 uintptr_t event_query);
ProxycclConnection *proxyccl_copy_connection(const ProxycclRuntimeTable *runtime, void *stream, void *event);
void proxyccl_connection_destroy(ProxycclConnection *connection);
const char *proxyccl_connection_transport(const ProxycclConnection *connection);

typedef enum { PROXYCCL_VERBS_WRITE, PROXYCCL_VERBS_FETCH_ADD, ... } ProxycclVerbsSignal;
enum { PROXYCCL_VERBS_COMPLETION, ... };
enum { PROXYCCL_VERBS_OPERATIONS, PROXYCCL_VERBS_CHAIN, ... };
typedef struct {
  uintptr_t qp; uint32_t send_depth; uint32_t cq_depth; uint32_t max_message; uint32_t signal; uint32_t signal_rkey;
  uint32_t scratch_lkey; uint64_t scratch; ...;
} ProxycclVerbsOptions;
int proxyccl_verbs_built(void);
const char *proxyccl_verbs_refused(const ProxycclVerbsOptions *options);
ProxycclConnection *proxyccl_verbs_connection(const ProxycclVerbsOptions *options);

enum { PROXYCCL_STAGED_COPY_OUT, PROXYCCL_STAGED_COPY_IN, PROXYCCL_STAGED_REFUSED, ... };
typedef enum {
  PROXYCCL_STAGED_BAD_COUNT, PROXYCCL_STAGED_BAD_LENGTH, PROXYCCL_STAGED_BAD_RANGE, PROXYCCL_STAGED_BAD_WORD, ...
} ProxycclStagedRefusal;
enum {
  PROXYCCL_STAGED_LANDINGS, PROXYCCL_STAGED_MESSAGES, PROXYCCL_STAGED_ALIGN, PROXYCCL_STAGED_WORDS_BYTES, ...
};
typedef struct { uint64_t base; uint64_t bytes; ...; } ProxycclLanding;
void proxyccl_landing_set(ProxycclLanding *landing, uint64_t base, uint64_t bytes);
typedef struct {
  ProxycclVerbsOptions wire; uintptr_t area; uintptr_t device_area; uint32_t area_lkey; uint64_t peer_area;
  uint64_t ring_bytes; uint64_t chunk_bytes; const ProxycclLanding *landings; uint64_t signals; uint64_t signals_bytes;
  ...;
} ProxycclStagedOptions;
const char *proxyccl_staged_refused(const ProxycclStagedOptions *options);
ProxycclConnection *proxyccl_staged_connection(const ProxycclStagedOptions *options,
                                               const ProxycclRuntimeTable *runtime, void *const streams[2],
                                               void *const events[2]);

enum { PROXYCCL_VERBS_QP_OFFSET, ... };
typedef enum {
  PROXYCCL_VERBS_FOUND, PROXYCCL_VERBS_NO_OBJECT, PROXYCCL_VERBS_NO_POINTER, PROXYCCL_VERBS_OTHER_QP,
  PROXYCCL_VERBS_OTHER_PARTS, PROXYCCL_VERBS_FORBIDDEN, PROXYCCL_VERBS_NOT_BUILT, ...
} ProxycclVerbsFinding;
typedef struct { uintptr_t qp; uintptr_t send_cq; ...; } ProxycclVerbsQp;
ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num, ProxycclVerbsQp *found);
ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found);

enum { PROXYCCL_VERBS_BARE_CHAIN, ... };
typedef struct {
  uintptr_t qp; uintptr_t cq; uint64_t local; uint64_t remote; uint32_t lkey; uint32_t rkey; uint32_t bytes;
  uint32_t depth; uint32_t chain; uint32_t signal_every; uint64_t count; uint64_t timeout_ns; ...;
} ProxycclVerbsBareWrites;
int64_t proxyccl_verbs_bare_writes(const ProxycclVerbsBareWrites *options);

enum { PROXYCCL_CALL_LOG_ENTRIES, PROXYCCL_CALL_FIELDS, PROXYCCL_CALL_ABORTED, PROXYCCL_CALL_DIFFERS, ... };
typedef struct { uint64_t fields[...]; } ProxycclCall;
typedef struct { uint64_t sequence; ProxycclCall call; ...; } ProxycclCallEntry;
typedef struct {
  const ProxycclControl *control; ProxycclCallEntry *own; const ProxycclCallEntry *const *peers; uint32_t peer_count;
  uint64_t sequence; uint32_t differing; ProxycclCall different; ...;
} ProxycclCallers;
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const void *launch,
                         uintptr_t stream);

int proxyccl_wake_signal_install(int signal, int eventfd);
void proxyccl_wake_signal_remove(int signal);

uint64_t proxyccl_bare_drain(ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2, uint64_t count, uint64_t
timeout_ns); uint64_t proxyccl_bare_produce(ProxycclTrigger *slots, const uint64_t *tail, uint32_t size_log2, uint64_t
first_ticket,
                               uint64_t count, ProxycclTrigger trigger, uint64_t timeout_ns);
""")

ffi.set_source(
    "proxyccl.proxy._engine",
    """
#include "calls.h"
#include "copy_transport.h"
#include "engine.h"
#include "staged_transport.h"
#include "verbs_bare.h"
#include "verbs_objects.h"
#include "verbs_transport.h"
#include "wake_signal.h"

/* Drivers' entry points arrive as addresses. */
static void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64,
                                        uintptr_t event_record, uintptr_t event_query) {
  table->copy = (int (*)(void *, const void *, size_t, void *))copy;
  table->write64 = (int (*)(void *, uint64_t *, uint64_t, unsigned))write64;
  table->event_record = (int (*)(void *, void *))event_record;
  table->event_query = (int (*)(void *))event_query;
}
static void proxyccl_worker_enter_context(ProxycclWorker *worker, uintptr_t make_current, uintptr_t context) {
  proxyccl_worker_set_context(worker, (int (*)(uintptr_t))make_current, context);
}
static void proxyccl_connection_destroy(ProxycclConnection *connection) { connection->transport->destroy(connection); }
static const char *proxyccl_connection_transport(const ProxycclConnection *connection) { return
connection->transport->name; }
""",
    sources=[
        "proxy/engine/calls.c",
        "proxy/engine/copy_transport.c",
        "proxy/engine/engine.c",
        "proxy/engine/observe.c",
        "proxy/engine/staged_transport.c",
        "proxy/engine/verbs_bare.c",
        "proxy/engine/verbs_objects.c",
        "proxy/engine/verbs_transport.c",
        "proxy/engine/wake_signal.c",
    ],
    depends=[
        "device/launch.h",
        "proxy/engine/calls.h",
        "proxy/engine/copy_transport.h",
        "proxy/engine/engine.h",
        "proxy/engine/observe.h",
        "proxy/engine/ring.h",
        "proxy/engine/runtime_table.h",
        "proxy/engine/staged_transport.h",
        "proxy/engine/trace.h",
        "proxy/engine/transport.h",
        "proxy/engine/verbs_bare.h",
        "proxy/engine/verbs_objects.h",
        "proxy/engine/verbs_transport.h",
        "proxy/engine/wake_signal.h",
        "device/include/proxyccl/trigger.h",
        "device/include/proxyccl/control.h",
    ],
    # The last is there where `make` had to fetch libibverbs' headers.
    include_dirs=["proxy/engine", "device", "device/include", "build/rdma-headers/usr/include"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
