"""Declares the extension `proxyccl.proxy._engine`: the C engine and its transports. Run by setuptools at build time."""

import re
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "proxy/engine"
TRANSPORTS = re.findall(r"each\((\w+)\)", (ENGINE / "transports.h").read_text())
OPTIONS = [f"{name}_transport.h" for name in TRANSPORTS if (ENGINE / f"{name}_transport.h").exists()]
"""The headers of their options; a transport without options has none."""


def declarations(header: Path) -> str:
    """A header's declarations, for cffi: it reads no preprocessor lines."""
    return "\n".join(line for line in header.read_text().split("\n") if not line.startswith("#"))


def in_engine(pattern: str) -> list[str]:
    """Paths of the engine's files, relative to the project as setuptools wants them."""
    return sorted(f"proxy/engine/{path.name}" for path in ENGINE.glob(pattern))


ffi = cffi.FFI()

ffi.cdef("""
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTrigger;
typedef struct { uint32_t abort; ...; } ProxycclControl;
typedef struct {
  uint64_t triggers; uint64_t puts; uint64_t bytes; uint64_t signals; uint64_t flushes; uint64_t flush_ns;
  uint64_t timed_flushes; uint64_t errors; uint64_t gets; ...;
} ProxycclCounters;

enum { PROXYCCL_OBSERVE_FORMAT, PROXYCCL_TRACE_RECORDS, PROXYCCL_TRACE_UNPUBLISHED, ... };
#define PROXYCCL_PLACE_HANDLER ...
#define PROXYCCL_SCHEDULE_WAIT_SHIFT ...
enum { PROXYCCL_MARK_SHIFT, PROXYCCL_MARK_BITS, ... };
typedef enum {
  PROXYCCL_MARK_SEEN, PROXYCCL_MARK_ISSUED, PROXYCCL_MARK_COMPLETED, PROXYCCL_MARK_HANDLED, PROXYCCL_MARK_SCHEDULE,
  PROXYCCL_MARK_STEP,
  ...
} ProxycclTraceMark;
#define PROXYCCL_TRACED_STEP_SHIFT ...
typedef enum {
  PROXYCCL_TRACED_BEGIN, PROXYCCL_TRACED_JOINED, PROXYCCL_TRACED_SENT, PROXYCCL_TRACED_RECEIVED, ...
} ProxycclTracedStep;
typedef struct { uint32_t connection; uint16_t worker; uint16_t ring; ...; } ProxycclChannelPlace;
typedef struct {
  uint64_t issued; uint64_t completed; uint64_t errors; uint32_t in_use; uint32_t peer; char transport[...];
  uint64_t schedule_wait; ...;
} ProxycclConnectionStats;
typedef struct { uint64_t word0; uint64_t word1; ...; } ProxycclTraceRecord;
typedef struct {
  uint64_t looks; uint64_t idle_ns; uint64_t sleeps; uint64_t slept_ns; uint64_t wakes; uint64_t started_ns;
  uint64_t thread; uint64_t spin_ns; uint64_t yield_ns; uint64_t max_sleep_ns; uint64_t traced;
  uint64_t trace_until; ProxycclConnectionStats connections[...]; ...;
} ProxycclWorkerStats;
typedef struct { ProxycclChannelPlace channels[...]; ProxycclWorkerStats workers[]; ...; } ProxycclObserved;
uint32_t proxyccl_trace_read(const ProxycclWorkerStats *stats, uint64_t *next, ProxycclTraceRecord *records,
                             uint32_t room, uint64_t *lost);

typedef struct ProxycclConnection ProxycclConnection;
typedef enum { PROXYCCL_EXIT_STOPPED, PROXYCCL_EXIT_HANDLER, PROXYCCL_EXIT_ERROR, PROXYCCL_EXIT_ABORTED,
  PROXYCCL_EXIT_NO_WORKERS, ... } ProxycclOutcome;
typedef struct ProxycclWorker ProxycclWorker;
typedef struct {
  ProxycclWorker *worker;
  ProxycclTrigger trigger; uint64_t ticket; uint32_t channel; uint32_t code; int32_t status; const char *reason;
  ProxycclConnection *connection; uint32_t schedule; uint32_t wait; uint32_t of_source; ...;
} ProxycclExitInfo;
typedef struct { uint64_t spin_ns; uint64_t yield_ns; uint64_t max_sleep_ns; ...; } ProxycclIdlePolicy;
enum { PROXYCCL_MAX_RINGS, PROXYCCL_MAX_CONNECTIONS, PROXYCCL_SCHEDULE_STAGES, ... };

typedef struct ProxycclService ProxycclService;
typedef struct ProxycclThread ProxycclThread;

ProxycclService *proxyccl_service_create(ProxycclControl *control, ProxycclCounters *counters);
void proxyccl_service_destroy(ProxycclService *service);
int proxyccl_service_set_memory(ProxycclService *service, uint32_t id, char *base, uint64_t bytes, uint64_t key,
                                uint32_t remote_only, char *host);
int proxyccl_service_set_channel(ProxycclService *service, uint32_t id, ProxycclConnection *connection,
                                 uint64_t *remote_semaphore, uint64_t *flushed, uint64_t *completed);
uint64_t proxyccl_word_acquire(const uint64_t *word);
int proxyccl_service_set_handler(ProxycclService *service, uint32_t id, uint64_t *flushed, uint64_t *completed);
enum { PROXYCCL_MAX_SCHEDULES, PROXYCCL_MAX_WORKERS, ... };
#define PROXYCCL_NO_MORE_TURNS ...
#define PROXYCCL_NO_ID ...
typedef struct { uint32_t channel; uint32_t memory; uint64_t offset; ...; } ProxycclSchedulePost;
typedef struct {
  uint32_t channel; uint32_t post_channel; uint32_t src_memory; uint32_t dst_memory; uint64_t src_offset;
  uint64_t dst_offset; uint64_t bytes; uint64_t gate; uint32_t gate_stage; uint32_t stage; ...;
} ProxycclScheduleSend;
typedef struct { uint32_t channel; uint32_t sends; uint32_t stage; ...; } ProxycclScheduleReceive;
typedef struct { uint64_t count; ...; } ProxycclTurns;
typedef struct {
  uint64_t bell; uint64_t running; uint64_t done; uint64_t gate; uint64_t stages[...]; ProxycclTurns turns[...]; ...;
} ProxycclScheduleWords;
typedef struct {
  const ProxycclSchedulePost *posts; const ProxycclScheduleSend *sends; const ProxycclScheduleReceive *receives;
  uint32_t post_count; uint32_t send_count; uint32_t receive_count; uint32_t joined; ...;
} ProxycclScheduleSteps;
void proxyccl_service_set_schedule_words(ProxycclService *service, ProxycclScheduleWords *words,
                                         const uint64_t *semaphores);
void proxyccl_schedule_words_end_waits(ProxycclScheduleWords *words);
int proxyccl_service_add_schedule(ProxycclService *service, uint32_t number, const ProxycclScheduleSteps *steps);
int proxyccl_service_remove_schedule(ProxycclService *service, uint32_t number);
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
ProxycclThread *proxyccl_thread_create(const ProxycclIdlePolicy *idle, uint32_t *asleep);
void proxyccl_thread_set_idle(ProxycclThread *thread, const ProxycclIdlePolicy *idle);
void proxyccl_thread_destroy(ProxycclThread *thread);
void proxyccl_thread_add_worker(ProxycclThread *thread, ProxycclWorker *worker);
ProxycclOutcome proxyccl_thread_run(ProxycclThread *thread, ProxycclExitInfo *info);
void proxyccl_thread_helped_by(ProxycclThread *thread, uintptr_t add_helper, uintptr_t remove_helper);
int proxyccl_thread_help(ProxycclThread *thread, int waits);

typedef struct { ...; } ProxycclRuntimeTable;
void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64, uintptr_t write32,
                                 uintptr_t event_record, uintptr_t event_query, uintptr_t copy_many);
const char *proxyccl_transport_refused(const char *name, const void *options);
ProxycclConnection *proxyccl_connection_create(const char *name, const void *options,
                                               const ProxycclRuntimeTable *runtime);
void proxyccl_connection_destroy(ProxycclConnection *connection);

enum { PROXYCCL_VERBS_QP_OFFSET, ... };
typedef enum {
  PROXYCCL_VERBS_FOUND, PROXYCCL_VERBS_NO_OBJECT, PROXYCCL_VERBS_NO_POINTER, PROXYCCL_VERBS_OTHER_QP,
  PROXYCCL_VERBS_OTHER_PARTS, PROXYCCL_VERBS_FORBIDDEN, PROXYCCL_VERBS_NOT_BUILT, ...
} ProxycclVerbsFinding;
typedef struct { uintptr_t qp; uintptr_t send_cq; ...; } ProxycclVerbsQp;
ProxycclVerbsFinding proxyccl_verbs_find_qp(uintptr_t object, uint32_t offset, uint32_t qp_num, ProxycclVerbsQp *found);
ProxycclVerbsFinding proxyccl_verbs_check_qp(uintptr_t qp, uint32_t qp_num, ProxycclVerbsQp *found);

typedef struct {
  uintptr_t fi_getinfo; uintptr_t fi_freeinfo; uintptr_t fi_dupinfo; uintptr_t fi_fabric; ...;
} ProxycclFabricLibrary;
typedef struct {
  const char *provider; const char *fabric; const char *domain; const void *source; uint32_t source_bytes;
  uint32_t address_format; uint32_t ordered; uint32_t parts; uint32_t reads; uint32_t remote;
  uint32_t device_memory; uint32_t virtual_keys; uint32_t provider_keys; uint32_t key_bytes; uint32_t depth;
  uint64_t max_message; uint64_t bits_per_second; ...;
} ProxycclFabricOffer;
typedef struct ProxycclFabricOffers ProxycclFabricOffers;
typedef struct ProxycclFabricEndpoint ProxycclFabricEndpoint;
typedef struct {
  uintptr_t endpoint; uintptr_t queue; uintptr_t fabric; uintptr_t peers; int32_t descriptor; ...;
} ProxycclFabricParts;
typedef struct { uintptr_t region; uint64_t key; uintptr_t descriptor; ...; } ProxycclFabricRegion;
int proxyccl_fabric_offers(const ProxycclFabricLibrary *library, uint32_t ordered, uint32_t reads,
                           uint32_t device_memory, ProxycclFabricOffers **offers);
int proxyccl_fabric_offer(const ProxycclFabricOffers *offers, uint32_t number, ProxycclFabricOffer *offer);
void proxyccl_fabric_offers_free(ProxycclFabricOffers *offers);
int proxyccl_fabric_open(const ProxycclFabricLibrary *library, const ProxycclFabricOffers *offers, uint32_t number,
                         uint32_t completions, uint32_t waits, ProxycclFabricEndpoint **endpoint, const char **call);
void proxyccl_fabric_parts(const ProxycclFabricEndpoint *endpoint, ProxycclFabricParts *parts);
int proxyccl_fabric_close(ProxycclFabricEndpoint *endpoint);
int proxyccl_fabric_address(const ProxycclFabricEndpoint *endpoint, void *address, uint64_t *bytes);
int proxyccl_fabric_insert(ProxycclFabricEndpoint *endpoint, const char *address, uint64_t *peer);
int proxyccl_fabric_remove(ProxycclFabricEndpoint *endpoint, uint64_t peer);
typedef enum { PROXYCCL_FABRIC_HOST, PROXYCCL_FABRIC_CUDA, PROXYCCL_FABRIC_ROCR, ... } ProxycclFabricOwner;
int proxyccl_fabric_register(ProxycclFabricEndpoint *endpoint, uintptr_t address, uint64_t bytes, uint64_t key,
                             ProxycclFabricOwner owner, int32_t device, ProxycclFabricRegion *region);
int proxyccl_fabric_deregister(uintptr_t region);

enum { PROXYCCL_CALL_LOG_ENTRIES, PROXYCCL_CALL_FIELDS, PROXYCCL_CALL_NUMBER_BITS, PROXYCCL_CALL_KINDS,
  PROXYCCL_CALL_CHOICES,
  PROXYCCL_CALL_ABORTED, PROXYCCL_CALL_DIFFERS, PROXYCCL_CALL_DIFFERED, ... };
typedef struct { uint64_t fields[...]; } ProxycclCall;
typedef struct { uint64_t stamp; ProxycclCall call; ...; } ProxycclCallEntry;
typedef struct { uint64_t collective; uint64_t calls; } ProxycclCallCount;
typedef struct {
  const ProxycclControl *control; ProxycclCallEntry *own; ProxycclCallCount *counts;
  const ProxycclCallEntry *const *peers; uint64_t *choices; uint32_t peer_count; uint64_t sequence;
  uint32_t differing; ProxycclCall different; ...;
} ProxycclCallers;
void proxyccl_calls_wait_on(ProxycclCallers *callers, uintptr_t stream, uintptr_t synchronize);
int proxyccl_calls_read(const ProxycclCallEntry *log, uint64_t sequence, ProxycclCall *call);
int proxyccl_calls_choose(const ProxycclCallers *callers, int wish);
int proxyccl_calls_agree(ProxycclCallers *callers, const ProxycclCall *call);
int proxyccl_calls_issue(ProxycclCallers *callers, const ProxycclCall *call, const void *launch,
                         uintptr_t stream);
int proxyccl_calls_ring(ProxycclCallers *callers, const ProxycclCall *call, const void *operations, uintptr_t stream);

enum { PROXYCCL_ANNOUNCEMENTS, PROXYCCL_ANNOUNCED_HANDLE_BYTES, PROXYCCL_ANNOUNCEMENT_PEERS, ... };
#define PROXYCCL_UNREACHED ...
#define PROXYCCL_NO_MEMORY ...
typedef struct {
  uint32_t version; uint32_t handle_bytes; uint32_t for_proxies; char handle[...]; ...;
} ProxycclAnnouncement;
typedef struct { ...; } ProxycclAnnouncements;
void proxyccl_announce(ProxycclAnnouncements *table, uint32_t entry, const char *handle, uint32_t bytes);
uint64_t proxyccl_announcement_changes(const ProxycclAnnouncements *table);
uint32_t proxyccl_announcement_changed(const ProxycclAnnouncements *table, uint32_t entry, const uint64_t *handled);
uint32_t proxyccl_announcement_read(const ProxycclAnnouncements *table, uint32_t entry, ProxycclAnnouncement *copy);
void proxyccl_announcement_reply(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                 uint64_t address);
void proxyccl_announce_to_proxies(ProxycclAnnouncements *table, uint32_t entry);
void proxyccl_announcement_reply_memory(ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t version,
                                        uint32_t id);
int proxyccl_announcement_memory(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint32_t *id);
int proxyccl_announcement_reached(const ProxycclAnnouncements *table, uint32_t entry, uint32_t peer, uint64_t *address);

enum { PROXYCCL_MAILBOX_BYTES, PROXYCCL_INVITATIONS, PROXYCCL_INVITATION_BYTES, PROXYCCL_DECISIONS, ... };
typedef struct { uint32_t message_bytes; uint32_t part_bytes; char data[...]; ...; } ProxycclLetter;
typedef struct { uint64_t key; uint32_t handle_bytes; char handle[...]; ...; } ProxycclInvitation;
typedef struct { ...; } ProxycclRendezvous;
void proxyccl_mailbox_post(ProxycclRendezvous *own, const char *data, uint32_t bytes, uint32_t message_bytes);
int proxyccl_mailbox_read(const ProxycclRendezvous *theirs, uint64_t number, ProxycclLetter *copy);
void proxyccl_invite(ProxycclRendezvous *own, uint32_t place, uint64_t key, const char *handle, uint32_t bytes);
void proxyccl_invitation_withdraw(ProxycclRendezvous *own, uint32_t place);
int proxyccl_invitation_find(const ProxycclRendezvous *theirs, uint64_t key, ProxycclInvitation *copy);
uint64_t proxyccl_decide(ProxycclRendezvous *first, uint32_t question, uint64_t value);
uint64_t proxyccl_decision(const ProxycclRendezvous *first, uint32_t question);

int proxyccl_wake_signal_install(int signal, int eventfd);
void proxyccl_wake_signal_remove(int signal);
""")

