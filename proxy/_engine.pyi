"""Made by device/build_stubs.py from build_engine.py. To change it, run: make stubs."""

from collections.abc import Sequence
from typing import Final, Literal, overload

from proxyccl.device._cdata import Array as Array
from proxyccl.device._cdata import ArrayField as ArrayField
from proxyccl.device._cdata import BaseFFI as BaseFFI
from proxyccl.device._cdata import CData as CData
from proxyccl.device._cdata import CharPointer as CharPointer
from proxyccl.device._cdata import Field as Field
from proxyccl.device._cdata import Initial as Initial
from proxyccl.device._cdata import ItemPointer as ItemPointer
from proxyccl.device._cdata import Number as Number
from proxyccl.device._cdata import Passed as Passed
from proxyccl.device._cdata import Pointer as Pointer
from proxyccl.device._cdata import PointerField as PointerField
from proxyccl.device._cdata import PointerTo as PointerTo
from proxyccl.device._cdata import Uint32Pointer as Uint32Pointer
from proxyccl.device._cdata import Uint64Pointer as Uint64Pointer
from proxyccl.device._cdata import VoidPointer as VoidPointer

class _ProxycclTrigger:
    word0: int
    word1: int

class ProxycclTrigger(_ProxycclTrigger, CData): ...
class ProxycclTriggerPointer(_ProxycclTrigger, ItemPointer[ProxycclTrigger]): ...

class _ProxycclControl:
    abort: int

class ProxycclControl(_ProxycclControl, CData): ...
class ProxycclControlPointer(_ProxycclControl, ItemPointer[ProxycclControl]): ...

class _ProxycclCounters:
    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int
    flush_ns: int
    timed_flushes: int
    errors: int
    gets: int

class ProxycclCounters(_ProxycclCounters, CData): ...
class ProxycclCountersPointer(_ProxycclCounters, ItemPointer[ProxycclCounters]): ...

class _ProxycclChannelPlace:
    connection: int
    worker: int
    ring: int

class ProxycclChannelPlace(_ProxycclChannelPlace, CData): ...
class ProxycclChannelPlacePointer(_ProxycclChannelPlace, ItemPointer[ProxycclChannelPlace]): ...

class _ProxycclConnectionStats:
    issued: int
    completed: int
    errors: int
    in_use: int
    peer: int
    transport: ArrayField[bytes, CharPointer]
    schedule_wait: int

class ProxycclConnectionStats(_ProxycclConnectionStats, CData): ...
class ProxycclConnectionStatsPointer(_ProxycclConnectionStats, ItemPointer[ProxycclConnectionStats]): ...

class _ProxycclTraceRecord:
    word0: int
    word1: int

class ProxycclTraceRecord(_ProxycclTraceRecord, CData): ...
class ProxycclTraceRecordPointer(_ProxycclTraceRecord, ItemPointer[ProxycclTraceRecord]): ...

class _ProxycclWorkerStats:
    looks: int
    idle_ns: int
    sleeps: int
    slept_ns: int
    wakes: int
    started_ns: int
    thread: int
    spin_ns: int
    yield_ns: int
    max_sleep_ns: int
    traced: int
    trace_until: int
    connections: ArrayField[ProxycclConnectionStats, ProxycclConnectionStatsPointer]

class ProxycclWorkerStats(_ProxycclWorkerStats, CData): ...
class ProxycclWorkerStatsPointer(_ProxycclWorkerStats, ItemPointer[ProxycclWorkerStats]): ...

class _ProxycclObserved:
    channels: ArrayField[ProxycclChannelPlace, ProxycclChannelPlacePointer]
    workers: ArrayField[ProxycclWorkerStats, ProxycclWorkerStatsPointer]

class ProxycclObserved(_ProxycclObserved, CData): ...
class ProxycclObservedPointer(_ProxycclObserved, ItemPointer[ProxycclObserved]): ...
class ProxycclConnection(CData): ...
class ProxycclConnectionPointer(Pointer): ...
class ProxycclWorker(CData): ...
class ProxycclWorkerPointer(Pointer): ...

class _ProxycclExitInfo:
    worker: PointerField[ProxycclWorkerPointer]
    trigger: ProxycclTrigger
    ticket: int
    channel: int
    code: int
    status: int
    reason: PointerField[CharPointer]
    connection: PointerField[ProxycclConnectionPointer]
    schedule: int
    wait: int
    of_source: int

class ProxycclExitInfo(_ProxycclExitInfo, CData): ...
class ProxycclExitInfoPointer(_ProxycclExitInfo, ItemPointer[ProxycclExitInfo]): ...

class _ProxycclIdlePolicy:
    spin_ns: int
    yield_ns: int
    max_sleep_ns: int

class ProxycclIdlePolicy(_ProxycclIdlePolicy, CData): ...
class ProxycclIdlePolicyPointer(_ProxycclIdlePolicy, ItemPointer[ProxycclIdlePolicy]): ...
class ProxycclService(CData): ...
class ProxycclServicePointer(Pointer): ...
class ProxycclThread(CData): ...
class ProxycclThreadPointer(Pointer): ...

class _ProxycclSchedulePost:
    channel: int
    memory: int
    offset: int

class ProxycclSchedulePost(_ProxycclSchedulePost, CData): ...
class ProxycclSchedulePostPointer(_ProxycclSchedulePost, ItemPointer[ProxycclSchedulePost]): ...

class _ProxycclScheduleSend:
    channel: int
    post_channel: int
    src_memory: int
    dst_memory: int
    src_offset: int
    dst_offset: int
    bytes: int
    gate: int
    gate_stage: int
    stage: int

class ProxycclScheduleSend(_ProxycclScheduleSend, CData): ...
class ProxycclScheduleSendPointer(_ProxycclScheduleSend, ItemPointer[ProxycclScheduleSend]): ...

class _ProxycclScheduleReceive:
    channel: int
    sends: int
    stage: int

class ProxycclScheduleReceive(_ProxycclScheduleReceive, CData): ...
class ProxycclScheduleReceivePointer(_ProxycclScheduleReceive, ItemPointer[ProxycclScheduleReceive]): ...

class _ProxycclTurns:
    count: int

class ProxycclTurns(_ProxycclTurns, CData): ...
class ProxycclTurnsPointer(_ProxycclTurns, ItemPointer[ProxycclTurns]): ...

class _ProxycclScheduleWords:
    bell: int
    running: int
    done: int
    gate: int
    stages: ArrayField[int, Uint64Pointer]
    turns: ArrayField[ProxycclTurns, ProxycclTurnsPointer]

class ProxycclScheduleWords(_ProxycclScheduleWords, CData): ...
class ProxycclScheduleWordsPointer(_ProxycclScheduleWords, ItemPointer[ProxycclScheduleWords]): ...

