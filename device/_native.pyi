"""Made by device/build_stubs.py from build_native.py. To change it, run: make stubs."""

from collections.abc import Sequence
from typing import Final, Literal, overload

from proxyccl.device._cdata import Array as Array
from proxyccl.device._cdata import ArrayField as ArrayField
from proxyccl.device._cdata import BaseFFI as BaseFFI
from proxyccl.device._cdata import CData as CData
from proxyccl.device._cdata import CharPointer as CharPointer
from proxyccl.device._cdata import Field as Field
from proxyccl.device._cdata import FloatPointer as FloatPointer
from proxyccl.device._cdata import Initial as Initial
from proxyccl.device._cdata import Int32Pointer as Int32Pointer
from proxyccl.device._cdata import IntPointer as IntPointer
from proxyccl.device._cdata import ItemPointer as ItemPointer
from proxyccl.device._cdata import Number as Number
from proxyccl.device._cdata import Passed as Passed
from proxyccl.device._cdata import Pointer as Pointer
from proxyccl.device._cdata import PointerField as PointerField
from proxyccl.device._cdata import PointerTo as PointerTo
from proxyccl.device._cdata import Uint32Pointer as Uint32Pointer
from proxyccl.device._cdata import Uint64Pointer as Uint64Pointer
from proxyccl.device._cdata import UnsignedIntPointer as UnsignedIntPointer
from proxyccl.device._cdata import VoidPointer as VoidPointer

class _ProxycclTrigger:
    word0: int
    word1: int

class ProxycclTrigger(_ProxycclTrigger, CData): ...
class ProxycclTriggerPointer(_ProxycclTrigger, ItemPointer[ProxycclTrigger]): ...

class _ProxycclErrorRecord:
    state: int
    code: int
    rank: int
    peer: int
    wait: int
    operation: int
    channel: int
    status: int
    expected: int
    seen: int
    offset: int
    size: int

class ProxycclErrorRecord(_ProxycclErrorRecord, CData): ...
class ProxycclErrorRecordPointer(_ProxycclErrorRecord, ItemPointer[ProxycclErrorRecord]): ...

class _ProxycclWait:
    claimed: int
    answered: int
    kind: int
    peer: int
    channel: int
    expected: int
    seen: int

class ProxycclWait(_ProxycclWait, CData): ...
class ProxycclWaitPointer(_ProxycclWait, ItemPointer[ProxycclWait]): ...

class _ProxycclControl:
    abort: int
    asked: int
    rank: int
    failed_rank: int
    timeout_ns: int
    error: ProxycclErrorRecord
    peers: PointerField[PointerTo[ProxycclControlPointer]]
    peer_count: int
    waits: ArrayField[ProxycclWait, ProxycclWaitPointer]

class ProxycclControl(_ProxycclControl, CData): ...
class ProxycclControlPointer(_ProxycclControl, ItemPointer[ProxycclControl]): ...

class _ProxycclFifo:
    slots: PointerField[ProxycclTriggerPointer]
    tail: PointerField[Uint64Pointer]
    head: PointerField[Uint64Pointer]
    tail_cache: PointerField[Uint64Pointer]
    refresh_lock: PointerField[Uint32Pointer]
    size_log2: int
    size: int
    size_mask: int

class ProxycclFifo(_ProxycclFifo, CData): ...
class ProxycclFifoPointer(_ProxycclFifo, ItemPointer[ProxycclFifo]): ...

class _ProxycclSemaphore:
    inbound: PointerField[Uint64Pointer]
    expected: PointerField[Uint64Pointer]
    remote_inbound: PointerField[Uint64Pointer]
    outbound: PointerField[Uint64Pointer]
    adds: int

class ProxycclSemaphore(_ProxycclSemaphore, CData): ...
class ProxycclSemaphorePointer(_ProxycclSemaphore, ItemPointer[ProxycclSemaphore]): ...

class _ProxycclSmChannel:
    semaphore: ProxycclSemaphore
    dst: PointerField[CharPointer]
    src: PointerField[CharPointer]
    packet_buffer: PointerField[CharPointer]
    control: PointerField[ProxycclControlPointer]
    dst_bytes: int
    src_bytes: int
    packet_buffer_bytes: int
    peer: int
    channel: int

class ProxycclSmChannel(_ProxycclSmChannel, CData): ...
class ProxycclSmChannelPointer(_ProxycclSmChannel, ItemPointer[ProxycclSmChannel]): ...

class _ProxycclProxyChannel:
    fifo: ProxycclFifo
    semaphore: ProxycclSemaphore
    flushed: PointerField[Uint64Pointer]
    completed: PointerField[Uint64Pointer]
    memory_limits: PointerField[Uint64Pointer]
    control: PointerField[ProxycclControlPointer]
    channel: int
    peer: int
    dst_memory: int
    src_memory: int

class ProxycclProxyChannel(_ProxycclProxyChannel, CData): ...
class ProxycclProxyChannelPointer(_ProxycclProxyChannel, ItemPointer[ProxycclProxyChannel]): ...

class _ProxycclLink:
    semaphore: ProxycclSemaphore
    proxy: ProxycclProxyChannel
    remote: PointerField[CharPointer]
    proxied: int
    peer: int

class ProxycclLink(_ProxycclLink, CData): ...
class ProxycclLinkPointer(_ProxycclLink, ItemPointer[ProxycclLink]): ...
class ProxycclTeamCounters(CData): ...
class ProxycclTeamCountersPointer(Pointer): ...

class _ProxycclTeam:
    rank: int
    world_size: int
    divisor: int
    lanes: int
    control: PointerField[ProxycclControlPointer]
    links: PointerField[ProxycclLinkPointer]
    counters: PointerField[ProxycclTeamCountersPointer]
    epochs: PointerField[Uint32Pointer]
    scratch: PointerField[CharPointer]
    proxied: PointerField[CharPointer]
    exchange_bytes: int
    pipeline_bytes: int
    outputs_offset: int
    staging_offset: int
    one_crossing_bytes: int
    share: int
    piece: int
    pieces: int
    slot_bytes: int
    meet: int
    offers: int
    remote: ArrayField[CharPointer, PointerTo[CharPointer]]
    reached_at: ArrayField[CharPointer, PointerTo[CharPointer]]

class ProxycclTeam(_ProxycclTeam, CData): ...
class ProxycclTeamPointer(_ProxycclTeam, ItemPointer[ProxycclTeam]): ...

class _ProxycclTransfer:
    src: PointerField[CharPointer]
    dst: PointerField[CharPointer]
    bytes: int
    lane_bytes: int
    peer: int
    lanes: int

class ProxycclTransfer(_ProxycclTransfer, CData): ...
class ProxycclTransferPointer(_ProxycclTransfer, ItemPointer[ProxycclTransfer]): ...

class _ProxycclFlows:
    rank: int
    world_size: int
    lanes: int
    count: int
    control: PointerField[ProxycclControlPointer]
    links: PointerField[ProxycclLinkPointer]
    pieces: PointerField[Uint64Pointer]
    scratch: PointerField[CharPointer]
    slot_bytes: int
    staging_offset: int
    transfers: ArrayField[ProxycclTransfer, ProxycclTransferPointer]

class ProxycclFlows(_ProxycclFlows, CData): ...
class ProxycclFlowsPointer(_ProxycclFlows, ItemPointer[ProxycclFlows]): ...

class _ProxycclPacketTeam:
    rank: int
    world_size: int
    slot_packets: int
    epoch_packets: int
    call_epochs: int
    share: int
    control: PointerField[ProxycclControlPointer]
    epochs: PointerField[Uint32Pointer]
    scratch: PointerField[CharPointer]
    remote: ArrayField[CharPointer, PointerTo[CharPointer]]

