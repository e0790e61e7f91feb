"""Made by device/build_stubs.py from build_transfers.py. To change it, run: make stubs."""

from collections.abc import Sequence
from typing import Final, Literal, overload

from proxyccl.device._cdata import Array as Array
from proxyccl.device._cdata import ArrayField as ArrayField
from proxyccl.device._cdata import BaseFFI as BaseFFI
from proxyccl.device._cdata import CData as CData
from proxyccl.device._cdata import CharPointer as CharPointer
from proxyccl.device._cdata import Initial as Initial
from proxyccl.device._cdata import IntPointer as IntPointer
from proxyccl.device._cdata import ItemPointer as ItemPointer
from proxyccl.device._cdata import Number as Number
from proxyccl.device._cdata import Passed as Passed
from proxyccl.device._cdata import Pointer as Pointer
from proxyccl.device._cdata import PointerField as PointerField
from proxyccl.device._cdata import Uint64Pointer as Uint64Pointer

class ProxycclAgent(CData): ...
class ProxycclAgentPointer(Pointer): ...
class ProxycclLink(CData): ...
class ProxycclLinkPointer(Pointer): ...
class ProxycclTransfer(CData): ...
class ProxycclTransferPointer(Pointer): ...

class _ProxycclFault:
    kind: int
    address: int

class ProxycclFault(_ProxycclFault, CData): ...
class ProxycclFaultPointer(_ProxycclFault, ItemPointer[ProxycclFault]): ...

class _ProxycclTransferTimes:
    posted: int
    returned: int
    ended: int

class ProxycclTransferTimes(_ProxycclTransferTimes, CData): ...
class ProxycclTransferTimesPointer(_ProxycclTransferTimes, ItemPointer[ProxycclTransferTimes]): ...

class _ProxycclTransferRecord:
    posted: int
    ended: int
    bytes: int
    blocks: int
    label: int
    writes: int
    state: int

class ProxycclTransferRecord(_ProxycclTransferRecord, CData): ...
class ProxycclTransferRecordPointer(_ProxycclTransferRecord, ItemPointer[ProxycclTransferRecord]): ...

class _ProxycclTransferLog:
    until: int
    count: int
    records: ArrayField[ProxycclTransferRecord, ProxycclTransferRecordPointer]

class ProxycclTransferLog(_ProxycclTransferLog, CData): ...
class ProxycclTransferLogPointer(_ProxycclTransferLog, ItemPointer[ProxycclTransferLog]): ...

class _ProxycclCopier:
    copy: int
    write64: int
    event_record: int
    event_query: int
    current: int
    make_current: int
    context: int
    exchange_capture_mode: int
    relaxed: int

class ProxycclCopier(_ProxycclCopier, CData): ...
class ProxycclCopierPointer(_ProxycclCopier, ItemPointer[ProxycclCopier]): ...

class _ProxycclDeviceCopies:
    rows: PointerField[Uint64Pointer]
    count: int
    launch: int
    bytes: int
    stream: int
    event: int
    word: int
    word_on_device: int

class ProxycclDeviceCopies(_ProxycclDeviceCopies, CData): ...
class ProxycclDeviceCopiesPointer(_ProxycclDeviceCopies, ItemPointer[ProxycclDeviceCopies]): ...

class _ProxycclStaging:
    copier: PointerField[ProxycclCopierPointer]
    memory: ArrayField[int, Uint64Pointer]
    by_fabric: int
    descriptor: int
    key: int
    base: int
    streams: ArrayField[int, Uint64Pointer]
    events: ArrayField[int, Uint64Pointer]

class ProxycclStaging(_ProxycclStaging, CData): ...
class ProxycclStagingPointer(_ProxycclStaging, ItemPointer[ProxycclStaging]): ...

class _ProxycclFabricPort:
    endpoint: int
    queue: int
    fabric: int
    peers: int
    descriptor: int
    depth: int
    max_message: int

class ProxycclFabricPort(_ProxycclFabricPort, CData): ...
class ProxycclFabricPortPointer(_ProxycclFabricPort, ItemPointer[ProxycclFabricPort]): ...