class _ProxycclScheduleSteps:
    posts: PointerField[ProxycclSchedulePostPointer]
    sends: PointerField[ProxycclScheduleSendPointer]
    receives: PointerField[ProxycclScheduleReceivePointer]
    post_count: int
    send_count: int
    receive_count: int
    joined: int

class ProxycclScheduleSteps(_ProxycclScheduleSteps, CData): ...
class ProxycclScheduleStepsPointer(_ProxycclScheduleSteps, ItemPointer[ProxycclScheduleSteps]): ...
class ProxycclRuntimeTable(CData): ...
class ProxycclRuntimeTablePointer(Pointer): ...

class _ProxycclVerbsQp:
    qp: int
    send_cq: int

class ProxycclVerbsQp(_ProxycclVerbsQp, CData): ...
class ProxycclVerbsQpPointer(_ProxycclVerbsQp, ItemPointer[ProxycclVerbsQp]): ...

class _ProxycclFabricLibrary:
    fi_getinfo: int
    fi_freeinfo: int
    fi_dupinfo: int
    fi_fabric: int

class ProxycclFabricLibrary(_ProxycclFabricLibrary, CData): ...
class ProxycclFabricLibraryPointer(_ProxycclFabricLibrary, ItemPointer[ProxycclFabricLibrary]): ...

class _ProxycclFabricOffer:
    provider: PointerField[CharPointer]
    fabric: PointerField[CharPointer]
    domain: PointerField[CharPointer]
    source: Field[VoidPointer, Pointer]
    source_bytes: int
    address_format: int
    ordered: int
    parts: int
    reads: int
    remote: int
    device_memory: int
    virtual_keys: int
    provider_keys: int
    key_bytes: int
    depth: int
    max_message: int
    bits_per_second: int

class ProxycclFabricOffer(_ProxycclFabricOffer, CData): ...
class ProxycclFabricOfferPointer(_ProxycclFabricOffer, ItemPointer[ProxycclFabricOffer]): ...
class ProxycclFabricOffers(CData): ...
class ProxycclFabricOffersPointer(Pointer): ...
class ProxycclFabricEndpoint(CData): ...
class ProxycclFabricEndpointPointer(Pointer): ...

class _ProxycclFabricParts:
    endpoint: int
    queue: int
    fabric: int
    peers: int
    descriptor: int

class ProxycclFabricParts(_ProxycclFabricParts, CData): ...
class ProxycclFabricPartsPointer(_ProxycclFabricParts, ItemPointer[ProxycclFabricParts]): ...

class _ProxycclFabricRegion:
    region: int
    key: int
    descriptor: int

class ProxycclFabricRegion(_ProxycclFabricRegion, CData): ...
class ProxycclFabricRegionPointer(_ProxycclFabricRegion, ItemPointer[ProxycclFabricRegion]): ...

class _ProxycclCall:
    fields: ArrayField[int, Uint64Pointer]

class ProxycclCall(_ProxycclCall, CData): ...
class ProxycclCallPointer(_ProxycclCall, ItemPointer[ProxycclCall]): ...

class _ProxycclCallEntry:
    stamp: int
    call: ProxycclCall

class ProxycclCallEntry(_ProxycclCallEntry, CData): ...
class ProxycclCallEntryPointer(_ProxycclCallEntry, ItemPointer[ProxycclCallEntry]): ...

class _ProxycclCallCount:
    collective: int
    calls: int

class ProxycclCallCount(_ProxycclCallCount, CData): ...
class ProxycclCallCountPointer(_ProxycclCallCount, ItemPointer[ProxycclCallCount]): ...

class _ProxycclCallers:
    control: PointerField[ProxycclControlPointer]
    own: PointerField[ProxycclCallEntryPointer]
    counts: PointerField[ProxycclCallCountPointer]
    peers: PointerField[PointerTo[ProxycclCallEntryPointer]]
    choices: PointerField[Uint64Pointer]
    peer_count: int
    sequence: int
    differing: int
    different: ProxycclCall

class ProxycclCallers(_ProxycclCallers, CData): ...
class ProxycclCallersPointer(_ProxycclCallers, ItemPointer[ProxycclCallers]): ...

class _ProxycclAnnouncement:
    version: int
    handle_bytes: int
    for_proxies: int
    handle: ArrayField[bytes, CharPointer]

class ProxycclAnnouncement(_ProxycclAnnouncement, CData): ...
class ProxycclAnnouncementPointer(_ProxycclAnnouncement, ItemPointer[ProxycclAnnouncement]): ...
class ProxycclAnnouncements(CData): ...
class ProxycclAnnouncementsPointer(Pointer): ...

class _ProxycclLetter:
    message_bytes: int
    part_bytes: int
    data: ArrayField[bytes, CharPointer]

class ProxycclLetter(_ProxycclLetter, CData): ...
class ProxycclLetterPointer(_ProxycclLetter, ItemPointer[ProxycclLetter]): ...

class _ProxycclInvitation:
    key: int
    handle_bytes: int
    handle: ArrayField[bytes, CharPointer]

class ProxycclInvitation(_ProxycclInvitation, CData): ...
class ProxycclInvitationPointer(_ProxycclInvitation, ItemPointer[ProxycclInvitation]): ...
class ProxycclRendezvous(CData): ...
class ProxycclRendezvousPointer(Pointer): ...

class _ProxycclCopyOptions:
    stream: Field[VoidPointer, Pointer]
    event: Field[VoidPointer, Pointer]
    shorts: PointerField[CharPointer]

class ProxycclCopyOptions(_ProxycclCopyOptions, CData): ...
class ProxycclCopyOptionsPointer(_ProxycclCopyOptions, ItemPointer[ProxycclCopyOptions]): ...

class _ProxycclVerbsOptions:
    qp: int
    send_depth: int
    cq_depth: int
    max_message: int
    reads: int
    signal: int
    signal_rkey: int
    scratch_lkey: int
    scratch: int

class ProxycclVerbsOptions(_ProxycclVerbsOptions, CData): ...
class ProxycclVerbsOptionsPointer(_ProxycclVerbsOptions, ItemPointer[ProxycclVerbsOptions]): ...

class _ProxycclRemoteWriteTarget:
    base: int
    bytes: int
    host: int

class ProxycclRemoteWriteTarget(_ProxycclRemoteWriteTarget, CData): ...
class ProxycclRemoteWriteTargetPointer(_ProxycclRemoteWriteTarget, ItemPointer[ProxycclRemoteWriteTarget]): ...

class _ProxycclStagedWire:
    options: Field[VoidPointer, Pointer]
    area_key: int
    peer_area: int
    peer_area_key: int