class ProxycclPacketTeam(_ProxycclPacketTeam, CData): ...
class ProxycclPacketTeamPointer(_ProxycclPacketTeam, ItemPointer[ProxycclPacketTeam]): ...

class _ProxycclArrived:
    slots: PointerField[CharPointer]
    slot_bytes: int
    rank: int
    world_size: int
    divisor: int
    pieces: int
    chunks: int
    chunk: int
    piece: int
    stages: PointerField[Uint64Pointer]
    joined: PointerField[Uint64Pointer]
    transfers: int
    first: int
    gate: PointerField[Uint64Pointer]
    chunks_done: PointerField[Uint32Pointer]
    here: PointerField[Uint32Pointer]
    taken: PointerField[Uint32Pointer]
    blocks_done: PointerField[Uint32Pointer]
    opened: PointerField[Uint32Pointer]
    control: PointerField[ProxycclControlPointer]

class ProxycclArrived(_ProxycclArrived, CData): ...
class ProxycclArrivedPointer(_ProxycclArrived, ItemPointer[ProxycclArrived]): ...

class _ProxycclOperand:
    address: int
    base: int
    packets: int
    alternates: int

class ProxycclOperand(_ProxycclOperand, CData): ...
class ProxycclOperandPointer(_ProxycclOperand, ItemPointer[ProxycclOperand]): ...

class _ProxycclStep:
    code: int
    place: int
    thread: int
    channel: int
    option: int
    sources: int
    destinations: int
    first_operand: int
    bytes: int
    unit: int
    iterations: int
    packets: int
    dst_memory: int
    src_memory: int
    dst_offset: int
    src_offset: int
    dst_alternates: int
    src_alternates: int
    semaphore: ProxycclSemaphore

class ProxycclStep(_ProxycclStep, CData): ...
class ProxycclStepPointer(_ProxycclStep, ItemPointer[ProxycclStep]): ...

class _ProxycclExecutionCounters:
    executions: int

class ProxycclExecutionCounters(_ProxycclExecutionCounters, CData): ...
class ProxycclExecutionCountersPointer(_ProxycclExecutionCounters, ItemPointer[ProxycclExecutionCounters]): ...

class _ProxycclExecution:
    control: PointerField[ProxycclControlPointer]
    input: PointerField[CharPointer]
    output: PointerField[CharPointer]
    steps: PointerField[ProxycclStepPointer]
    operands: PointerField[ProxycclOperandPointer]
    block_steps: int
    block_operands: int
    port_channels: PointerField[ProxycclProxyChannelPointer]
    barriers: PointerField[Uint32Pointer]
    semaphores: PointerField[Int32Pointer]
    counters: PointerField[ProxycclExecutionCountersPointer]
    alternate_bytes: int

class ProxycclExecution(_ProxycclExecution, CData): ...
class ProxycclExecutionPointer(_ProxycclExecution, ItemPointer[ProxycclExecution]): ...

class _ProxycclExpertSegment:
    tokens: int
    bad_slot: int

class ProxycclExpertSegment(_ProxycclExpertSegment, CData): ...
class ProxycclExpertSegmentPointer(_ProxycclExpertSegment, ItemPointer[ProxycclExpertSegment]): ...

class _ProxycclExpertSlot:
    expert: int
    position: int

class ProxycclExpertSlot(_ProxycclExpertSlot, CData): ...
class ProxycclExpertSlotPointer(_ProxycclExpertSlot, ItemPointer[ProxycclExpertSlot]): ...

class _ProxycclExpertChoice:
    expert: int
    weight: float

class ProxycclExpertChoice(_ProxycclExpertChoice, CData): ...
class ProxycclExpertChoicePointer(_ProxycclExpertChoice, ItemPointer[ProxycclExpertChoice]): ...

class _ProxycclReceivedRows:
    ticket: int
    rows: int
    bad_rank: int
    bad_slot: int
    bad_index: int
    most_rows: int
    wanted_tokens: int

class ProxycclReceivedRows(_ProxycclReceivedRows, CData): ...
class ProxycclReceivedRowsPointer(_ProxycclReceivedRows, ItemPointer[ProxycclReceivedRows]): ...

class _ProxycclExpertCounters:
    dispatches: int
    combines: int
    routings: int
    has_failed: int

class ProxycclExpertCounters(_ProxycclExpertCounters, CData): ...
class ProxycclExpertCountersPointer(_ProxycclExpertCounters, ItemPointer[ProxycclExpertCounters]): ...

class _ProxycclExperts:
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    places: PointerField[Uint32Pointer]
    members: PointerField[Uint32Pointer]
    experts_per_rank: int
    topk: int
    max_tokens: int
    blocks: int
    segments: int
    segment_tokens: int
    local_combine: int
    weight_bytes: int
    chosen_per_rank: int
    padded_rows: int
    expert_alignment: int
    choice_packets: int
    weight_packets: int
    output_buffers: int
    output_rows: int
    senders: int
    kept_calls: int
    dropping_ids: int
    batch_tokens: int
    segment_bytes: int
    return_segment_bytes: int
    counts_offset: int
    slots_offset: int
    places_offset: int
    weights_offset: int
    routing_bytes: int
    slab_bytes: int
    least_message: int
    announced: int
    inbox: int
    rail: int
    outbox: int
    returns: int
    return_rails: int
    partial_in: int
    partial_out: int
    partial_bytes: int
    outputs: int
    output_bytes: int
    output_scales: int
    routed: int
    sent: int
    read: int
    returned: int
    summed: int
    loadable: int
    crossed: int
    control: PointerField[ProxycclControlPointer]
    workspace: PointerField[CharPointer]
    peers: PointerField[PointerTo[CharPointer]]
    routing_channels: PointerField[ProxycclProxyChannelPointer]
    out_channels: PointerField[ProxycclProxyChannelPointer]
    back_channels: PointerField[ProxycclProxyChannelPointer]
    arrivals: PointerField[Uint32Pointer]
    bases: PointerField[Uint32Pointer]
    received_rows: PointerField[ProxycclReceivedRowsPointer]
    chosen_rows: PointerField[Uint32Pointer]
    counters: PointerField[ProxycclExpertCountersPointer]

class ProxycclExperts(_ProxycclExperts, CData): ...
class ProxycclExpertsPointer(_ProxycclExperts, ItemPointer[ProxycclExperts]): ...

class _ProxycclExpertLayout:
    tokens: PointerField[Int32Pointer]
    counts: PointerField[Int32Pointer]
    rows: PointerField[Int32Pointer]
    places: PointerField[Int32Pointer]
    sent_places: PointerField[Int32Pointer]
    expert_ids: PointerField[Int32Pointer]
    first_rows: PointerField[Int32Pointer]
    token_rows: PointerField[Int32Pointer]
    row_slots: PointerField[Int32Pointer]
    row_tokens: PointerField[Int32Pointer]
    row_experts: PointerField[Int32Pointer]
    expert_rows: PointerField[Int32Pointer]
    sent_rows: PointerField[Int32Pointer]

class ProxycclExpertLayout(_ProxycclExpertLayout, CData): ...
class ProxycclExpertLayoutPointer(_ProxycclExpertLayout, ItemPointer[ProxycclExpertLayout]): ...

class _ProxycclDispatch:
    phases: int
    tokens: int
    capacity: int
    redispatch: int
    ticket: int
    wanted_tokens: int
    scale_bytes: int
    scale_column: int
    id_bytes: int
    output_buffer: int
    padded_rows: int
    row_bytes: int
    input: PointerField[CharPointer]
    expert_ids: PointerField[CharPointer]
    weights: PointerField[CharPointer]
    scatter: PointerField[Int32Pointer]
    scatter_tokens: int
    output: PointerField[CharPointer]
    output_scales: PointerField[CharPointer]
    output_weights: PointerField[CharPointer]
    received: PointerField[Int32Pointer]
    layout: ProxycclExpertLayout