for header in OPTIONS:
    ffi.cdef(declarations(ENGINE / header))

ffi.set_source(
    "proxyccl.proxy._engine",
    "\n".join(f'#include "{header}"' for header in OPTIONS)
    + """
#include "announcements.h"
#include "calls.h"
#include "engine.h"
#include "fabric_objects.h"
#include "rendezvous.h"
#include "transports.h"
#include "verbs_objects.h"
#include "wake_signal.h"

/* Drivers' entry points arrive as addresses. */
static void proxyccl_runtime_table_fill(ProxycclRuntimeTable *table, uintptr_t copy, uintptr_t write64,
                                        uintptr_t write32, uintptr_t event_record, uintptr_t event_query,
                                        uintptr_t copy_many) {
  table->copy = (int (*)(void *, const void *, size_t, void *))copy;
  table->write64 = (int (*)(void *, uint64_t *, uint64_t, unsigned))write64;
  table->write32 = (int (*)(void *, uint32_t *, uint32_t, unsigned))write32;
  table->event_record = (int (*)(void *, void *))event_record;
  table->event_query = (int (*)(void *))event_query;
  table->copy_many = (int (*)(uint64_t *, uint64_t *, size_t *, size_t, ProxycclCopyAttributes *, size_t *, size_t,
                              void *))copy_many;
}
static void proxyccl_worker_enter_context(ProxycclWorker *worker, uintptr_t make_current, uintptr_t context) {
  proxyccl_worker_set_context(worker, (int (*)(uintptr_t))make_current, context);
}
static void proxyccl_thread_helped_by(ProxycclThread *thread, uintptr_t add_helper, uintptr_t remove_helper) {
  proxyccl_thread_take_help(thread, (void (*)(int (*)(void *, int), void *))add_helper,
                            (void (*)(void *))remove_helper);
}
""",
    sources=in_engine("*.c"),
    depends=[
        *in_engine("*.h"),
        "device/launch.h",
        "device/waking.h",
        "device/stream_operations.h",
        "device/include/proxyccl/trigger.h",
        "device/include/proxyccl/control.h",
        "device/include/proxyccl/platform_host_memmove.h",
    ],
    # The last two exist where `make` had to fetch libibverbs' and libfabric's headers.
    include_dirs=[
        "proxy/engine",
        "device",
        "device/include",
        "build/rdma-headers/usr/include",
        "build/fabric-headers/usr/include",
    ],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