class ProxycclStagedWire(_ProxycclStagedWire, CData): ...
class ProxycclStagedWirePointer(_ProxycclStagedWire, ItemPointer[ProxycclStagedWire]): ...

class _ProxycclStagedOptions:
    wires: ArrayField[ProxycclStagedWire, ProxycclStagedWirePointer]
    wire_count: int
    credits_tell: int
    area: int
    device_area: int
    ring_bytes: int
    chunk_bytes: int
    write_targets: PointerField[ProxycclRemoteWriteTargetPointer]
    signals: int
    signals_bytes: int
    copy_out: ProxycclCopyOptions
    copy_in: ProxycclCopyOptions

class ProxycclStagedOptions(_ProxycclStagedOptions, CData): ...
class ProxycclStagedOptionsPointer(_ProxycclStagedOptions, ItemPointer[ProxycclStagedOptions]): ...

class _ProxycclWireThread:
    asleep: PointerField[Uint32Pointer]
    turn: int
    padding: ArrayField[int, Uint64Pointer]

class ProxycclWireThread(_ProxycclWireThread, CData): ...
class ProxycclWireThreadPointer(_ProxycclWireThread, ItemPointer[ProxycclWireThread]): ...

class _ProxycclFabricOptions:
    endpoint: int
    queue: int
    peer: int
    depth: int
    ordered: int
    joined: int
    reads: int
    max_message: int
    signal_key: int
    requests: int
    requests_key: int
    descriptors: PointerField[Uint64Pointer]
    looks: PointerField[Uint64Pointer]

class ProxycclFabricOptions(_ProxycclFabricOptions, CData): ...
class ProxycclFabricOptionsPointer(_ProxycclFabricOptions, ItemPointer[ProxycclFabricOptions]): ...