class ProxycclDispatch(_ProxycclDispatch, CData): ...
class ProxycclDispatchPointer(_ProxycclDispatch, ItemPointer[ProxycclDispatch]): ...

class _ProxycclCombine:
    phases: int
    tokens: int
    hidden: int
    rows_buffer: int
    rows: PointerField[CharPointer]
    weights: PointerField[FloatPointer]
    slot_weights: PointerField[FloatPointer]
    added: ArrayField[CharPointer, PointerTo[CharPointer]]
    order_ids: PointerField[CharPointer]
    id_bytes: int
    output: PointerField[CharPointer]
    layout: ProxycclExpertLayout

class ProxycclCombine(_ProxycclCombine, CData): ...
class ProxycclCombinePointer(_ProxycclCombine, ItemPointer[ProxycclCombine]): ...

class _ProxycclWeighing:
    rows: int
    hidden: int
    values: PointerField[CharPointer]
    weights: PointerField[FloatPointer]
    others: PointerField[CharPointer]
    products: PointerField[FloatPointer]
    received: PointerField[Int32Pointer]
    row_slots: PointerField[Int32Pointer]

class ProxycclWeighing(_ProxycclWeighing, CData): ...
class ProxycclWeighingPointer(_ProxycclWeighing, ItemPointer[ProxycclWeighing]): ...

class _ProxycclPoolCalls:
    flags: int
    context: int
    relaxed: int

class ProxycclPoolCalls(_ProxycclPoolCalls, CData): ...
class ProxycclPoolCallsPointer(_ProxycclPoolCalls, ItemPointer[ProxycclPoolCalls]): ...

class _ProxycclSegment:
    number: int
    ptr: int
    bytes: int
    freed: int

class ProxycclSegment(_ProxycclSegment, CData): ...
class ProxycclSegmentPointer(_ProxycclSegment, ItemPointer[ProxycclSegment]): ...
class ProxycclPlaces(CData): ...
class ProxycclPlacesPointer(Pointer): ...

class _ProxycclAllocationGuard:
    attribute: int
    ptrs: PointerField[Uint64Pointer]
    ids: PointerField[Uint64Pointer]
    count: int

class ProxycclAllocationGuard(_ProxycclAllocationGuard, CData): ...
class ProxycclAllocationGuardPointer(_ProxycclAllocationGuard, ItemPointer[ProxycclAllocationGuard]): ...

class _ProxycclSleepers:
    count: int

class ProxycclSleepers(_ProxycclSleepers, CData): ...
class ProxycclSleepersPointer(_ProxycclSleepers, ItemPointer[ProxycclSleepers]): ...

class _ProxycclStreamOperation:
    kind: int
    address: int
    value: int

class ProxycclStreamOperation(_ProxycclStreamOperation, CData): ...
class ProxycclStreamOperationPointer(_ProxycclStreamOperation, ItemPointer[ProxycclStreamOperation]): ...

class _ProxycclLaunch:
    context: int
    function: Field[VoidPointer, Pointer]
    grid: ArrayField[int, UnsignedIntPointer]
    block: ArrayField[int, UnsignedIntPointer]
    shared_bytes: int
    parameters: PointerField[PointerTo[VoidPointer]]
    wakes: PointerField[PointerTo[ProxycclSleepersPointer]]

class ProxycclLaunch(_ProxycclLaunch, CData): ...
class ProxycclLaunchPointer(_ProxycclLaunch, ItemPointer[ProxycclLaunch]): ...

class _ProxycclStreamStep:
    words: int
    launch: PointerField[ProxycclLaunchPointer]
    dst: int
    src: int
    bytes: int

class ProxycclStreamStep(_ProxycclStreamStep, CData): ...
class ProxycclStreamStepPointer(_ProxycclStreamStep, ItemPointer[ProxycclStreamStep]): ...

class _ProxycclStreamOperations:
    context: int
    words: PointerField[ProxycclStreamOperationPointer]
    steps: PointerField[ProxycclStreamStepPointer]
    count: int
    captured: int
    wakes: PointerField[PointerTo[ProxycclSleepersPointer]]

class ProxycclStreamOperations(_ProxycclStreamOperations, CData): ...
class ProxycclStreamOperationsPointer(_ProxycclStreamOperations, ItemPointer[ProxycclStreamOperations]): ...

class _ProxycclStreamOrder:
    relaxed: int
    context: int

class ProxycclStreamOrder(_ProxycclStreamOrder, CData): ...
class ProxycclStreamOrderPointer(_ProxycclStreamOrder, ItemPointer[ProxycclStreamOrder]): ...