class Lib:
    PROXYCCL_LEDGER_WORDS: Final[int]
    PROXYCCL_SECRET_BYTES: Final[int]
    PROXYCCL_LONGEST_MESSAGE: Final[int]
    PROXYCCL_MOST_UNSENT: Final[int]
    PROXYCCL_TRANSFER_NEW: Final[int]
    PROXYCCL_TRANSFER_ACTIVE: Final[int]
    PROXYCCL_TRANSFER_DONE: Final[int]
    PROXYCCL_TRANSFER_CANCELED: Final[int]
    PROXYCCL_TRANSFER_LOST: Final[int]
    PROXYCCL_TRANSFER_REFUSED: Final[int]
    PROXYCCL_TRANSFER_FAILED: Final[int]
    PROXYCCL_FAULT_NONE: Final[int]
    PROXYCCL_FAULT_DEREGISTERED: Final[int]
    PROXYCCL_FAULT_FREED: Final[int]
    PROXYCCL_FAULT_FREED_HERE: Final[int]
    PROXYCCL_FAULT_PROTECTED: Final[int]
    PROXYCCL_FAULT_ENDED_HERE: Final[int]
    PROXYCCL_TRANSFER_RECORDS: Final[int]
    PROXYCCL_STAGES: Final[int]
    PROXYCCL_STAGE_BYTES: Final[int]
    PROXYCCL_BY_LINK: Final[int]
    PROXYCCL_BY_SOCKET: Final[int]
    PROXYCCL_BY_FABRIC: Final[int]
    PROXYCCL_BY_MAPPING: Final[int]
    def proxyccl_agent_create(
        self,
        name: Passed[CharPointer] | bytes,
        secret: Passed[CharPointer] | bytes,
        copied: int,
        listeners: Passed[IntPointer],
        count: int,
        /,
    ) -> ProxycclAgentPointer: ...
    def proxyccl_agent_stop(self, agent: Passed[ProxycclAgentPointer], /) -> None: ...
    def proxyccl_agent_release(self, agent: Passed[ProxycclAgentPointer], /) -> None: ...
    def proxyccl_agent_forget(self, agent: Passed[ProxycclAgentPointer], /) -> None: ...
    def proxyccl_agent_set_log(
        self, agent: Passed[ProxycclAgentPointer], log: Passed[ProxycclTransferLogPointer], /
    ) -> None: ...
    def proxyccl_transfer_log_read(
        self,
        log: Passed[ProxycclTransferLogPointer],
        next: Passed[Uint64Pointer],
        records: Passed[ProxycclTransferRecordPointer],
        room: int,
        lost: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_agent_tell_losses(self, agent: Passed[ProxycclAgentPointer], event: int, /) -> None: ...
    def proxyccl_agent_secret(self, agent: Passed[ProxycclAgentPointer], /) -> int: ...
    def proxyccl_agent_set_memory(
        self, agent: Passed[ProxycclAgentPointer], ranges: Passed[Uint64Pointer], count: int, /
    ) -> int: ...
    def proxyccl_agent_set_device_memory(
        self,
        agent: Passed[ProxycclAgentPointer],
        staging: Passed[ProxycclStagingPointer],
        ranges: Passed[Uint64Pointer],
        count: int,
        /,
    ) -> int: ...
    def proxyccl_agent_unread(self, agent: Passed[ProxycclAgentPointer], /) -> int: ...
    def proxyccl_agent_take(
        self, agent: Passed[ProxycclAgentPointer], to: Passed[CharPointer] | bytes, room: int, /
    ) -> int: ...
    def proxyccl_agent_wait(self, agent: Passed[ProxycclAgentPointer], timeout_ns: int, /) -> int: ...
    def proxyccl_agent_tell_itself(
        self, agent: Passed[ProxycclAgentPointer], message: Passed[CharPointer] | bytes, bytes: int, /
    ) -> int: ...
    def proxyccl_process_read(self, pid: int, address: int, to: Passed[CharPointer] | bytes, bytes: int, /) -> int: ...
    def proxyccl_ask_to_copy(self, socket: int, secret: Passed[CharPointer] | bytes, timeout_ms: int, /) -> int: ...
    def proxyccl_ledger_begin(self, ledger: Passed[Uint64Pointer], number: int, /) -> None: ...
    def proxyccl_ledger_end(self, ledger: Passed[Uint64Pointer], number: int, freed: int, /) -> None: ...
    def proxyccl_ledger_count(self, ledger: Passed[Uint64Pointer], /) -> int: ...
    def proxyccl_link_create(
        self,
        agent: Passed[ProxycclAgentPointer],
        socket: int,
        peer_secret: Passed[CharPointer] | bytes,
        process: int,
        pid: int,
        address: Passed[CharPointer] | bytes,
        address_bytes: int,
        /,
    ) -> ProxycclLinkPointer: ...
    def proxyccl_link_end(self, link: Passed[ProxycclLinkPointer], /) -> None: ...
    def proxyccl_link_release(self, link: Passed[ProxycclLinkPointer], /) -> None: ...
    def proxyccl_link_lost(self, link: Passed[ProxycclLinkPointer], /) -> CharPointer: ...
    def proxyccl_link_look(self, link: Passed[ProxycclLinkPointer], /) -> CharPointer: ...
    def proxyccl_link_tell(
        self, link: Passed[ProxycclLinkPointer], message: Passed[CharPointer] | bytes, bytes: int, /
    ) -> int: ...
    def proxyccl_transfer_create(
        self,
        agent: Passed[ProxycclAgentPointer],
        link: Passed[ProxycclLinkPointer],
        writes: int,
        local: Passed[Uint64Pointer],
        remote: Passed[Uint64Pointer],
        count: int,
        staging: Passed[ProxycclStagingPointer],
        way: int,
        /,
    ) -> ProxycclTransferPointer: ...
    def proxyccl_agent_set_fabric(
        self, agent: Passed[ProxycclAgentPointer], port: Passed[ProxycclFabricPortPointer], /
    ) -> int: ...
    def proxyccl_transfer_create_by_fabric(
        self,
        agent: Passed[ProxycclAgentPointer],
        link: Passed[ProxycclLinkPointer],
        writes: int,
        rows: Passed[Uint64Pointer],
        count: int,
        peer: int,
        /,
    ) -> ProxycclTransferPointer: ...
    def proxyccl_transfer_create_on_device(
        self,
        agent: Passed[ProxycclAgentPointer],
        link: Passed[ProxycclLinkPointer],
        copier: Passed[ProxycclCopierPointer],
        copies: Passed[ProxycclDeviceCopiesPointer],
        /,
    ) -> ProxycclTransferPointer: ...
    def proxyccl_transfer_guard(
        self,
        transfer: Passed[ProxycclTransferPointer],
        remote: int,
        ledger: Passed[Uint64Pointer],
        rows: Passed[Uint64Pointer],
        count: int,
        /,
    ) -> None: ...
    def proxyccl_transfer_set_label(self, transfer: Passed[ProxycclTransferPointer], label: int, /) -> None: ...
    def proxyccl_transfer_release(self, transfer: Passed[ProxycclTransferPointer], /) -> int: ...
    def proxyccl_transfer_post(
        self,
        transfer: Passed[ProxycclTransferPointer],
        message: Passed[CharPointer] | bytes,
        bytes: int,
        stream: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_transfer_post_after(
        self,
        transfer: Passed[ProxycclTransferPointer],
        message: Passed[CharPointer] | bytes,
        bytes: int,
        words: Passed[Uint64Pointer],
        /,
    ) -> int: ...
    def proxyccl_transfer_cancel(self, transfer: Passed[ProxycclTransferPointer], timeout_ns: int, /) -> int: ...
    def proxyccl_transfer_state(self, transfer: Passed[ProxycclTransferPointer], /) -> int: ...
    def proxyccl_transfer_help(self, transfer: Passed[ProxycclTransferPointer], /) -> int: ...
    def proxyccl_transfer_wait(self, transfer: Passed[ProxycclTransferPointer], timeout_ns: int, /) -> int: ...
    def proxyccl_transfer_error(self, transfer: Passed[ProxycclTransferPointer], /) -> int: ...
    def proxyccl_transfer_fault(
        self, transfer: Passed[ProxycclTransferPointer], fault: Passed[ProxycclFaultPointer], /
    ) -> None: ...
    def proxyccl_transfer_times(
        self, transfer: Passed[ProxycclTransferPointer], times: Passed[ProxycclTransferTimesPointer], /
    ) -> None: ...

class FFI(BaseFFI):
    @overload
    def new(self, cdecl: Literal["ProxycclFault *"], init: Initial[ProxycclFault] = ..., /) -> ProxycclFaultPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFault[]"], init: int | Sequence[Initial[ProxycclFault]], /
    ) -> Array[ProxycclFault, ProxycclFaultPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferTimes *"], init: Initial[ProxycclTransferTimes] = ..., /
    ) -> ProxycclTransferTimesPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferTimes[]"], init: int | Sequence[Initial[ProxycclTransferTimes]], /
    ) -> Array[ProxycclTransferTimes, ProxycclTransferTimesPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferRecord *"], init: Initial[ProxycclTransferRecord] = ..., /
    ) -> ProxycclTransferRecordPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferRecord[]"], init: int | Sequence[Initial[ProxycclTransferRecord]], /
    ) -> Array[ProxycclTransferRecord, ProxycclTransferRecordPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferLog *"], init: Initial[ProxycclTransferLog] = ..., /
    ) -> ProxycclTransferLogPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclTransferLog[]"], init: int | Sequence[Initial[ProxycclTransferLog]], /
    ) -> Array[ProxycclTransferLog, ProxycclTransferLogPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCopier *"], init: Initial[ProxycclCopier] = ..., /
    ) -> ProxycclCopierPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclCopier[]"], init: int | Sequence[Initial[ProxycclCopier]], /
    ) -> Array[ProxycclCopier, ProxycclCopierPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclDeviceCopies *"], init: Initial[ProxycclDeviceCopies] = ..., /
    ) -> ProxycclDeviceCopiesPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclDeviceCopies[]"], init: int | Sequence[Initial[ProxycclDeviceCopies]], /
    ) -> Array[ProxycclDeviceCopies, ProxycclDeviceCopiesPointer]: ...
    @overload
    def new(self, cdecl: Literal["uint64_t *"], init: int = ..., /) -> Uint64Pointer: ...
    @overload
    def new(self, cdecl: Literal["uint64_t[]"], init: int | Sequence[int], /) -> Array[int, Uint64Pointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStaging *"], init: Initial[ProxycclStaging] = ..., /
    ) -> ProxycclStagingPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclStaging[]"], init: int | Sequence[Initial[ProxycclStaging]], /
    ) -> Array[ProxycclStaging, ProxycclStagingPointer]: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricPort *"], init: Initial[ProxycclFabricPort] = ..., /
    ) -> ProxycclFabricPortPointer: ...
    @overload
    def new(
        self, cdecl: Literal["ProxycclFabricPort[]"], init: int | Sequence[Initial[ProxycclFabricPort]], /
    ) -> Array[ProxycclFabricPort, ProxycclFabricPortPointer]: ...
    @overload
    def new(self, cdecl: Literal["char *"], init: bytes = ..., /) -> CharPointer: ...
    @overload
    def new(self, cdecl: Literal["char[]"], init: int | Sequence[bytes], /) -> Array[bytes, CharPointer]: ...
    @overload
    def new(self, cdecl: Literal["int *"], init: int = ..., /) -> IntPointer: ...
    @overload
    def new(self, cdecl: Literal["int[]"], init: int | Sequence[int], /) -> Array[int, IntPointer]: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclAgent *"], value: CData | int, /) -> ProxycclAgentPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclLink *"], value: CData | int, /) -> ProxycclLinkPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTransfer *"], value: CData | int, /) -> ProxycclTransferPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFault *"], value: CData | int, /) -> ProxycclFaultPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclTransferTimes *"], value: CData | int, /
    ) -> ProxycclTransferTimesPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["ProxycclTransferRecord *"], value: CData | int, /
    ) -> ProxycclTransferRecordPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclTransferLog *"], value: CData | int, /) -> ProxycclTransferLogPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclCopier *"], value: CData | int, /) -> ProxycclCopierPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclDeviceCopies *"], value: CData | int, /) -> ProxycclDeviceCopiesPointer: ...
    @overload
    def cast(self, cdecl: Literal["uint64_t *"], value: CData | int, /) -> Uint64Pointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclStaging *"], value: CData | int, /) -> ProxycclStagingPointer: ...
    @overload
    def cast(self, cdecl: Literal["ProxycclFabricPort *"], value: CData | int, /) -> ProxycclFabricPortPointer: ...
    @overload
    def cast(self, cdecl: Literal["char *"], value: CData | int, /) -> CharPointer: ...
    @overload
    def cast(self, cdecl: Literal["int *"], value: CData | int, /) -> IntPointer: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], value: CData | int, /) -> Number: ...
    def sizeof(
        self,
        cdecl: CData
        | Literal[
            "ProxycclFault",
            "ProxycclTransferTimes",
            "ProxycclTransferRecord",
            "ProxycclTransferLog",
            "ProxycclCopier",
            "ProxycclDeviceCopies",
            "uint64_t",
            "ProxycclStaging",
            "ProxycclFabricPort",
            "char",
            "int",
        ],
        /,
    ) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

ffi: FFI
lib: Lib