class Lib:
    PROXYCCL_PLACE_HANDLER: Final[int]
    PROXYCCL_SCHEDULE_WAIT_SHIFT: Final[int]
    PROXYCCL_TRACED_STEP_SHIFT: Final[int]
    PROXYCCL_NO_MORE_TURNS: Final[int]
    PROXYCCL_NO_ID: Final[int]
    PROXYCCL_UNREACHED: Final[int]
    PROXYCCL_NO_MEMORY: Final[int]
    PROXYCCL_OBSERVE_FORMAT: Final[int]
    PROXYCCL_TRACE_RECORDS: Final[int]
    PROXYCCL_TRACE_UNPUBLISHED: Final[int]
    PROXYCCL_MARK_SHIFT: Final[int]
    PROXYCCL_MARK_BITS: Final[int]
    PROXYCCL_MARK_SEEN: Final[int]
    PROXYCCL_MARK_ISSUED: Final[int]
    PROXYCCL_MARK_COMPLETED: Final[int]
    PROXYCCL_MARK_HANDLED: Final[int]
    PROXYCCL_MARK_SCHEDULE: Final[int]
    PROXYCCL_MARK_STEP: Final[int]
    PROXYCCL_TRACED_BEGIN: Final[int]
    PROXYCCL_TRACED_JOINED: Final[int]
    PROXYCCL_TRACED_SENT: Final[int]
    PROXYCCL_TRACED_RECEIVED: Final[int]
    PROXYCCL_EXIT_STOPPED: Final[int]
    PROXYCCL_EXIT_HANDLER: Final[int]
    PROXYCCL_EXIT_ERROR: Final[int]
    PROXYCCL_EXIT_ABORTED: Final[int]
    PROXYCCL_EXIT_NO_WORKERS: Final[int]
    PROXYCCL_MAX_RINGS: Final[int]
    PROXYCCL_MAX_CONNECTIONS: Final[int]
    PROXYCCL_SCHEDULE_STAGES: Final[int]
    PROXYCCL_MAX_SCHEDULES: Final[int]
    PROXYCCL_MAX_WORKERS: Final[int]
    PROXYCCL_VERBS_QP_OFFSET: Final[int]
    PROXYCCL_VERBS_FOUND: Final[int]
    PROXYCCL_VERBS_NO_OBJECT: Final[int]
    PROXYCCL_VERBS_NO_POINTER: Final[int]
    PROXYCCL_VERBS_OTHER_QP: Final[int]
    PROXYCCL_VERBS_OTHER_PARTS: Final[int]
    PROXYCCL_VERBS_FORBIDDEN: Final[int]
    PROXYCCL_VERBS_NOT_BUILT: Final[int]
    PROXYCCL_FABRIC_HOST: Final[int]
    PROXYCCL_FABRIC_CUDA: Final[int]
    PROXYCCL_FABRIC_ROCR: Final[int]
    PROXYCCL_CALL_LOG_ENTRIES: Final[int]
    PROXYCCL_CALL_FIELDS: Final[int]
    PROXYCCL_CALL_NUMBER_BITS: Final[int]
    PROXYCCL_CALL_KINDS: Final[int]
    PROXYCCL_CALL_CHOICES: Final[int]
    PROXYCCL_CALL_ABORTED: Final[int]
    PROXYCCL_CALL_DIFFERS: Final[int]
    PROXYCCL_CALL_DIFFERED: Final[int]
    PROXYCCL_ANNOUNCEMENTS: Final[int]
    PROXYCCL_ANNOUNCED_HANDLE_BYTES: Final[int]
    PROXYCCL_ANNOUNCEMENT_PEERS: Final[int]
    PROXYCCL_MAILBOX_BYTES: Final[int]
    PROXYCCL_INVITATIONS: Final[int]
    PROXYCCL_INVITATION_BYTES: Final[int]
    PROXYCCL_DECISIONS: Final[int]
    PROXYCCL_CPU_COPY_BYTES: Final[int]
    PROXYCCL_VERBS_WRITE: Final[int]
    PROXYCCL_VERBS_FETCH_ADD: Final[int]
    PROXYCCL_VERBS_COMPLETION: Final[int]
    PROXYCCL_VERBS_NO_INLINE: Final[int]
    PROXYCCL_VERBS_NO_READS: Final[int]
    PROXYCCL_VERBS_OPERATIONS: Final[int]
    PROXYCCL_VERBS_CHAIN: Final[int]
    PROXYCCL_VERBS_CHAIN_BYTES: Final[int]
    PROXYCCL_STAGED_COPY_OUT: Final[int]
    PROXYCCL_STAGED_COPY_IN: Final[int]
    PROXYCCL_STAGED_REFUSED: Final[int]
    PROXYCCL_STAGED_BAD_COUNT: Final[int]
    PROXYCCL_STAGED_BAD_LENGTH: Final[int]
    PROXYCCL_STAGED_BAD_RANGE: Final[int]
    PROXYCCL_STAGED_BAD_WORD: Final[int]
    PROXYCCL_STAGED_BAD_REQUEST: Final[int]
    PROXYCCL_STAGED_BAD_ANSWER: Final[int]
    PROXYCCL_STAGED_WRITE_TARGETS: Final[int]
    PROXYCCL_STAGED_GETS: Final[int]
    PROXYCCL_STAGED_MESSAGES: Final[int]
    PROXYCCL_STAGED_ALIGN: Final[int]
    PROXYCCL_STAGED_WIRES: Final[int]
    PROXYCCL_STAGED_WORDS_BYTES: Final[int]
    PROXYCCL_FABRIC_FAILED: Final[int]
    PROXYCCL_FABRIC_NO_READS: Final[int]
    PROXYCCL_FABRIC_REQUEST_BYTES: Final[int]
    PROXYCCL_FABRIC_MOST_DEPTH: Final[int]
    PROXYCCL_FABRIC_LOCAL_KEYS: Final[int]
    PROXYCCL_FABRIC_PARTS: Final[int]
    PROXYCCL_FABRIC_ERROR_TEXT: Final[int]
    def proxyccl_trace_read(
        self,
        stats: Passed[ProxycclWorkerStatsPointer],
        next: Passed[Uint64Pointer],
        records: Passed[ProxycclTraceRecordPointer],
        room: int,
        lost: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_service_create(
        self, control: Passed[ProxycclControlPointer], counters: Passed[ProxycclCountersPointer], /
    ) -> ProxycclServicePointer: ...
    def proxyccl_service_destroy(self, service: Passed[ProxycclServicePointer], /) -> None: ...
    def proxyccl_service_set_memory(
        self,
        service: Passed[ProxycclServicePointer],
        id: int,
        base: Passed[CharPointer] | bytes,
        bytes: int,
        key: int,
        remote_only: int,
        host: Passed[CharPointer] | bytes,
        /,
    ) -> int: ...
    def proxyccl_service_set_channel(
        self,
        service: Passed[ProxycclServicePointer],
        id: int,
        connection: Passed[ProxycclConnectionPointer],
        remote_semaphore: Passed[Uint64Pointer],
        flushed: Passed[Uint64Pointer],
        completed: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_word_acquire(self, word: Passed[Uint64Pointer], /) -> int: ...
    def proxyccl_service_set_handler(
        self,
        service: Passed[ProxycclServicePointer],
        id: int,
        flushed: Passed[Uint64Pointer],
        completed: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_service_set_schedule_words(
        self,
        service: Passed[ProxycclServicePointer],
        words: Passed[ProxycclScheduleWordsPointer],
        semaphores: Passed[Uint64Pointer],
        /,
    ) -> None: ...
    def proxyccl_schedule_words_end_waits(self, words: Passed[ProxycclScheduleWordsPointer], /) -> None: ...
    def proxyccl_service_add_schedule(
        self, service: Passed[ProxycclServicePointer], number: int, steps: Passed[ProxycclScheduleStepsPointer], /
    ) -> int: ...
    def proxyccl_service_remove_schedule(self, service: Passed[ProxycclServicePointer], number: int, /) -> int: ...
    def proxyccl_worker_create(
        self, service: Passed[ProxycclServicePointer], stats: Passed[ProxycclWorkerStatsPointer], /
    ) -> ProxycclWorkerPointer: ...
    def proxyccl_worker_destroy(self, worker: Passed[ProxycclWorkerPointer], /) -> None: ...
    def proxyccl_worker_add_ring(
        self,
        worker: Passed[ProxycclWorkerPointer],
        slots: Passed[ProxycclTriggerPointer],
        tail: Passed[Uint64Pointer],
        size_log2: int,
        /,
    ) -> int: ...
    def proxyccl_worker_add_connection(
        self, worker: Passed[ProxycclWorkerPointer], connection: Passed[ProxycclConnectionPointer], /
    ) -> int: ...
    def proxyccl_worker_enter_context(
        self, worker: Passed[ProxycclWorkerPointer], make_current: int, context: int, /
    ) -> None: ...
    def proxyccl_worker_stop(self, worker: Passed[ProxycclWorkerPointer], /) -> None: ...
    def proxyccl_worker_abandon(self, worker: Passed[ProxycclWorkerPointer], /) -> None: ...
    def proxyccl_worker_drain(self, worker: Passed[ProxycclWorkerPointer], /) -> int: ...
    def proxyccl_worker_drained(self, worker: Passed[ProxycclWorkerPointer], /) -> int: ...
    def proxyccl_worker_pause(self, worker: Passed[ProxycclWorkerPointer], /) -> int: ...
    def proxyccl_worker_paused(self, worker: Passed[ProxycclWorkerPointer], /) -> int: ...
    def proxyccl_worker_resume(self, worker: Passed[ProxycclWorkerPointer], /) -> None: ...
    def proxyccl_worker_handled(self, worker: Passed[ProxycclWorkerPointer], /) -> None: ...
    def proxyccl_thread_create(
        self, idle: Passed[ProxycclIdlePolicyPointer], asleep: Passed[Uint32Pointer], /
    ) -> ProxycclThreadPointer: ...
    def proxyccl_thread_set_idle(
        self, thread: Passed[ProxycclThreadPointer], idle: Passed[ProxycclIdlePolicyPointer], /
    ) -> None: ...
    def proxyccl_thread_destroy(self, thread: Passed[ProxycclThreadPointer], /) -> None: ...
    def proxyccl_thread_add_worker(
        self, thread: Passed[ProxycclThreadPointer], worker: Passed[ProxycclWorkerPointer], /
    ) -> None: ...
    def proxyccl_thread_run(
        self, thread: Passed[ProxycclThreadPointer], info: Passed[ProxycclExitInfoPointer], /
    ) -> int: ...
    def proxyccl_thread_helped_by(
        self, thread: Passed[ProxycclThreadPointer], add_helper: int, remove_helper: int, /
    ) -> None: ...
    def proxyccl_thread_help(self, thread: Passed[ProxycclThreadPointer], waits: int, /) -> int: ...
    def proxyccl_runtime_table_fill(
        self,
        table: Passed[ProxycclRuntimeTablePointer],
        copy: int,
        write64: int,
        write32: int,
        event_record: int,
        event_query: int,
        copy_many: int,
        /,
    ) -> None: ...
    def proxyccl_transport_refused(self, name: Passed[CharPointer] | bytes, options: Pointer, /) -> CharPointer: ...
    def proxyccl_connection_create(
        self, name: Passed[CharPointer] | bytes, options: Pointer, runtime: Passed[ProxycclRuntimeTablePointer], /
    ) -> ProxycclConnectionPointer: ...
    def proxyccl_connection_destroy(self, connection: Passed[ProxycclConnectionPointer], /) -> None: ...
    def proxyccl_verbs_find_qp(
        self, object: int, offset: int, qp_num: int, found: Passed[ProxycclVerbsQpPointer], /
    ) -> int: ...
    def proxyccl_verbs_check_qp(self, qp: int, qp_num: int, found: Passed[ProxycclVerbsQpPointer], /) -> int: ...
    def proxyccl_fabric_offers(
        self,
        library: Passed[ProxycclFabricLibraryPointer],
        ordered: int,
        reads: int,
        device_memory: int,
        offers: Passed[PointerTo[ProxycclFabricOffersPointer]] | Sequence[Passed[ProxycclFabricOffersPointer]],
        /,
    ) -> int: ...
    def proxyccl_fabric_offer(
        self, offers: Passed[ProxycclFabricOffersPointer], number: int, offer: Passed[ProxycclFabricOfferPointer], /
    ) -> int: ...
    def proxyccl_fabric_offers_free(self, offers: Passed[ProxycclFabricOffersPointer], /) -> None: ...
    def proxyccl_fabric_open(
        self,
        library: Passed[ProxycclFabricLibraryPointer],
        offers: Passed[ProxycclFabricOffersPointer],
        number: int,
        completions: int,
        waits: int,
        endpoint: Passed[PointerTo[ProxycclFabricEndpointPointer]] | Sequence[Passed[ProxycclFabricEndpointPointer]],
        call: Passed[PointerTo[CharPointer]] | Sequence[Passed[CharPointer] | bytes],
        /,
    ) -> int: ...
    def proxyccl_fabric_parts(
        self, endpoint: Passed[ProxycclFabricEndpointPointer], parts: Passed[ProxycclFabricPartsPointer], /
    ) -> None: ...
    def proxyccl_fabric_close(self, endpoint: Passed[ProxycclFabricEndpointPointer], /) -> int: ...
    def proxyccl_fabric_address(
        self, endpoint: Passed[ProxycclFabricEndpointPointer], address: Pointer, bytes: Passed[Uint64Pointer], /
    ) -> int: ...
    def proxyccl_fabric_insert(
        self,
        endpoint: Passed[ProxycclFabricEndpointPointer],
        address: Passed[CharPointer] | bytes,
        peer: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_fabric_remove(self, endpoint: Passed[ProxycclFabricEndpointPointer], peer: int, /) -> int: ...
    def proxyccl_fabric_register(
        self,
        endpoint: Passed[ProxycclFabricEndpointPointer],
        address: int,
        bytes: int,
        key: int,
        owner: int,
        device: int,
        region: Passed[ProxycclFabricRegionPointer],
        /,
    ) -> int: ...
    def proxyccl_fabric_deregister(self, region: int, /) -> int: ...
    def proxyccl_calls_wait_on(
        self, callers: Passed[ProxycclCallersPointer], stream: int, synchronize: int, /
    ) -> None: ...
    def proxyccl_calls_read(
        self, log: Passed[ProxycclCallEntryPointer], sequence: int, call: Passed[ProxycclCallPointer], /
    ) -> int: ...
    def proxyccl_calls_choose(self, callers: Passed[ProxycclCallersPointer], wish: int, /) -> int: ...
    def proxyccl_calls_agree(
        self, callers: Passed[ProxycclCallersPointer], call: Passed[ProxycclCallPointer], /
    ) -> int: ...
    def proxyccl_calls_issue(
        self,
        callers: Passed[ProxycclCallersPointer],
        call: Passed[ProxycclCallPointer],
        launch: Pointer,
        stream: int,
        /,
    ) -> int: ...
    def proxyccl_calls_ring(
        self,
        callers: Passed[ProxycclCallersPointer],
        call: Passed[ProxycclCallPointer],
        operations: Pointer,
        stream: int,
        /,
    ) -> int: ...
    def proxyccl_announce(
        self,
        table: Passed[ProxycclAnnouncementsPointer],
        entry: int,
        handle: Passed[CharPointer] | bytes,
        bytes: int,
        /,
    ) -> None: ...
    def proxyccl_announcement_changes(self, table: Passed[ProxycclAnnouncementsPointer], /) -> int: ...
    def proxyccl_announcement_changed(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, handled: Passed[Uint64Pointer], /
    ) -> int: ...
    def proxyccl_announcement_read(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, copy: Passed[ProxycclAnnouncementPointer], /
    ) -> int: ...
    def proxyccl_announcement_reply(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, peer: int, version: int, address: int, /
    ) -> None: ...
    def proxyccl_announce_to_proxies(self, table: Passed[ProxycclAnnouncementsPointer], entry: int, /) -> None: ...
    def proxyccl_announcement_reply_memory(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, peer: int, version: int, id: int, /
    ) -> None: ...
    def proxyccl_announcement_memory(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, peer: int, id: Passed[Uint32Pointer], /
    ) -> int: ...
    def proxyccl_announcement_reached(
        self, table: Passed[ProxycclAnnouncementsPointer], entry: int, peer: int, address: Passed[Uint64Pointer], /
    ) -> int: ...
    def proxyccl_mailbox_post(
        self,
        own: Passed[ProxycclRendezvousPointer],
        data: Passed[CharPointer] | bytes,
        bytes: int,
        message_bytes: int,
        /,
    ) -> None: ...
    def proxyccl_mailbox_read(
        self, theirs: Passed[ProxycclRendezvousPointer], number: int, copy: Passed[ProxycclLetterPointer], /
    ) -> int: ...
    def proxyccl_invite(
        self,
        own: Passed[ProxycclRendezvousPointer],
        place: int,
        key: int,
        handle: Passed[CharPointer] | bytes,
        bytes: int,
        /,
    ) -> None: ...
    def proxyccl_invitation_withdraw(self, own: Passed[ProxycclRendezvousPointer], place: int, /) -> None: ...
    def proxyccl_invitation_find(
        self, theirs: Passed[ProxycclRendezvousPointer], key: int, copy: Passed[ProxycclInvitationPointer], /
    ) -> int: ...
    def proxyccl_decide(self, first: Passed[ProxycclRendezvousPointer], question: int, value: int, /) -> int: ...
    def proxyccl_decision(self, first: Passed[ProxycclRendezvousPointer], question: int, /) -> int: ...
    def proxyccl_wake_signal_install(self, signal: int, eventfd: int, /) -> int: ...
    def proxyccl_wake_signal_remove(self, signal: int, /) -> None: ...
    def proxyccl_verbs_built(self) -> int: ...
    def proxyccl_remote_write_target_set(
        self, target: Passed[ProxycclRemoteWriteTargetPointer], base: int, bytes: int, host: int, /
    ) -> None: ...
    def proxyccl_staged_wire(
        self, connection: Passed[ProxycclConnectionPointer], number: int, /
    ) -> ProxycclConnectionPointer: ...
    def proxyccl_staged_wire_set_thread(
        self, wire: Passed[ProxycclConnectionPointer], thread: Passed[ProxycclWireThreadPointer], /
    ) -> None: ...
    def proxyccl_staged_fabric_error_text(self, connection: Passed[ProxycclConnectionPointer], /) -> CharPointer: ...
    def proxyccl_fabric_built(self) -> int: ...
    def proxyccl_fabric_error_text(self, connection: Passed[ProxycclConnectionPointer], /) -> CharPointer: ...

class FFI(BaseFFI):
    @overload
    def new(
        self, cdecl: Literal["ProxycclTrigger *"], init: Initial[ProxycclTrigger] = ..., /
    ) -> ProxycclTriggerPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTrigger[]"], init: int | Sequence[Initial[ProxycclTrigger]], /
    ) -> Array[ProxycclTrigger, ProxycclTriggerPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclControl *"], init: Initial[ProxycclControl] = ..., /
    ) -> ProxycclControlPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclControl[]"], init: int | Sequence[Initial[ProxycclControl]], /
    ) -> Array[ProxycclControl, ProxycclControlPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCounters *"], init: Initial[ProxycclCounters] = ..., /
    ) -> ProxycclCountersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCounters[]"], init: int | Sequence[Initial[ProxycclCounters]], /
    ) -> Array[ProxycclCounters, ProxycclCountersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclChannelPlace *"], init: Initial[ProxycclChannelPlace] = ..., /
    ) -> ProxycclChannelPlacePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclChannelPlace[]"], init: int | Sequence[Initial[ProxycclChannelPlace]], /
    ) -> Array[ProxycclChannelPlace, ProxycclChannelPlacePointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclConnectionStats *"], init: Initial[ProxycclConnectionStats] = ..., /
    ) -> ProxycclConnectionStatsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclConnectionStats[]"], init: int | Sequence[Initial[ProxycclConnectionStats]], /
    ) -> Array[ProxycclConnectionStats, ProxycclConnectionStatsPointer]: ...
    @overload
    def new(self, cdecl: Literal["char *"], init: bytes = ..., /) -> CharPointer: ...
    @overload
    def new(self, cdecl: Literal["char[]"], init: int | Sequence[bytes], /) -> Array[bytes, CharPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTraceRecord *"], init: Initial[ProxycclTraceRecord] = ..., /
    ) -> ProxycclTraceRecordPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTraceRecord[]"], init: int | Sequence[Initial[ProxycclTraceRecord]], /
    ) -> Array[ProxycclTraceRecord, ProxycclTraceRecordPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWorkerStats *"], init: Initial[ProxycclWorkerStats] = ..., /
    ) -> ProxycclWorkerStatsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWorkerStats[]"], init: int | Sequence[Initial[ProxycclWorkerStats]], /
    ) -> Array[ProxycclWorkerStats, ProxycclWorkerStatsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclObserved *"], init: Initial[ProxycclObserved] = ..., /
    ) -> ProxycclObservedPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclObserved[]"], init: int | Sequence[Initial[ProxycclObserved]], /
    ) -> Array[ProxycclObserved, ProxycclObservedPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExitInfo *"], init: Initial[ProxycclExitInfo] = ..., /
    ) -> ProxycclExitInfoPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExitInfo[]"], init: int | Sequence[Initial[ProxycclExitInfo]], /
    ) -> Array[ProxycclExitInfo, ProxycclExitInfoPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclIdlePolicy *"], init: Initial[ProxycclIdlePolicy] = ..., /
    ) -> ProxycclIdlePolicyPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclIdlePolicy[]"], init: int | Sequence[Initial[ProxycclIdlePolicy]], /
    ) -> Array[ProxycclIdlePolicy, ProxycclIdlePolicyPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSchedulePost *"], init: Initial[ProxycclSchedulePost] = ..., /
    ) -> ProxycclSchedulePostPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSchedulePost[]"], init: int | Sequence[Initial[ProxycclSchedulePost]], /
    ) -> Array[ProxycclSchedulePost, ProxycclSchedulePostPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleSend *"], init: Initial[ProxycclScheduleSend] = ..., /
    ) -> ProxycclScheduleSendPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleSend[]"], init: int | Sequence[Initial[ProxycclScheduleSend]], /
    ) -> Array[ProxycclScheduleSend, ProxycclScheduleSendPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleReceive *"], init: Initial[ProxycclScheduleReceive] = ..., /
    ) -> ProxycclScheduleReceivePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleReceive[]"], init: int | Sequence[Initial[ProxycclScheduleReceive]], /
    ) -> Array[ProxycclScheduleReceive, ProxycclScheduleReceivePointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclTurns *"], init: Initial[ProxycclTurns] = ..., /) -> ProxycclTurnsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTurns[]"], init: int | Sequence[Initial[ProxycclTurns]], /
    ) -> Array[ProxycclTurns, ProxycclTurnsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleWords *"], init: Initial[ProxycclScheduleWords] = ..., /
    ) -> ProxycclScheduleWordsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleWords[]"], init: int | Sequence[Initial[ProxycclScheduleWords]], /
    ) -> Array[ProxycclScheduleWords, ProxycclScheduleWordsPointer]: ...
    @overload
    def new(self, cdecl: Literal["uint64_t *"], init: int = ..., /) -> Uint64Pointer: ...
    @overload
    def new(self, cdecl: Literal["uint64_t[]"], init: int | Sequence[int], /) -> Array[int, Uint64Pointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleSteps *"], init: Initial[ProxycclScheduleSteps] = ..., /
    ) -> ProxycclScheduleStepsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclScheduleSteps[]"], init: int | Sequence[Initial[ProxycclScheduleSteps]], /
    ) -> Array[ProxycclScheduleSteps, ProxycclScheduleStepsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRuntimeTable *"], init: Initial[ProxycclRuntimeTable] = ..., /
    ) -> ProxycclRuntimeTablePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRuntimeTable[]"], init: int | Sequence[Initial[ProxycclRuntimeTable]], /
    ) -> Array[ProxycclRuntimeTable, ProxycclRuntimeTablePointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsQp *"], init: Initial[ProxycclVerbsQp] = ..., /
    ) -> ProxycclVerbsQpPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsQp[]"], init: int | Sequence[Initial[ProxycclVerbsQp]], /
    ) -> Array[ProxycclVerbsQp, ProxycclVerbsQpPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricLibrary *"], init: Initial[ProxycclFabricLibrary] = ..., /
    ) -> ProxycclFabricLibraryPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricLibrary[]"], init: int | Sequence[Initial[ProxycclFabricLibrary]], /
    ) -> Array[ProxycclFabricLibrary, ProxycclFabricLibraryPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOffer *"], init: Initial[ProxycclFabricOffer] = ..., /
    ) -> ProxycclFabricOfferPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOffer[]"], init: int | Sequence[Initial[ProxycclFabricOffer]], /
    ) -> Array[ProxycclFabricOffer, ProxycclFabricOfferPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricParts *"], init: Initial[ProxycclFabricParts] = ..., /
    ) -> ProxycclFabricPartsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricParts[]"], init: int | Sequence[Initial[ProxycclFabricParts]], /
    ) -> Array[ProxycclFabricParts, ProxycclFabricPartsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricRegion *"], init: Initial[ProxycclFabricRegion] = ..., /
    ) -> ProxycclFabricRegionPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricRegion[]"], init: int | Sequence[Initial[ProxycclFabricRegion]], /
    ) -> Array[ProxycclFabricRegion, ProxycclFabricRegionPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclCall *"], init: Initial[ProxycclCall] = ..., /) -> ProxycclCallPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCall[]"], init: int | Sequence[Initial[ProxycclCall]], /
    ) -> Array[ProxycclCall, ProxycclCallPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallEntry *"], init: Initial[ProxycclCallEntry] = ..., /
    ) -> ProxycclCallEntryPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallEntry[]"], init: int | Sequence[Initial[ProxycclCallEntry]], /
    ) -> Array[ProxycclCallEntry, ProxycclCallEntryPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallCount *"], init: Initial[ProxycclCallCount] = ..., /
    ) -> ProxycclCallCountPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallCount[]"], init: int | Sequence[Initial[ProxycclCallCount]], /
    ) -> Array[ProxycclCallCount, ProxycclCallCountPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallers *"], init: Initial[ProxycclCallers] = ..., /
    ) -> ProxycclCallersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallers[]"], init: int | Sequence[Initial[ProxycclCallers]], /
    ) -> Array[ProxycclCallers, ProxycclCallersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallEntry **"], init: Passed[ProxycclCallEntryPointer] = ..., /
    ) -> PointerTo[ProxycclCallEntryPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCallEntry *[]"], init: int | Sequence[Passed[ProxycclCallEntryPointer]], /
    ) -> Array[ProxycclCallEntryPointer, PointerTo[ProxycclCallEntryPointer]]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAnnouncement *"], init: Initial[ProxycclAnnouncement] = ..., /
    ) -> ProxycclAnnouncementPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAnnouncement[]"], init: int | Sequence[Initial[ProxycclAnnouncement]], /
    ) -> Array[ProxycclAnnouncement, ProxycclAnnouncementPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAnnouncements *"], init: Initial[ProxycclAnnouncements] = ..., /
    ) -> ProxycclAnnouncementsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAnnouncements[]"], init: int | Sequence[Initial[ProxycclAnnouncements]], /
    ) -> Array[ProxycclAnnouncements, ProxycclAnnouncementsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclLetter *"], init: Initial[ProxycclLetter] = ..., /
    ) -> ProxycclLetterPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclLetter[]"], init: int | Sequence[Initial[ProxycclLetter]], /
    ) -> Array[ProxycclLetter, ProxycclLetterPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclInvitation *"], init: Initial[ProxycclInvitation] = ..., /
    ) -> ProxycclInvitationPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclInvitation[]"], init: int | Sequence[Initial[ProxycclInvitation]], /
    ) -> Array[ProxycclInvitation, ProxycclInvitationPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRendezvous *"], init: Initial[ProxycclRendezvous] = ..., /
    ) -> ProxycclRendezvousPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRendezvous[]"], init: int | Sequence[Initial[ProxycclRendezvous]], /
    ) -> Array[ProxycclRendezvous, ProxycclRendezvousPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCopyOptions *"], init: Initial[ProxycclCopyOptions] = ..., /
    ) -> ProxycclCopyOptionsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCopyOptions[]"], init: int | Sequence[Initial[ProxycclCopyOptions]], /
    ) -> Array[ProxycclCopyOptions, ProxycclCopyOptionsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsOptions *"], init: Initial[ProxycclVerbsOptions] = ..., /
    ) -> ProxycclVerbsOptionsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclVerbsOptions[]"], init: int | Sequence[Initial[ProxycclVerbsOptions]], /
    ) -> Array[ProxycclVerbsOptions, ProxycclVerbsOptionsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRemoteWriteTarget *"], init: Initial[ProxycclRemoteWriteTarget] = ..., /
    ) -> ProxycclRemoteWriteTargetPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclRemoteWriteTarget[]"], init: int | Sequence[Initial[ProxycclRemoteWriteTarget]], /
    ) -> Array[ProxycclRemoteWriteTarget, ProxycclRemoteWriteTargetPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStagedWire *"], init: Initial[ProxycclStagedWire] = ..., /
    ) -> ProxycclStagedWirePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStagedWire[]"], init: int | Sequence[Initial[ProxycclStagedWire]], /
    ) -> Array[ProxycclStagedWire, ProxycclStagedWirePointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStagedOptions *"], init: Initial[ProxycclStagedOptions] = ..., /
    ) -> ProxycclStagedOptionsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStagedOptions[]"], init: int | Sequence[Initial[ProxycclStagedOptions]], /
    ) -> Array[ProxycclStagedOptions, ProxycclStagedOptionsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWireThread *"], init: Initial[ProxycclWireThread] = ..., /
    ) -> ProxycclWireThreadPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWireThread[]"], init: int | Sequence[Initial[ProxycclWireThread]], /
    ) -> Array[ProxycclWireThread, ProxycclWireThreadPointer]: ...
    @overload
    def new(self, cdecl: Literal["uint32_t *"], init: int = ..., /) -> Uint32Pointer: ...
    @overload
    def new(self, cdecl: Literal["uint32_t[]"], init: int | Sequence[int], /) -> Array[int, Uint32Pointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOptions *"], init: Initial[ProxycclFabricOptions] = ..., /
    ) -> ProxycclFabricOptionsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOptions[]"], init: int | Sequence[Initial[ProxycclFabricOptions]], /
    ) -> Array[ProxycclFabricOptions, ProxycclFabricOptionsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOffers **"], init: Passed[ProxycclFabricOffersPointer] = ..., /
    ) -> PointerTo[ProxycclFabricOffersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricOffers *[]"], init: int | Sequence[Passed[ProxycclFabricOffersPointer]], /
    ) -> Array[ProxycclFabricOffersPointer, PointerTo[ProxycclFabricOffersPointer]]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricEndpoint **"], init: Passed[ProxycclFabricEndpointPointer] = ..., /
    ) -> PointerTo[ProxycclFabricEndpointPointer]: ...
    @overload
    def new(
        self,
        cdecl: Literal["ProxycclFabricEndpoint *[]"],
        init: int | Sequence[Passed[ProxycclFabricEndpointPointer]],
        /,
    ) -> Array[ProxycclFabricEndpointPointer, PointerTo[ProxycclFabricEndpointPointer]]: ...
    @overload
    def new(self, cdecl: Literal["char **"], init: Passed[CharPointer] | bytes = ..., /) -> PointerTo[CharPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["char *[]"], init: int | Sequence[Passed[CharPointer] | bytes], /
    ) -> Array[CharPointer, PointerTo[CharPointer]]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTrigger *"], value: CData | int, /) -> ProxycclTriggerPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclControl *"], value: CData | int, /) -> ProxycclControlPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCounters *"], value: CData | int, /) -> ProxycclCountersPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclChannelPlace *"], value: CData | int, /) -> ProxycclChannelPlacePointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclConnectionStats *"], value: CData | int, /
    ) -> ProxycclConnectionStatsPointer: ...
    @overload
    def cast(self, cdecl: Literal["char *"], value: CData | int, /) -> CharPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTraceRecord *"], value: CData | int, /) -> ProxycclTraceRecordPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclWorkerStats *"], value: CData | int, /) -> ProxycclWorkerStatsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclObserved *"], value: CData | int, /) -> ProxycclObservedPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclConnection *"], value: CData | int, /) -> ProxycclConnectionPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclWorker *"], value: CData | int, /) -> ProxycclWorkerPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExitInfo *"], value: CData | int, /) -> ProxycclExitInfoPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclIdlePolicy *"], value: CData | int, /) -> ProxycclIdlePolicyPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclService *"], value: CData | int, /) -> ProxycclServicePointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclThread *"], value: CData | int, /) -> ProxycclThreadPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclSchedulePost *"], value: CData | int, /) -> ProxycclSchedulePostPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclScheduleSend *"], value: CData | int, /) -> ProxycclScheduleSendPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclScheduleReceive *"], value: CData | int, /
    ) -> ProxycclScheduleReceivePointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTurns *"], value: CData | int, /) -> ProxycclTurnsPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclScheduleWords *"], value: CData | int, /
    ) -> ProxycclScheduleWordsPointer: ...
    @overload
    def cast(self, cdecl: Literal["uint64_t *"], value: CData | int, /) -> Uint64Pointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclScheduleSteps *"], value: CData | int, /
    ) -> ProxycclScheduleStepsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclRuntimeTable *"], value: CData | int, /) -> ProxycclRuntimeTablePointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclVerbsQp *"], value: CData | int, /) -> ProxycclVerbsQpPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricLibrary *"], value: CData | int, /
    ) -> ProxycclFabricLibraryPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFabricOffer *"], value: CData | int, /) -> ProxycclFabricOfferPointer: ...
    @overload
    def cast(self, cdecl: Literal["void *"], value: CData | int, /) -> VoidPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFabricOffers *"], value: CData | int, /) -> ProxycclFabricOffersPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricEndpoint *"], value: CData | int, /
    ) -> ProxycclFabricEndpointPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFabricParts *"], value: CData | int, /) -> ProxycclFabricPartsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFabricRegion *"], value: CData | int, /) -> ProxycclFabricRegionPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCall *"], value: CData | int, /) -> ProxycclCallPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCallEntry *"], value: CData | int, /) -> ProxycclCallEntryPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCallCount *"], value: CData | int, /) -> ProxycclCallCountPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCallers *"], value: CData | int, /) -> ProxycclCallersPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclCallEntry **"], value: CData | int, /
    ) -> PointerTo[ProxycclCallEntryPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclAnnouncement *"], value: CData | int, /) -> ProxycclAnnouncementPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclAnnouncements *"], value: CData | int, /
    ) -> ProxycclAnnouncementsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclLetter *"], value: CData | int, /) -> ProxycclLetterPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclInvitation *"], value: CData | int, /) -> ProxycclInvitationPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclRendezvous *"], value: CData | int, /) -> ProxycclRendezvousPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCopyOptions *"], value: CData | int, /) -> ProxycclCopyOptionsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclVerbsOptions *"], value: CData | int, /) -> ProxycclVerbsOptionsPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclRemoteWriteTarget *"], value: CData | int, /
    ) -> ProxycclRemoteWriteTargetPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclStagedWire *"], value: CData | int, /) -> ProxycclStagedWirePointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclStagedOptions *"], value: CData | int, /
    ) -> ProxycclStagedOptionsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclWireThread *"], value: CData | int, /) -> ProxycclWireThreadPointer: ...
    @overload
    def cast(self, cdecl: Literal["uint32_t *"], value: CData | int, /) -> Uint32Pointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricOptions *"], value: CData | int, /
    ) -> ProxycclFabricOptionsPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricOffers **"], value: CData | int, /
    ) -> PointerTo[ProxycclFabricOffersPointer]: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclFabricEndpoint **"], value: CData | int, /
    ) -> PointerTo[ProxycclFabricEndpointPointer]: ...
    @overload
    def cast(self, cdecl: Literal["char **"], value: CData | int, /) -> PointerTo[CharPointer]: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], value: CData | int, /) -> Number: ...
    def sizeof(
        self,
        cdecl: CData
        | Literal[
            "ProxycclTrigger",
            "ProxycclControl",
            "ProxycclCounters",
            "ProxycclChannelPlace",
            "ProxycclConnectionStats",
            "char",
            "ProxycclTraceRecord",
            "ProxycclWorkerStats",
            "ProxycclObserved",
            "ProxycclExitInfo",
            "ProxycclIdlePolicy",
            "ProxycclSchedulePost",
            "ProxycclScheduleSend",
            "ProxycclScheduleReceive",
            "ProxycclTurns",
            "ProxycclScheduleWords",
            "uint64_t",
            "ProxycclScheduleSteps",
            "ProxycclRuntimeTable",
            "ProxycclVerbsQp",
            "ProxycclFabricLibrary",
            "ProxycclFabricOffer",
            "ProxycclFabricParts",
            "ProxycclFabricRegion",
            "ProxycclCall",
            "ProxycclCallEntry",
            "ProxycclCallCount",
            "ProxycclCallers",
            "ProxycclCallEntry *",
            "ProxycclAnnouncement",
            "ProxycclAnnouncements",
            "ProxycclLetter",
            "ProxycclInvitation",
            "ProxycclRendezvous",
            "ProxycclCopyOptions",
            "ProxycclVerbsOptions",
            "ProxycclRemoteWriteTarget",
            "ProxycclStagedWire",
            "ProxycclStagedOptions",
            "ProxycclWireThread",
            "uint32_t",
            "ProxycclFabricOptions",
            "ProxycclFabricOffers *",
            "ProxycclFabricEndpoint *",
            "char *",
        ],
        /,
    ) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

ffi: FFI
lib: Lib