class Lib:
    PROXYCCL_MAX_TRIGGER_BYTES: Final[int]
    PROXYCCL_WINDOW_BYTES: Final[int]
    PROXYCCL_NO_PEER: Final[int]
    PROXYCCL_NO_CHANNEL: Final[int]
    PROXYCCL_LAST_QUESTION: Final[int]
    PROXYCCL_OP_CUSTOM: Final[int]
    PROXYCCL_OP_DATA: Final[int]
    PROXYCCL_OP_SIGNAL: Final[int]
    PROXYCCL_OP_FLUSH: Final[int]
    PROXYCCL_OP_GET: Final[int]
    PROXYCCL_SIZE_BITS: Final[int]
    PROXYCCL_OFFSET_BITS: Final[int]
    PROXYCCL_MEMORY_BITS: Final[int]
    PROXYCCL_OP_BITS: Final[int]
    PROXYCCL_CHANNEL_BITS: Final[int]
    PROXYCCL_MAX_MEMORIES: Final[int]
    PROXYCCL_MAX_CHANNELS: Final[int]
    PROXYCCL_SIZE_SHIFT: Final[int]
    PROXYCCL_GET_SHIFT: Final[int]
    PROXYCCL_SRC_OFFSET_SHIFT: Final[int]
    PROXYCCL_DST_OFFSET_SHIFT: Final[int]
    PROXYCCL_SRC_MEMORY_SHIFT: Final[int]
    PROXYCCL_DST_MEMORY_SHIFT: Final[int]
    PROXYCCL_OP_SHIFT: Final[int]
    PROXYCCL_CHANNEL_SHIFT: Final[int]
    PROXYCCL_PARITY_SHIFT: Final[int]
    PROXYCCL_OK: Final[int]
    PROXYCCL_ERROR_TIMEOUT: Final[int]
    PROXYCCL_ERROR_PEER_LOST: Final[int]
    PROXYCCL_ERROR_TRANSPORT: Final[int]
    PROXYCCL_ERROR_BAD_TRIGGER: Final[int]
    PROXYCCL_ERROR_HANDLER: Final[int]
    PROXYCCL_ERROR_MISMATCH: Final[int]
    PROXYCCL_ERROR_INVALID_FLAG: Final[int]
    PROXYCCL_ERROR_LOCAL: Final[int]
    PROXYCCL_ERROR_PROXY_LOST: Final[int]
    PROXYCCL_ERROR_OUT_OF_RANGE: Final[int]
    PROXYCCL_ERROR_SHARED_WAIT: Final[int]
    PROXYCCL_ERROR_BAD_SCHEDULE: Final[int]
    PROXYCCL_ERROR_TRANSFER_SIZE: Final[int]
    PROXYCCL_ERROR_PARENT: Final[int]
    PROXYCCL_ERROR_CONTEXT_LOST: Final[int]
    PROXYCCL_ERROR_SIGNAL_VALUE: Final[int]
    PROXYCCL_SM_PUT: Final[int]
    PROXYCCL_SM_GET: Final[int]
    PROXYCCL_SM_PUT_PACKETS: Final[int]
    PROXYCCL_SM_GET_PACKETS: Final[int]
    PROXYCCL_SM_COPY_TO_PACKETS: Final[int]
    PROXYCCL_SM_COPY_FROM_PACKETS: Final[int]
    PROXYCCL_SM_PEER_MEMORY: Final[int]
    PROXYCCL_SM_OWN_MEMORY: Final[int]
    PROXYCCL_SM_PACKET_BUFFER: Final[int]
    PROXYCCL_WAIT_NONE: Final[int]
    PROXYCCL_WAIT_RING_ROOM: Final[int]
    PROXYCCL_WAIT_RING_SYNC: Final[int]
    PROXYCCL_WAIT_FLUSH: Final[int]
    PROXYCCL_WAIT_SM_SIGNAL: Final[int]
    PROXYCCL_WAIT_PROXY_SIGNAL: Final[int]
    PROXYCCL_WAIT_PACKET: Final[int]
    PROXYCCL_WAIT_GRID: Final[int]
    PROXYCCL_WAIT_SCHEDULE_POST: Final[int]
    PROXYCCL_WAIT_SCHEDULE_DATA: Final[int]
    PROXYCCL_WAIT_SCHEDULE_SEND: Final[int]
    PROXYCCL_WAIT_SCHEDULE_GATE: Final[int]
    PROXYCCL_WAIT_CONDITION: Final[int]
    PROXYCCL_WAIT_EXECUTION: Final[int]
    PROXYCCL_WAIT_COMPLETION: Final[int]
    PROXYCCL_WAIT_STAGE: Final[int]
    PROXYCCL_HANDLE_NONE: Final[int]
    PROXYCCL_HANDLE_SM_CHANNEL: Final[int]
    PROXYCCL_HANDLE_PROXY_CHANNEL: Final[int]
    PROXYCCL_HANDLE_SEMAPHORE: Final[int]
    PROXYCCL_HANDLE_SM_SEMAPHORE: Final[int]
    PROXYCCL_HANDLE_PROXY_SEMAPHORE: Final[int]
    PROXYCCL_HANDLE_FIFO: Final[int]
    PROXYCCL_PRESENT: Final[int]
    PROXYCCL_CLOSING_ANOTHER: Final[int]
    PROXYCCL_LEFT: Final[int]
    PROXYCCL_STOPPED: Final[int]
    PROXYCCL_RECORD_EMPTY: Final[int]
    PROXYCCL_RECORD_CLAIMED: Final[int]
    PROXYCCL_RECORD_VALID: Final[int]
    PROXYCCL_WAIT_PEERS: Final[int]
    PROXYCCL_WAIT_PLACES: Final[int]
    PROXYCCL_ROUND_BUFFERS: Final[int]
    PROXYCCL_PIPELINE_BUFFERS: Final[int]
    PROXYCCL_MAX_MAPPED_RANKS: Final[int]
    PROXYCCL_MAX_BLOCK_THREADS: Final[int]
    PROXYCCL_FLOW_SLOTS: Final[int]
    PROXYCCL_FLOW_HEADER_BYTES: Final[int]
    PROXYCCL_MAX_TRANSFERS: Final[int]
    PROXYCCL_MAX_PACKET_RANKS: Final[int]
    PROXYCCL_PACKET_SLOTS_PER_RANK: Final[int]
    PROXYCCL_STEP_SYNC: Final[int]
    PROXYCCL_STEP_BARRIER: Final[int]
    PROXYCCL_STEP_SIGNAL: Final[int]
    PROXYCCL_STEP_RELAXED_SIGNAL: Final[int]
    PROXYCCL_STEP_WAIT: Final[int]
    PROXYCCL_STEP_RELAXED_WAIT: Final[int]
    PROXYCCL_STEP_PORT: Final[int]
    PROXYCCL_STEP_PORT_WAIT: Final[int]
    PROXYCCL_STEP_ACQUIRE: Final[int]
    PROXYCCL_STEP_RELEASE: Final[int]
    PROXYCCL_STEP_COPY: Final[int]
    PROXYCCL_STEP_COMBINE: Final[int]
    PROXYCCL_STEP_AWAIT_PACKETS: Final[int]
    PROXYCCL_STEP_LOOP: Final[int]
    PROXYCCL_STEP_END: Final[int]
    PROXYCCL_COMBINE_SUM: Final[int]
    PROXYCCL_COMBINE_PROD: Final[int]
    PROXYCCL_COMBINE_MIN: Final[int]
    PROXYCCL_COMBINE_MAX: Final[int]
    PROXYCCL_PLACE_OPERATION_BITS: Final[int]
    PROXYCCL_BASE_NONE: Final[int]
    PROXYCCL_BASE_INPUT: Final[int]
    PROXYCCL_BASE_OUTPUT: Final[int]
    PROXYCCL_MAX_TOPK: Final[int]
    PROXYCCL_EXPERT_THREADS: Final[int]
    PROXYCCL_MAX_EXPERT_RANKS: Final[int]
    PROXYCCL_SCALED_ELEMENTS: Final[int]
    PROXYCCL_ANNOUNCED_SLOTS: Final[int]
    PROXYCCL_ANNOUNCED_OWN_SLOTS: Final[int]
    PROXYCCL_ANNOUNCED_SEGMENT_SLOTS: Final[int]
    PROXYCCL_ANNOUNCED_EXPERTS: Final[int]
    PROXYCCL_IDS_PER_PACKET: Final[int]
    PROXYCCL_MASKED_RANKS: Final[int]
    PROXYCCL_ANNOUNCED_PAYLOADS: Final[int]
    PROXYCCL_SUMMED_WORDS: Final[int]
    PROXYCCL_KEPT_TARGETS: Final[int]
    PROXYCCL_EXPERT_COUNTERS: Final[int]
    PROXYCCL_EXPERT_ROUTE: Final[int]
    PROXYCCL_EXPERT_GATHER: Final[int]
    PROXYCCL_EXPERT_SEND: Final[int]
    PROXYCCL_EXPERT_RECEIVE: Final[int]
    PROXYCCL_EXPERT_LAYOUT: Final[int]
    PROXYCCL_EXPERT_TELL: Final[int]
    PROXYCCL_NUMBER_DROPS: Final[int]
    PROXYCCL_MINUS_ONE_DROPS: Final[int]
    PROXYCCL_NO_ROW: Final[int]
    PROXYCCL_PAST_END: Final[int]
    PROXYCCL_LAYOUT_TABLES: Final[int]
    PROXYCCL_ADDED: Final[int]
    PROXYCCL_HOST_SUCCESS: Final[int]
    PROXYCCL_HOST_INVALID_VALUE: Final[int]
    PROXYCCL_HOST_OUT_OF_MEMORY: Final[int]
    PROXYCCL_HOST_NOT_FOUND: Final[int]
    PROXYCCL_HOST_NOT_READY: Final[int]
    PROXYCCL_HOST_IN_HANDLER: Final[int]
    PROXYCCL_HOST_LAUNCH_FAILED: Final[int]
    PROXYCCL_HOST_MAX_THREADS_PER_BLOCK: Final[int]
    PROXYCCL_HOST_MAX_RESIDENT_BLOCKS: Final[int]
    PROXYCCL_HOST_MAX_SHARED_BYTES: Final[int]
    PROXYCCL_HOST_BUFFER_ID: Final[int]
    PROXYCCL_HOST_QUEUED: Final[int]
    PROXYCCL_HOST_INLINE: Final[int]
    PROXYCCL_HOST_IN_CALLER: Final[int]
    PROXYCCL_MOST_SLEEPERS: Final[int]
    PROXYCCL_STREAM_WAIT: Final[int]
    PROXYCCL_STREAM_WRITE: Final[int]
    PROXYCCL_OTHER_CONTEXT: Final[int]
    def proxyccl_expert_place(
        self, layout: Passed[ProxycclExpertLayoutPointer], array: int, offsets: Passed[Uint64Pointer], /
    ) -> None: ...
    def proxyccl_expert_dispatch_send(
        self,
        call: Passed[ProxycclDispatchPointer],
        phases: int,
        ticket: int,
        tokens: int,
        input: int,
        expert_ids: int,
        weights: int,
        output_buffer: int,
        /,
    ) -> None: ...
    def proxyccl_expert_dispatch_receive(
        self,
        call: Passed[ProxycclDispatchPointer],
        phases: int,
        capacity: int,
        scale_bytes: int,
        output: int,
        output_scales: int,
        output_weights: int,
        received: int,
        /,
    ) -> None: ...
    def proxyccl_expert_combine_fill(
        self,
        call: Passed[ProxycclCombinePointer],
        phases: int,
        tokens: int,
        rows: int,
        rows_buffer: int,
        weights: int,
        slot_weights: int,
        output: int,
        /,
    ) -> None: ...
    def proxyccl_expert_combine_order(
        self, call: Passed[ProxycclCombinePointer], added: int, also_added: int, ids: int, id_bytes: int, /
    ) -> None: ...
    def proxyccl_host_stream_create(
        self, stream: Passed[PointerTo[VoidPointer]] | Sequence[Pointer], kind: int, /
    ) -> int: ...
    def proxyccl_host_stream_destroy(self, stream: Pointer, /) -> int: ...
    def proxyccl_host_stream_query(self, stream: Pointer, /) -> int: ...
    def proxyccl_host_stream_synchronize(self, stream: Pointer, /) -> int: ...
    def proxyccl_host_stream_await(
        self, stream: Pointer, target: Passed[Uint64Pointer], milliseconds: int, /
    ) -> int: ...
    def proxyccl_host_stream_wait_event(self, stream: Pointer, event: Pointer, flags: int, /) -> int: ...
    def proxyccl_host_event_create(self, event: Passed[PointerTo[VoidPointer]] | Sequence[Pointer], /) -> int: ...
    def proxyccl_host_event_destroy(self, event: Pointer, /) -> int: ...
    def proxyccl_host_event_record(self, event: Pointer, stream: Pointer, /) -> int: ...
    def proxyccl_host_event_query(self, event: Pointer, /) -> int: ...
    def proxyccl_host_event_await(self, event: Pointer, target: Passed[Uint64Pointer], milliseconds: int, /) -> int: ...
    def proxyccl_host_event_elapsed(
        self, milliseconds: Passed[FloatPointer], start: Pointer, end: Pointer, /
    ) -> int: ...
    def proxyccl_host_copy(self, dst: Pointer, src: Pointer, bytes: int, stream: Pointer, /) -> int: ...
    def proxyccl_memmove(self, dst: Pointer, src: Pointer, bytes: int, /) -> None: ...
    def proxyccl_host_set(self, dst: Pointer, value: int, bytes: int, stream: Pointer, /) -> int: ...
    def proxyccl_host_write64(
        self, stream: Pointer, address: Passed[Uint64Pointer], value: int, flags: int, /
    ) -> int: ...
    def proxyccl_host_write32(
        self, stream: Pointer, address: Passed[Uint32Pointer], value: int, flags: int, /
    ) -> int: ...
    def proxyccl_host_module_load(
        self, module: Passed[PointerTo[VoidPointer]] | Sequence[Pointer], path: Passed[CharPointer] | bytes, /
    ) -> int: ...
    def proxyccl_host_module_unload(self, module: Pointer, /) -> int: ...
    def proxyccl_host_module_error(self) -> CharPointer: ...
    def proxyccl_host_module_function(
        self,
        function: Passed[PointerTo[VoidPointer]] | Sequence[Pointer],
        module: Pointer,
        name: Passed[CharPointer] | bytes,
        /,
    ) -> int: ...
    def proxyccl_host_module_variable(self, module: Pointer, name: Passed[CharPointer] | bytes, /) -> VoidPointer: ...
    def proxyccl_host_function_parameters(self, function: Pointer, /) -> Uint32Pointer: ...
    def proxyccl_host_launch(
        self,
        function: Pointer,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block_x: int,
        block_y: int,
        block_z: int,
        shared_bytes: int,
        stream: Pointer,
        parameters: Passed[PointerTo[VoidPointer]] | Sequence[Pointer],
        extra: Passed[PointerTo[VoidPointer]] | Sequence[Pointer],
        /,
    ) -> int: ...
    def proxyccl_host_memory_create(self, descriptor: Passed[IntPointer], bytes: int, /) -> int: ...
    def proxyccl_host_memory_map(
        self, address: Passed[PointerTo[VoidPointer]] | Sequence[Pointer], descriptor: int, bytes: int, /
    ) -> int: ...
    def proxyccl_host_memory_unmap(self, address: Pointer, bytes: int, /) -> int: ...
    def proxyccl_host_memory_use_huge_pages(self, ptr: int, bytes: int, /) -> None: ...
    def proxyccl_host_allocate(self, ptr: Passed[Uint64Pointer], bytes: int, /) -> int: ...
    def proxyccl_host_free(self, ptr: int, /) -> int: ...
    def proxyccl_host_allocation(
        self, ptr: int, base: Passed[Uint64Pointer], bytes: Passed[Uint64Pointer], descriptor: Passed[IntPointer], /
    ) -> int: ...
    def proxyccl_host_pointer_attribute(self, data: Pointer, attribute: int, ptr: int, /) -> int: ...
    def proxyccl_pool_calls_fill(
        self,
        calls: Passed[ProxycclPoolCallsPointer],
        allocate: int,
        allocate_with_flags: int,
        free: int,
        current: int,
        make_current: int,
        exchange_capture_mode: int,
        /,
    ) -> None: ...
    def proxyccl_pool_configure(self, device: int, calls: Passed[ProxycclPoolCallsPointer], /) -> int: ...
    def proxyccl_pool_changes(self, device: int, /) -> int: ...
    def proxyccl_pool_segments(self, device: int, segments: Passed[ProxycclSegmentPointer], room: int, /) -> int: ...
    def proxyccl_pool_hold(self, device: int, number: int, /) -> int: ...
    def proxyccl_pool_release(self, device: int, number: int, /) -> int: ...
    def proxyccl_places_open(self, start: int, bytes: int, count: int, /) -> ProxycclPlacesPointer: ...
    def proxyccl_places_choose(self, places: Passed[ProxycclPlacesPointer], /) -> None: ...
    def proxyccl_places_idle(self, places: Passed[ProxycclPlacesPointer], /) -> int: ...
    def proxyccl_places_renew(self, places: Passed[ProxycclPlacesPointer], last: int, /) -> None: ...
    def proxyccl_places_close(self, places: Passed[ProxycclPlacesPointer], /) -> int: ...
    def proxyccl_allocation_guard_fill(
        self, guard: Passed[ProxycclAllocationGuardPointer], pointer_attribute: int, /
    ) -> None: ...
    def proxyccl_allocations_hold(
        self, guard: Passed[ProxycclAllocationGuardPointer], start: int, end: int, /
    ) -> int: ...
    def proxyccl_allocations_hold_address(self) -> int: ...
    def proxyccl_sleepers_add(
        self, sleepers: Passed[ProxycclSleepersPointer], asleep: Passed[Uint32Pointer], /
    ) -> int: ...
    def proxyccl_host_add_helper(self, help: CData, argument: Pointer, /) -> None: ...
    def proxyccl_host_remove_helper(self, argument: Pointer, /) -> None: ...
    def proxyccl_host_look_around(self, thread: int, look: CData, /) -> None: ...
    def proxyccl_host_is_looking(self) -> int: ...
    def proxyccl_driver_await(self, query: int, handle: int, milliseconds: int, /) -> int: ...
    def proxyccl_host_stream_operations(
        self, stream: Pointer, count: int, operations: Passed[ProxycclStreamOperationPointer], flags: int, /
    ) -> int: ...
    def proxyccl_stream_operations_fill(
        self,
        operations: Passed[ProxycclStreamOperationsPointer],
        batch: int,
        write64: int,
        wait64: int,
        copy: int,
        set: int,
        is_capturing: int,
        current: int,
        /,
    ) -> None: ...
    def proxyccl_stream_issue(self, operations: Passed[ProxycclStreamOperationsPointer], stream: int, /) -> int: ...
    def proxyccl_stream_order_fill(
        self,
        order: Passed[ProxycclStreamOrderPointer],
        record: int,
        wait: int,
        query: int,
        is_capturing: int,
        exchange_capture_mode: int,
        current: int,
        /,
    ) -> None: ...
    def proxyccl_stream_captures(self, order: Passed[ProxycclStreamOrderPointer], stream: int, /) -> int: ...
    def proxyccl_stream_ask_capture(
        self, order: Passed[ProxycclStreamOrderPointer], stream: int, captures: Passed[IntPointer], /
    ) -> int: ...
    def proxyccl_stream_mark(self, order: Passed[ProxycclStreamOrderPointer], event: int, stream: int, /) -> int: ...
    def proxyccl_stream_wait(self, order: Passed[ProxycclStreamOrderPointer], stream: int, event: int, /) -> int: ...
    def proxyccl_stream_follow(
        self, order: Passed[ProxycclStreamOrderPointer], event: int, first: int, then: int, alike: int, /
    ) -> int: ...
    def proxyccl_event_query(self, order: Passed[ProxycclStreamOrderPointer], event: int, /) -> int: ...
    def proxyccl_launch_fill(self, launch: Passed[ProxycclLaunchPointer], call: int, current: int, /) -> None: ...
    def proxyccl_launch(self, launch: Passed[ProxycclLaunchPointer], stream: int, /) -> int: ...
    def proxyccl_control_raise(
        self,
        control: Passed[ProxycclControlPointer],
        record: Passed[ProxycclErrorRecordPointer],
        peers: Passed[PointerTo[ProxycclControlPointer]] | Sequence[Passed[ProxycclControlPointer]],
        peer_count: int,
        /,
    ) -> None: ...
    def proxyccl_control_abort(self, control: Passed[ProxycclControlPointer], /) -> int: ...
    def proxyccl_control_failed_rank(self, control: Passed[ProxycclControlPointer], /) -> int: ...
    def proxyccl_control_record(
        self, control: Passed[ProxycclControlPointer], record: Passed[ProxycclErrorRecordPointer], /
    ) -> int: ...
    def proxyccl_control_set_presence(
        self, control: Passed[ProxycclControlPointer], presence: int, exchanges: int, /
    ) -> None: ...
    def proxyccl_control_exchanges(self, control: Passed[ProxycclControlPointer], /) -> int: ...
    def proxyccl_control_presence(self, control: Passed[ProxycclControlPointer], /) -> int: ...
    def proxyccl_control_ask(self, control: Passed[ProxycclControlPointer], question: int, /) -> None: ...
    def proxyccl_control_wait(
        self, control: Passed[ProxycclControlPointer], place: int, question: int, wait: Passed[ProxycclWaitPointer], /
    ) -> int: ...

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
        self, cdecl: Literal["ProxycclErrorRecord *"], init: Initial[ProxycclErrorRecord] = ..., /
    ) -> ProxycclErrorRecordPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclErrorRecord[]"], init: int | Sequence[Initial[ProxycclErrorRecord]], /
    ) -> Array[ProxycclErrorRecord, ProxycclErrorRecordPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclWait *"], init: Initial[ProxycclWait] = ..., /) -> ProxycclWaitPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWait[]"], init: int | Sequence[Initial[ProxycclWait]], /
    ) -> Array[ProxycclWait, ProxycclWaitPointer]: ...
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
        self, cdecl: Literal["ProxycclControl **"], init: Passed[ProxycclControlPointer] = ..., /
    ) -> PointerTo[ProxycclControlPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclControl *[]"], init: int | Sequence[Passed[ProxycclControlPointer]], /
    ) -> Array[ProxycclControlPointer, PointerTo[ProxycclControlPointer]]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclFifo *"], init: Initial[ProxycclFifo] = ..., /) -> ProxycclFifoPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFifo[]"], init: int | Sequence[Initial[ProxycclFifo]], /
    ) -> Array[ProxycclFifo, ProxycclFifoPointer]: ...
    @overload
    def new(self, cdecl: Literal["uint64_t *"], init: int = ..., /) -> Uint64Pointer: ...
    @overload
    def new(self, cdecl: Literal["uint64_t[]"], init: int | Sequence[int], /) -> Array[int, Uint64Pointer]: ...
    @overload
    def new(self, cdecl: Literal["uint32_t *"], init: int = ..., /) -> Uint32Pointer: ...
    @overload
    def new(self, cdecl: Literal["uint32_t[]"], init: int | Sequence[int], /) -> Array[int, Uint32Pointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSemaphore *"], init: Initial[ProxycclSemaphore] = ..., /
    ) -> ProxycclSemaphorePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSemaphore[]"], init: int | Sequence[Initial[ProxycclSemaphore]], /
    ) -> Array[ProxycclSemaphore, ProxycclSemaphorePointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSmChannel *"], init: Initial[ProxycclSmChannel] = ..., /
    ) -> ProxycclSmChannelPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSmChannel[]"], init: int | Sequence[Initial[ProxycclSmChannel]], /
    ) -> Array[ProxycclSmChannel, ProxycclSmChannelPointer]: ...
    @overload
    def new(self, cdecl: Literal["char *"], init: bytes = ..., /) -> CharPointer: ...
    @overload
    def new(self, cdecl: Literal["char[]"], init: int | Sequence[bytes], /) -> Array[bytes, CharPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclProxyChannel *"], init: Initial[ProxycclProxyChannel] = ..., /
    ) -> ProxycclProxyChannelPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclProxyChannel[]"], init: int | Sequence[Initial[ProxycclProxyChannel]], /
    ) -> Array[ProxycclProxyChannel, ProxycclProxyChannelPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclLink *"], init: Initial[ProxycclLink] = ..., /) -> ProxycclLinkPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclLink[]"], init: int | Sequence[Initial[ProxycclLink]], /
    ) -> Array[ProxycclLink, ProxycclLinkPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTeamCounters *"], init: Initial[ProxycclTeamCounters] = ..., /
    ) -> ProxycclTeamCountersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTeamCounters[]"], init: int | Sequence[Initial[ProxycclTeamCounters]], /
    ) -> Array[ProxycclTeamCounters, ProxycclTeamCountersPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclTeam *"], init: Initial[ProxycclTeam] = ..., /) -> ProxycclTeamPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTeam[]"], init: int | Sequence[Initial[ProxycclTeam]], /
    ) -> Array[ProxycclTeam, ProxycclTeamPointer]: ...
    @overload
    def new(self, cdecl: Literal["char **"], init: Passed[CharPointer] | bytes = ..., /) -> PointerTo[CharPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["char *[]"], init: int | Sequence[Passed[CharPointer] | bytes], /
    ) -> Array[CharPointer, PointerTo[CharPointer]]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransfer *"], init: Initial[ProxycclTransfer] = ..., /
    ) -> ProxycclTransferPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransfer[]"], init: int | Sequence[Initial[ProxycclTransfer]], /
    ) -> Array[ProxycclTransfer, ProxycclTransferPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclFlows *"], init: Initial[ProxycclFlows] = ..., /) -> ProxycclFlowsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFlows[]"], init: int | Sequence[Initial[ProxycclFlows]], /
    ) -> Array[ProxycclFlows, ProxycclFlowsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclPacketTeam *"], init: Initial[ProxycclPacketTeam] = ..., /
    ) -> ProxycclPacketTeamPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclPacketTeam[]"], init: int | Sequence[Initial[ProxycclPacketTeam]], /
    ) -> Array[ProxycclPacketTeam, ProxycclPacketTeamPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclArrived *"], init: Initial[ProxycclArrived] = ..., /
    ) -> ProxycclArrivedPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclArrived[]"], init: int | Sequence[Initial[ProxycclArrived]], /
    ) -> Array[ProxycclArrived, ProxycclArrivedPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclOperand *"], init: Initial[ProxycclOperand] = ..., /
    ) -> ProxycclOperandPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclOperand[]"], init: int | Sequence[Initial[ProxycclOperand]], /
    ) -> Array[ProxycclOperand, ProxycclOperandPointer]: ...
    @overload
    def new(self, cdecl: Literal["ProxycclStep *"], init: Initial[ProxycclStep] = ..., /) -> ProxycclStepPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStep[]"], init: int | Sequence[Initial[ProxycclStep]], /
    ) -> Array[ProxycclStep, ProxycclStepPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExecutionCounters *"], init: Initial[ProxycclExecutionCounters] = ..., /
    ) -> ProxycclExecutionCountersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExecutionCounters[]"], init: int | Sequence[Initial[ProxycclExecutionCounters]], /
    ) -> Array[ProxycclExecutionCounters, ProxycclExecutionCountersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExecution *"], init: Initial[ProxycclExecution] = ..., /
    ) -> ProxycclExecutionPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExecution[]"], init: int | Sequence[Initial[ProxycclExecution]], /
    ) -> Array[ProxycclExecution, ProxycclExecutionPointer]: ...
    @overload
    def new(self, cdecl: Literal["int32_t *"], init: int = ..., /) -> Int32Pointer: ...
    @overload
    def new(self, cdecl: Literal["int32_t[]"], init: int | Sequence[int], /) -> Array[int, Int32Pointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertSegment *"], init: Initial[ProxycclExpertSegment] = ..., /
    ) -> ProxycclExpertSegmentPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertSegment[]"], init: int | Sequence[Initial[ProxycclExpertSegment]], /
    ) -> Array[ProxycclExpertSegment, ProxycclExpertSegmentPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertSlot *"], init: Initial[ProxycclExpertSlot] = ..., /
    ) -> ProxycclExpertSlotPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertSlot[]"], init: int | Sequence[Initial[ProxycclExpertSlot]], /
    ) -> Array[ProxycclExpertSlot, ProxycclExpertSlotPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertChoice *"], init: Initial[ProxycclExpertChoice] = ..., /
    ) -> ProxycclExpertChoicePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertChoice[]"], init: int | Sequence[Initial[ProxycclExpertChoice]], /
    ) -> Array[ProxycclExpertChoice, ProxycclExpertChoicePointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclReceivedRows *"], init: Initial[ProxycclReceivedRows] = ..., /
    ) -> ProxycclReceivedRowsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclReceivedRows[]"], init: int | Sequence[Initial[ProxycclReceivedRows]], /
    ) -> Array[ProxycclReceivedRows, ProxycclReceivedRowsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertCounters *"], init: Initial[ProxycclExpertCounters] = ..., /
    ) -> ProxycclExpertCountersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertCounters[]"], init: int | Sequence[Initial[ProxycclExpertCounters]], /
    ) -> Array[ProxycclExpertCounters, ProxycclExpertCountersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExperts *"], init: Initial[ProxycclExperts] = ..., /
    ) -> ProxycclExpertsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExperts[]"], init: int | Sequence[Initial[ProxycclExperts]], /
    ) -> Array[ProxycclExperts, ProxycclExpertsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertLayout *"], init: Initial[ProxycclExpertLayout] = ..., /
    ) -> ProxycclExpertLayoutPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclExpertLayout[]"], init: int | Sequence[Initial[ProxycclExpertLayout]], /
    ) -> Array[ProxycclExpertLayout, ProxycclExpertLayoutPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclDispatch *"], init: Initial[ProxycclDispatch] = ..., /
    ) -> ProxycclDispatchPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclDispatch[]"], init: int | Sequence[Initial[ProxycclDispatch]], /
    ) -> Array[ProxycclDispatch, ProxycclDispatchPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCombine *"], init: Initial[ProxycclCombine] = ..., /
    ) -> ProxycclCombinePointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCombine[]"], init: int | Sequence[Initial[ProxycclCombine]], /
    ) -> Array[ProxycclCombine, ProxycclCombinePointer]: ...
    @overload
    def new(self, cdecl: Literal["float *"], init: float = ..., /) -> FloatPointer: ...
    @overload
    def new(self, cdecl: Literal["float[]"], init: int | Sequence[float], /) -> Array[float, FloatPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWeighing *"], init: Initial[ProxycclWeighing] = ..., /
    ) -> ProxycclWeighingPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclWeighing[]"], init: int | Sequence[Initial[ProxycclWeighing]], /
    ) -> Array[ProxycclWeighing, ProxycclWeighingPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclPoolCalls *"], init: Initial[ProxycclPoolCalls] = ..., /
    ) -> ProxycclPoolCallsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclPoolCalls[]"], init: int | Sequence[Initial[ProxycclPoolCalls]], /
    ) -> Array[ProxycclPoolCalls, ProxycclPoolCallsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSegment *"], init: Initial[ProxycclSegment] = ..., /
    ) -> ProxycclSegmentPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSegment[]"], init: int | Sequence[Initial[ProxycclSegment]], /
    ) -> Array[ProxycclSegment, ProxycclSegmentPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAllocationGuard *"], init: Initial[ProxycclAllocationGuard] = ..., /
    ) -> ProxycclAllocationGuardPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclAllocationGuard[]"], init: int | Sequence[Initial[ProxycclAllocationGuard]], /
    ) -> Array[ProxycclAllocationGuard, ProxycclAllocationGuardPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSleepers *"], init: Initial[ProxycclSleepers] = ..., /
    ) -> ProxycclSleepersPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSleepers[]"], init: int | Sequence[Initial[ProxycclSleepers]], /
    ) -> Array[ProxycclSleepers, ProxycclSleepersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOperation *"], init: Initial[ProxycclStreamOperation] = ..., /
    ) -> ProxycclStreamOperationPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOperation[]"], init: int | Sequence[Initial[ProxycclStreamOperation]], /
    ) -> Array[ProxycclStreamOperation, ProxycclStreamOperationPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclLaunch *"], init: Initial[ProxycclLaunch] = ..., /
    ) -> ProxycclLaunchPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclLaunch[]"], init: int | Sequence[Initial[ProxycclLaunch]], /
    ) -> Array[ProxycclLaunch, ProxycclLaunchPointer]: ...
    @overload
    def new(self, cdecl: Literal["unsigned int *"], init: int = ..., /) -> UnsignedIntPointer: ...
    @overload
    def new(self, cdecl: Literal["unsigned int[]"], init: int | Sequence[int], /) -> Array[int, UnsignedIntPointer]: ...
    @overload
    def new(self, cdecl: Literal["void **"], init: Pointer = ..., /) -> PointerTo[VoidPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["void *[]"], init: int | Sequence[Pointer], /
    ) -> Array[VoidPointer, PointerTo[VoidPointer]]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSleepers **"], init: Passed[ProxycclSleepersPointer] = ..., /
    ) -> PointerTo[ProxycclSleepersPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclSleepers *[]"], init: int | Sequence[Passed[ProxycclSleepersPointer]], /
    ) -> Array[ProxycclSleepersPointer, PointerTo[ProxycclSleepersPointer]]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamStep *"], init: Initial[ProxycclStreamStep] = ..., /
    ) -> ProxycclStreamStepPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamStep[]"], init: int | Sequence[Initial[ProxycclStreamStep]], /
    ) -> Array[ProxycclStreamStep, ProxycclStreamStepPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOperations *"], init: Initial[ProxycclStreamOperations] = ..., /
    ) -> ProxycclStreamOperationsPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOperations[]"], init: int | Sequence[Initial[ProxycclStreamOperations]], /
    ) -> Array[ProxycclStreamOperations, ProxycclStreamOperationsPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOrder *"], init: Initial[ProxycclStreamOrder] = ..., /
    ) -> ProxycclStreamOrderPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStreamOrder[]"], init: int | Sequence[Initial[ProxycclStreamOrder]], /
    ) -> Array[ProxycclStreamOrder, ProxycclStreamOrderPointer]: ...
    @overload
    def new(self, cdecl: Literal["int *"], init: int = ..., /) -> IntPointer: ...
    @overload
    def new(self, cdecl: Literal["int[]"], init: int | Sequence[int], /) -> Array[int, IntPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTrigger *"], value: CData | int, /) -> ProxycclTriggerPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclErrorRecord *"], value: CData | int, /) -> ProxycclErrorRecordPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclWait *"], value: CData | int, /) -> ProxycclWaitPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclControl *"], value: CData | int, /) -> ProxycclControlPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclControl **"], value: CData | int, /
    ) -> PointerTo[ProxycclControlPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFifo *"], value: CData | int, /) -> ProxycclFifoPointer: ...
    @overload
    def cast(self, cdecl: Literal["uint64_t *"], value: CData | int, /) -> Uint64Pointer: ...
    @overload
    def cast(self, cdecl: Literal["uint32_t *"], value: CData | int, /) -> Uint32Pointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclSemaphore *"], value: CData | int, /) -> ProxycclSemaphorePointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclSmChannel *"], value: CData | int, /) -> ProxycclSmChannelPointer: ...
    @overload
    def cast(self, cdecl: Literal["char *"], value: CData | int, /) -> CharPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclProxyChannel *"], value: CData | int, /) -> ProxycclProxyChannelPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclLink *"], value: CData | int, /) -> ProxycclLinkPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTeamCounters *"], value: CData | int, /) -> ProxycclTeamCountersPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTeam *"], value: CData | int, /) -> ProxycclTeamPointer: ...
    @overload
    def cast(self, cdecl: Literal["char **"], value: CData | int, /) -> PointerTo[CharPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTransfer *"], value: CData | int, /) -> ProxycclTransferPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFlows *"], value: CData | int, /) -> ProxycclFlowsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclPacketTeam *"], value: CData | int, /) -> ProxycclPacketTeamPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclArrived *"], value: CData | int, /) -> ProxycclArrivedPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclOperand *"], value: CData | int, /) -> ProxycclOperandPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclStep *"], value: CData | int, /) -> ProxycclStepPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclExecutionCounters *"], value: CData | int, /
    ) -> ProxycclExecutionCountersPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExecution *"], value: CData | int, /) -> ProxycclExecutionPointer: ...
    @overload
    def cast(self, cdecl: Literal["int32_t *"], value: CData | int, /) -> Int32Pointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclExpertSegment *"], value: CData | int, /
    ) -> ProxycclExpertSegmentPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExpertSlot *"], value: CData | int, /) -> ProxycclExpertSlotPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExpertChoice *"], value: CData | int, /) -> ProxycclExpertChoicePointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclReceivedRows *"], value: CData | int, /) -> ProxycclReceivedRowsPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclExpertCounters *"], value: CData | int, /
    ) -> ProxycclExpertCountersPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExperts *"], value: CData | int, /) -> ProxycclExpertsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclExpertLayout *"], value: CData | int, /) -> ProxycclExpertLayoutPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclDispatch *"], value: CData | int, /) -> ProxycclDispatchPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCombine *"], value: CData | int, /) -> ProxycclCombinePointer: ...
    @overload
    def cast(self, cdecl: Literal["float *"], value: CData | int, /) -> FloatPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclWeighing *"], value: CData | int, /) -> ProxycclWeighingPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclPoolCalls *"], value: CData | int, /) -> ProxycclPoolCallsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclSegment *"], value: CData | int, /) -> ProxycclSegmentPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclPlaces *"], value: CData | int, /) -> ProxycclPlacesPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclAllocationGuard *"], value: CData | int, /
    ) -> ProxycclAllocationGuardPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclSleepers *"], value: CData | int, /) -> ProxycclSleepersPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclStreamOperation *"], value: CData | int, /
    ) -> ProxycclStreamOperationPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclLaunch *"], value: CData | int, /) -> ProxycclLaunchPointer: ...
    @overload
    def cast(self, cdecl: Literal["void *"], value: CData | int, /) -> VoidPointer: ...
    @overload
    def cast(self, cdecl: Literal["unsigned int *"], value: CData | int, /) -> UnsignedIntPointer: ...
    @overload
    def cast(self, cdecl: Literal["void **"], value: CData | int, /) -> PointerTo[VoidPointer]: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclSleepers **"], value: CData | int, /
    ) -> PointerTo[ProxycclSleepersPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclStreamStep *"], value: CData | int, /) -> ProxycclStreamStepPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclStreamOperations *"], value: CData | int, /
    ) -> ProxycclStreamOperationsPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclStreamOrder *"], value: CData | int, /) -> ProxycclStreamOrderPointer: ...
    @overload
    def cast(self, cdecl: Literal["int *"], value: CData | int, /) -> IntPointer: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], value: CData | int, /) -> Number: ...
    def sizeof(
        self,
        cdecl: CData
        | Literal[
            "ProxycclTrigger",
            "ProxycclErrorRecord",
            "ProxycclWait",
            "ProxycclControl",
            "ProxycclControl *",
            "ProxycclFifo",
            "uint64_t",
            "uint32_t",
            "ProxycclSemaphore",
            "ProxycclSmChannel",
            "char",
            "ProxycclProxyChannel",
            "ProxycclLink",
            "ProxycclTeamCounters",
            "ProxycclTeam",
            "char *",
            "ProxycclTransfer",
            "ProxycclFlows",
            "ProxycclPacketTeam",
            "ProxycclArrived",
            "ProxycclOperand",
            "ProxycclStep",
            "ProxycclExecutionCounters",
            "ProxycclExecution",
            "int32_t",
            "ProxycclExpertSegment",
            "ProxycclExpertSlot",
            "ProxycclExpertChoice",
            "ProxycclReceivedRows",
            "ProxycclExpertCounters",
            "ProxycclExperts",
            "ProxycclExpertLayout",
            "ProxycclDispatch",
            "ProxycclCombine",
            "float",
            "ProxycclWeighing",
            "ProxycclPoolCalls",
            "ProxycclSegment",
            "ProxycclAllocationGuard",
            "ProxycclSleepers",
            "ProxycclStreamOperation",
            "ProxycclLaunch",
            "unsigned int",
            "void *",
            "ProxycclSleepers *",
            "ProxycclStreamStep",
            "ProxycclStreamOperations",
            "ProxycclStreamOrder",
            "int",
        ],
        /,
    ) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

ffi: FFI
lib: Lib
