"""ElasticBuffer's storage of embeddings (Engram): each rank stores rows, and every rank reads all rows by index."""

from __future__ import annotations

from collections.abc import Callable

import torch

from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.geometry import aligned
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.deep_ep.arguments import bytes_of, refuse, require_tensor
from proxyccl.deep_ep.config import ELASTIC_ALIGNMENT
from proxyccl.deep_ep.connected import ElasticBase
from proxyccl.deep_ep.tokens import column_major
from proxyccl.deep_ep.utils import EventHandle
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arrays.array import ArrayView, as_view
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory, StreamLike
from proxyccl.proxy.codec import Codec, Message, Uint64

_ROW_ALIGNMENT = 32

Fetched = tuple[torch.Tensor, torch.Tensor | None]

_THREADS = 256
_LANES = 32  # the number of threads that read one row
_MOST_BLOCKS = 1024


class _Offer(Message, frozen=True):
    nbytes: Uint64
    handle: bytes


class _Rows(Message, frozen=True):
    entries: Uint64
    row_bytes: Uint64


_OFFER = Codec(_Offer, 64 << 10, "memory of rows")
_ROWS = Codec(_Rows, 64, "rows")


class StoredRows:
    """Rows in pinned memory of one host: each rank stores rows, and every rank reads the rows of all ranks by index.
    All ranks construct a `StoredRows` together. The rows may take more memory than a device has. A kernel reads the
    rows, because the rows' indices are in device memory. A rank does nothing for the reads of other ranks.

    Args:
        group: a group whose ranks are all on one host.
        nbytes: the size of this rank's memory.

    Attributes:
        entries: the number of rows that each rank has written; 0 before the first `write`.
        row_bytes: the number of bytes of a row.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group = group
        self.entries = self.row_bytes = 0
        self._memory = group.runtime.allocate_pinned(nbytes)
        offers = group.exchange.all_gather(_Offer(nbytes, self._memory.handle), _OFFER, "memory of rows")
        self._peers: list[PinnedMemory] = []
        stores = [self._memory.ptr]
        for step in range(1, group.world_size):
            peer = (group.rank + step) % group.world_size
            with group.mapping_of(peer):
                self._peers.append(group.runtime.open_pinned(offers[peer].handle))
            stores.append(self._peers[-1].ptr)
        by_rank = [stores[(rank - group.rank) % group.world_size] for rank in range(group.world_size)]
        self._stores = allocate(group, group.world_size, "uint64", "experts").upload(by_rank)
        group.exchange.barrier("memory of rows: all ranks have mapped it")

    def write(self, view: ArrayView, row_bytes: int) -> None:
        """Replaces this rank's rows by the rows of `view`, which must fit into the memory. All ranks make this call
        together. The call waits for the earlier work of all ranks before it writes, and for the writes of all ranks
        before it returns. If the number or the size of rows differs between ranks, the call writes nothing and raises
        ArgumentError.
        """
        group = self._group
        group.synchronize()
        own = _Rows(view.nbytes // row_bytes, row_bytes)
        for rank, other in enumerate(group.exchange.all_gather(own, _ROWS, "rows: all ranks have ended their reads")):
            if other != own:
                raise ArgumentError(
                    "storage",
                    f"has {own.entries} rows of {own.row_bytes} bytes; rank {rank} has {other.entries} of "
                    f"{other.row_bytes}",
                )
        group.runtime.copy(self._memory.ptr, view.ptr, view.nbytes)
        self.entries, self.row_bytes = own.entries, own.row_bytes
        group.exchange.barrier("rows: all ranks have written their rows")

    def fetch(self, indices: ArrayView, out: ArrayView, stream: StreamLike) -> None:
        """Reads rows by their int32 indices, with one kernel on a stream; `stream` is None on the host runtime. Row n
        of rank r has index r * `entries` + n. For an index out of range, `out` gets zeros.
        """
        if not indices.size:
            return
        group = self._group
        grid = min(-(-indices.size * _LANES // _THREADS), _MOST_BLOCKS), _THREADS
        if group.runtime.name == "host":
            grid = 1, 1
        kernel = group.runtime.shipped("engram_fetch.h", "engram_fetch_impl")
        rows = self._stores, group.world_size, self.entries, self.row_bytes
        launch = kernel.prepare(*grid, *rows, indices.ptr, indices.size, out.ptr)
        group.launches.launch(launch, stream, (indices.owner, out.owner))

    def close(self) -> None:
        """Frees the memory. No queued work of any rank may still use the memory."""
        for memory in (self._memory, *self._peers):
            memory.close()
        self._stores.free()


class EngramCalls(ElasticBase):
    """The calls that store rows, and read rows by index."""

    _stored: StoredRows | None = None
    _row_type = torch.bfloat16
    _hidden = 0
    _factors: torch.Tensor | None = None

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Returns the two parts of the smallest buffer with Engram storage, each a multiple of 2 MiB.

        Args:
            num_entries: the number of rows that a rank stores.
            hidden: the number of elements of a row.
            num_max_tokens_per_rank: the largest number of rows that a rank fetches in one call.
            dtype: the elements' type.

        Returns:
            The number of bytes for fetched rows, and the number of bytes for stored rows. The buffer's `num_cpu_bytes`
            is the second number, and its `num_bytes` is the sum of the two numbers.

        Raises:
            ArgumentError: a number is negative, or not an integer.
        """
        row = aligned(whole_number("hidden", hidden, 0) * dtype.itemsize, _ROW_ALIGNMENT)
        fetched = row * whole_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        stored = row * whole_number("num_entries", num_entries, 0)
        return aligned(fetched, ELASTIC_ALIGNMENT), aligned(stored, ELASTIC_ALIGNMENT)

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Stores this rank's rows. All ranks make this call together. The CPU waits for the earlier work of all ranks.

        Args:
            storage: the rows: a contiguous tensor [entries, hidden] of bfloat16, or with `sf` of float8_e4m3fn. All
                ranks pass the same shape.
            sf: the scales of all ranks' rows: a contiguous tensor [ranks * entries, n] of float32 or int32, with the
                same values on all ranks. The buffer keeps this tensor and does not copy it.

        Raises:
            ArgumentError: an argument is wrong, the shapes of `storage` differ between ranks, or the rows do not fit in
                `num_cpu_bytes`. Nothing was stored.
            NotImplementedError: the ranks are on several nodes.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._usable()
        require_tensor("storage", storage, (None, None), (torch.bfloat16, torch.float8_e4m3fn))
        _, view = bytes_of(self.communicator.group, "storage", storage)
        entries, hidden = storage.shape
        if not view.nbytes:
            raise ArgumentError("storage", f"has shape {list(storage.shape)}; expected rows")
        if (sf is not None) != (storage.dtype == torch.float8_e4m3fn):
            raise ArgumentError("sf", "must be given with storage of float8_e4m3fn, and only then")
        if sf is not None:
            require_tensor("sf", sf, (entries * self.num_ranks, None), (torch.float32, torch.int32))
            bytes_of(self.communicator.group, "sf", sf)
        if view.nbytes > self.num_cpu_bytes:
            raise ArgumentError(
                "storage", f"has {view.nbytes} bytes; num_cpu_bytes of the buffer is {self.num_cpu_bytes}"
            )
        if self.num_rdma_ranks > 1:
            raise refuse("ElasticBuffer.engram_write across nodes", "kernels read rows from other ranks' memory")
        if self._stored is None:
            self._stored = StoredRows(self.communicator.group, self.num_cpu_bytes)
        self._stored.write(view, hidden * storage.itemsize)
        self._row_type, self._hidden, self._factors = storage.dtype, hidden, sf

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Fetched]:
        """Reads rows of all ranks, on the current stream. Other ranks do not take part in the call.

        Args:
            indices: the indices of the rows: a contiguous tensor [tokens, n] of int32. Row i of rank r has index r *
                entries + i. For an index out of range, the hook returns zeros on GPUs; on the CPU, the call raises
                ArgumentError.
            num_qps: without effect.
            use_tma_aligned_col_major_sf: whether scales are returned in columns, each of which begins at a multiple of
                16 bytes.

        Returns:
            A hook that makes the current stream wait for the rows. The hook returns the rows, [tokens, n * hidden], and
            their scales, [tokens, n * scales of a row], or None without scales.

        Raises:
            ArgumentError: an argument is wrong, nothing was stored, or the rows take more than `num_bytes` -
                `num_cpu_bytes`.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._usable()
        whole_number("num_qps", num_qps, 0)
        by_columns = as_flag(use_tma_aligned_col_major_sf, "use_tma_aligned_col_major_sf")
        require_tensor("indices", indices, (None, None), (torch.int32,))
        bytes_of(self.communicator.group, "indices", indices)
        stored = self._stored
        if stored is None or not stored.entries:
            raise ArgumentError("storage", "is not known; call engram_write first")
        tokens, each = indices.shape
        room = self.num_bytes - self.num_cpu_bytes
        if indices.numel() * stored.row_bytes > room:
            raise ArgumentError(
                "indices",
                f"names {indices.numel()} rows of {stored.row_bytes} bytes; the buffer has {room} bytes for them, "
                "num_bytes less num_cpu_bytes",
            )
        if self._stream is None and indices.numel():
            least, most = int(indices.min()), int(indices.max())
            rows = self.num_ranks * stored.entries
            if least < 0 or most >= rows:
                raise ArgumentError("indices", f"are {least} to {most}; expected 0 to {rows - 1}")
        data = torch.empty(tokens, each * self._hidden, dtype=self._row_type, device=indices.device)
        stored.fetch(as_view(indices, "indices"), as_view(data.view(torch.uint8), "data"), self._current_stream())
        factors = None
        if self._factors is not None:
            known = indices.view(-1).clamp(0, len(self._factors) - 1)  # clamps, because GPUs do not check indices
            factors = self._factors[known].view(tokens, each * self._factors.shape[1])
            if by_columns:
                factors = column_major(factors).copy_(factors)
        event = EventHandle()

        def hook() -> Fetched:
            event.current_stream_wait()
            return data, factors

        return hook

    def _close_engram(self) -> None:
        stored, self._stored, self._factors = self._stored, None, None
        if stored is not None:
            stored.close()
