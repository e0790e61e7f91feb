"""Declares the extension `proxyccl.proxy._engine`: the C engine and its transports. Run by setuptools at build time."""

import cffi

ffi = cffi.FFI()

ffi.cdef("""
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTrigger;
typedef struct { uint32_t abort; ...; } ProxycclControl;
typedef struct { uint64_t triggers; uint64_t puts; uint64_t bytes; uint64_t signals; uint64_t flushes; ...; }
ProxycclCounters;

typedef enum { PROXYCCL_EXIT_STOPPED, PROXYCCL_EXIT_HANDLER, PROXYCCL_EXIT_ERROR, PROXYCCL_EXIT_ABORTED, ... }
ProxycclExit; typedef struct {
  ProxycclTrigger trigger; uint64_t ticket; uint32_t channel; uint32_t code; int32_t status; const char *reason; ...;
} ProxycclExitInfo;
typedef struct { uint64_t spin_ns; uint64_t yield_ns; uint64_t max_sleep_ns; ...; } ProxycclIdlePolicy;
enum { PROXYCCL_MAX_RINGS, PROXYCCL_MAX_CONNECTIONS, ... };

typedef struct ProxycclService ProxycclService;
typedef struct ProxycclWorker ProxycclWorker;
typedef struct ProxycclConnection ProxycclConnection;

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters);
void proxyccl_service_destroy(ProxycclService *service);
int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key);
int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed);
int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed);
ProxycclWorker *proxyccl_worker_create(ProxycclService *service, const ProxycclIdlePolicy *idle);
void proxyccl_worker_destroy(ProxycclWorker *worker);
int proxyccl_worker_add_ring(ProxycclWorker *worker, ProxycclTrigger *slots, uint64_t *tail, uint32_t size_log2);
int proxyccl_worker_add_connection(ProxycclWorker *worker, ProxycclConnection *connection);
ProxycclExit proxyccl_worker_run(ProxycclWorker *worker, ProxycclExitInfo *info);
void proxyccl_worker_stop(ProxycclWorker *worker);
void proxyccl_worker_handled(ProxycclWorker *worker);

typedef struct { ...; } ProxycclRuntimeTable;
void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64, uintptr_t event_record,
                                 uintptr_t event_query);
ProxycclConnection *proxyccl_copy_connection(const ProxycclRuntimeTable *runtime, void *stream, void *event);
void proxyccl_connection_destroy(ProxycclConnection *connection);
const char *proxyccl_connection_transport(const ProxycclConnection *connection);

enum { PROXYCCL_CALL_LOG_ENTRIES, PROXYCCL_CALL_FIELDS, PROXYCCL_CALL_ABORTED, PROXYCCL_CALL_DIFFERS, ... };
typedef struct { uint64_t fields[...]; } ProxycclCall;
typedef struct { uint64_t sequence; ProxycclCall call; ...; } ProxycclCallEntry;
typedef struct {
  const ProxycclControl *control; ProxycclCallEntry *own; const ProxycclCallEntry *const *peers; uint32_t peer_count;
  uint64_t sequence; uint32_t differing; ProxycclCall different; ...;
} ProxycclCallers;
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const void *launch,
                         uintptr_t stream);

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

/* Drivers' entry points arrive as addresses. */
static void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64,
                                        uintptr_t event_record, uintptr_t event_query) {
  table->copy = (int (*)(void *, const void *, size_t, void *))copy;
  table->write64 = (int (*)(void *, uint64_t *, uint64_t, unsigned))write64;
  table->event_record = (int (*)(void *, void *))event_record;
  table->event_query = (int (*)(void *))event_query;
}
static void proxyccl_connection_destroy(ProxycclConnection *connection) { connection->transport->destroy(connection); }
static const char *proxyccl_connection_transport(const ProxycclConnection *connection) { return
connection->transport->name; }
""",
    sources=["proxy/engine/calls.c", "proxy/engine/engine.c", "proxy/engine/copy_transport.c"],
    depends=[
        "device/launch.h",
        "proxy/engine/calls.h",
        "proxy/engine/engine.h",
        "proxy/engine/ring.h",
        "proxy/engine/transport.h",
        "proxy/engine/runtime_table.h",
        "device/include/proxyccl/trigger.h",
        "device/include/proxyccl/control.h",
    ],
    include_dirs=["proxy/engine", "device", "device/include"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
