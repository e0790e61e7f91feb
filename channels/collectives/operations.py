"""The collectives of a communicator: checks, plans, launches.

A plan is a collective with its arguments packed, kept for the next call with the same arguments, so that issuing it
again is one call into the driver. What must agree between ranks is compared through the control segments' call logs,
before the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from proxyccl.channels.collectives.selection import ALGORITHMS, PACKET_ALGORITHMS, Selector, sending_no_sums
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.control import encode_fields
from proxyccl.device.arrays import Array, ArrayView, as_view, fingerprint, reduction_dtypes
from proxyccl.device.dtypes import DTYPES
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator

OPS = ("sum", "prod", "min", "max", "avg")
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "prepare",
    "prepare with weights",
    "redispatch",
    "collect",
    *(
        call + weights + indices
        for call in ("dispatch", "dispatch_send")
        for weights in ("", " with weights")
        for indices in ("", " by indices")
    ),
    *(call + weights for call in ("combine", "combine_send") for weights in ("", " with weights")),
)
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_PLANS = 512

Plan = Callable[[StreamLike], None]
Key = tuple[Any, ...]

ALL_REDUCE_KERNELS = {
    "one_shot": ("all_reduce_one_shot.h", "all_reduce_one_shot"),
    "recursive_doubling": ("all_reduce_recursive_doubling.h", "all_reduce_recursive_doubling"),
    "two_shot_packets": ("all_reduce_two_shot_packets.h", "all_reduce_two_shot_packets"),
    "two_shot": ("all_reduce_two_shot.h", "all_reduce_two_shot"),
    "ring": ("all_reduce_ring.h", "all_reduce_ring"),
    "proxy": ("all_reduce_two_shot.h", "all_reduce_two_shot"),
}


def describe_call(fields: tuple[int, ...]) -> dict[str, str]:
    """The fields of a logged call in words."""
    collective, dtype, op, algorithm, root, count = fields
    return {
        "collective": _COLLECTIVES[collective],
        "dtype": list(DTYPES)[dtype],
        "op": OPS[op],
        "algorithm": ALGORITHMS[algorithm] if algorithm < len(ALGORITHMS) else "any",
        "root": str(root),
        "count": str(count),
    }


def encode_call(
    collective: str, dtype: str = "uint8", op: str = "sum", algorithm: str | None = None, root: int = 0, count: int = 0
) -> tuple[int, ...]:
    """What must agree between ranks, as numbers."""
    return (
        _COLLECTIVES.index(collective),
        _DTYPE_CODES[dtype],
        OPS.index(op),
        ALGORITHMS.index(algorithm) if algorithm is not None else len(ALGORITHMS),
        root,
        count,
    )


class Collectives:
    """The collectives of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._comm = communicator
        self._teams: dict[bool, Team] = {}
        self._levels: tuple[Team, Team] | None = None
        self._plans: dict[Key, Plan] = {}
        self._prepared: dict[Key, tuple[Any, Launch]] = {}
        self._selector = Selector.for_ranks(communicator.world_size, communicator.runtime.name)

    def team(self, *, proxied: bool = False) -> Team:
        """The team whose links are all proxied, or the one that maps what it can.

        Made when first used, by all ranks together.
        """
        if proxied not in self._teams:
            self._teams[proxied] = Team(self._comm, proxied=proxied)
        return self._teams[proxied]

    def algorithms(self) -> tuple[str, ...]:
        """The all-reduce algorithms that work between these ranks. All ranks call this together."""
        packets, levels = self.team().packets is not None, self._comm.topology.has_levels()
        return tuple(
            name
            for name in ALGORITHMS
            if (packets or name not in PACKET_ALGORITHMS) and (levels or name != "hierarchical")
        )

    def levels(self) -> tuple[Team, Team]:
        """Two teams of this rank: the ranks of its node, and those with its number on every node.

        Made when first used, by all ranks together.
        """
        if self._levels is None:
            comm, nodes = self._comm, self._comm.topology.node_members()
            across = [members[comm.local_rank] for members in nodes]
            inside = comm.topology.node_ranks
            self._levels = Team(comm, proxied=False, members=inside), Team(comm, proxied=False, members=across)
        return self._levels

    @property
    def selector(self) -> Selector:
        """Which all-reduce algorithm is used for which size; the same on all ranks."""
        return self._selector

    @selector.setter
    def selector(self, selector: Selector) -> None:
        self._selector = selector
        self._plans.clear()  # plans made by size hold the old choice
        self._prepared.clear()

    def close(self) -> None:
        """Frees what the kernels work in. No kernel of any rank may use it any more."""
        self._plans.clear()
        self._prepared.clear()
        for team in (*self._teams.values(), *(self._levels or ())):
            team.close()
        self._teams.clear()
        self._levels = None

    # -- the calls ---

    def all_reduce(self, x: Any, op: str, out: Any, algorithm: str | None, stream: StreamLike) -> Any:
        """See `Communicator.all_reduce`."""
        _check_op(op)
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ArgumentError("algorithm", f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")
        key = _key("all_reduce", x, x if out is None else out, op, algorithm)
        if self._repeat(key, x, out, stream):
            return x if out is None else out
        source = self.input(x, "x")
        _check_reducible(source)
        result, target = self._output(out, x, source, source.shape)
        _refuse_partial_overlap(source, target, in_place=0)
        self._run(
            ("all_reduce", source.dtype.name, op, algorithm, 0, source.size),
            (source, target),
            lambda: self._plan_all_reduce(source, target, op, algorithm),
            self._comm.stream_for(stream, x),
            key,
        )
        return result

    def reduce_scatter(self, x: Any, op: str, out: Any, algorithm: str | None, stream: StreamLike) -> Any:
        """See `Communicator.reduce_scatter`."""
        _check_op(op)
        _check_moving(algorithm)
        key = _key("reduce_scatter", x, out, op, algorithm)
        if self._repeat(key, x, out, stream):
            return out
        source, ranks, rank = self.input(x, "x"), self._comm.world_size, self._comm.rank
        _check_reducible(source)
        shape = self._share_of(source, "x")
        result, target = self._output(out, None, source, shape)
        _refuse_partial_overlap(source, target, in_place=rank * target.nbytes)

        def plan() -> Plan:
            if ranks == 1:
                return self._copy_plan(source, target, target.nbytes)
            team = self._moving_team(algorithm)
            kernel = self._comm.runtime.shipped("all_reduce_two_shot.h", "reduce_scatter", source.dtype.name, op)
            grid = team.grid(source.nbytes)
            return kernel.prepare(grid, team.threads, team.device_pointer, source.ptr, target.ptr, target.size)

        self._run(
            ("reduce_scatter", source.dtype.name, op, algorithm, 0, target.size),
            (source, target),
            plan,
            self._comm.stream_for(stream, x),
            key,
        )
        return result

    def all_gather(self, x: Any, out: Any, algorithm: str | None, stream: StreamLike) -> Any:
        """See `Communicator.all_gather`."""
        _check_moving(algorithm)
        key = _key("all_gather", x, out, algorithm)
        if self._repeat(key, x, out, stream):
            return out
        source, ranks = self.input(x, "x"), self._comm.world_size
        shape = (ranks * source.shape[0], *source.shape[1:]) if source.shape else (ranks,)
        result, target = self._output(out, None, source, shape)
        _refuse_partial_overlap(target, source, in_place=self._comm.rank * source.nbytes)
        self._move("all_gather", source, target, source.nbytes, algorithm, self._comm.stream_for(stream, x), key)
        return result

    def all_to_all(self, x: Any, out: Any, algorithm: str | None, stream: StreamLike) -> Any:
        """See `Communicator.all_to_all`."""
        _check_moving(algorithm)
        key = _key("all_to_all", x, out, algorithm)
        if self._repeat(key, x, out, stream):
            return out
        source = self.input(x, "x")
        self._share_of(source, "x")
        result, target = self._output(out, None, source, source.shape)
        _refuse_partial_overlap(source, target, in_place=0)
        share = source.nbytes // self._comm.world_size
        self._move("all_to_all", source, target, share, algorithm, self._comm.stream_for(stream, x), key)
        return result

    def broadcast(self, x: Any, root: int, out: Any, algorithm: str | None, stream: StreamLike) -> Any:
        """See `Communicator.broadcast`."""
        if not isinstance(root, int) or not 0 <= root < self._comm.world_size:
            raise ArgumentError("root", f"must be a rank from 0 to {self._comm.world_size - 1}, not {root!r}")
        _check_moving(algorithm)
        key = _key("broadcast", x, x if out is None else out, algorithm, root)
        if self._repeat(key, x, out, stream):
            return x if out is None else out
        source = self.input(x, "x")
        result, target = self._output(x if out is None else out, x, source, source.shape)
        _refuse_partial_overlap(source, target, in_place=0)
        self._move("broadcast", source, target, source.nbytes, algorithm, self._comm.stream_for(stream, x), key, root)
        return result

    def barrier(self, stream: StreamLike, *, intra_node_only: bool = False) -> None:
        """See `Communicator.barrier`. With `intra_node_only` the ranks of each node wait for one another only."""
        inside = intra_node_only and self._comm.topology.node_count > 1
        key: Key = ("barrier", inside)
        if self._repeat(key, None, None, stream):
            return

        def plan() -> Plan:
            if (self._comm.local_world_size if inside else self._comm.world_size) == 1:
                return lambda _: None
            team = self.levels()[0] if inside else self.team()
            kernel = self._comm.runtime.shipped("moves.h", "barrier")
            return kernel.prepare(1, team.threads, team.device_pointer)

        self._run(("barrier", "uint8", "sum", None, int(inside), 1), (), plan, stream, key)

    # -- plans ---

    def _choose(self, source: ArrayView) -> str:
        if self._comm.topology.has_levels():
            return "hierarchical"
        algorithm = self._selector.choose(source.nbytes)
        sums_are_longer = source.dtype.name in ("float16", "bfloat16")
        return sending_no_sums(algorithm, self._comm.world_size) if sums_are_longer else algorithm

    def _plan_all_reduce(self, source: ArrayView, target: ArrayView, op: str, algorithm: str | None) -> Plan:
        if self._comm.world_size == 1:
            return self._copy_plan(source, target, source.nbytes)
        chosen = algorithm or self._choose(source)
        if chosen == "hierarchical":
            return self._plan_by_levels(source, target, op)
        team = self.team(proxied=chosen == "proxy")
        if chosen in PACKET_ALGORITHMS and team.packets is None:
            if algorithm is not None:
                raise ArgumentError(
                    "algorithm",
                    f"{algorithm} needs every rank's memory mapped, and some is not; use ring, two_shot or proxy",
                )
            chosen = "two_shot"
        file, name = ALL_REDUCE_KERNELS[chosen]
        kernel = self._comm.runtime.shipped(file, name, source.dtype.name, op)
        arrays = (source.ptr, target.ptr, source.size)
        if chosen in PACKET_ALGORITHMS and team.packets is not None:
            blocks, threads, parameter = team.packets.launch(chosen, source.dtype, source.size)
            return kernel.prepare(blocks, threads, parameter, *arrays)
        return kernel.prepare(team.grid(source.nbytes), team.threads, team.device_pointer, *arrays)

    def _plan_by_levels(self, source: ArrayView, target: ArrayView, op: str) -> Plan:
        """Each share is reduced inside the node, then between the ranks of one number on all nodes, and handed round
        inside the node, so a node's data crosses to the others once. What makes no even shares goes all together.
        """
        comm, dtype = self._comm, source.dtype
        if not comm.topology.has_levels():
            raise ArgumentError("algorithm", "hierarchical needs several nodes of as many ranks each, and two at least")
        inside, across = self.levels()
        share = source.size // comm.local_world_size
        even, nbytes = share * comm.local_world_size, share * dtype.itemsize
        own = target.ptr + comm.local_rank * nbytes

        shipped = comm.runtime.shipped
        reduce = shipped("all_reduce_two_shot.h", "all_reduce_two_shot", dtype.name, op)
        launches: list[Launch] = []
        if share:
            partial = "sum" if op == "avg" else op  # who has all parts divides
            scatter = shipped("all_reduce_two_shot.h", "reduce_scatter", dtype.name, partial)
            gather = shipped("moves.h", "all_gather")
            team = inside.device_pointer
            launches += [
                scatter.prepare(inside.grid(even * dtype.itemsize), inside.threads, team, source.ptr, own, share),
                reduce.prepare(across.grid(nbytes), across.threads, across.device_pointer, own, own, share),
                gather.prepare(inside.grid(nbytes), inside.threads, team, own, target.ptr, nbytes),
            ]
        if even < source.size:
            rest, offset = self.team(), even * dtype.itemsize
            pointers = (rest.device_pointer, source.ptr + offset, target.ptr + offset)
            launches.append(reduce.prepare(rest.grid(0), rest.threads, *pointers, source.size - even))

        def plan(stream: StreamLike) -> None:
            for launch in launches:
                launch(stream)

        return plan

    def _move(
        self,
        name: str,
        source: ArrayView,
        target: ArrayView,
        share: int,
        algorithm: str | None,
        stream: StreamLike,
        key: Key | None,
        root: int = 0,
    ) -> None:
        def plan() -> Plan:
            if self._comm.world_size == 1:
                return self._copy_plan(source, target, source.nbytes)
            team = self._moving_team(algorithm)
            kernel = self._comm.runtime.shipped("moves.h", name)
            extra = (root,) if name == "broadcast" else ()
            grid = team.grid(share)
            return kernel.prepare(grid, team.threads, team.device_pointer, source.ptr, target.ptr, share, *extra)

        count = share // source.dtype.itemsize
        call = (name, source.dtype.name, "sum", algorithm, root, count)
        self._run(call, (source, target), plan, stream, key)

    def _moving_team(self, algorithm: str | None) -> Team:
        return self.team(proxied=algorithm == "proxy")

    def _copy_plan(self, source: ArrayView, target: ArrayView, nbytes: int) -> Plan:
        runtime = self._comm.runtime
        if source.ptr == target.ptr:
            return lambda _: None
        return lambda stream: runtime.copy(target.ptr, source.ptr, nbytes, stream)

    def _run(
        self,
        call: tuple[str, str, str, str | None, int, int],
        arrays: tuple[ArrayView, ...],
        make_plan: Callable[[], Plan],
        stream: StreamLike,
        key: Key | None,
    ) -> None:
        """Compares the call with the other ranks', makes or finds its plan, and launches it."""
        comm = self._comm
        comm.runtime.stream_handle(stream)  # refuses what is no stream before anything is agreed
        fields = encode_call(*call)
        comm.agree(fields)
        count = call[-1]
        if count == 0:
            return
        launched = (*call, *(view.ptr for view in arrays))
        plan = self._plans.get(launched)
        if plan is None:
            plan = make_plan()
            _keep(self._plans, launched, plan)
        comm.launch(plan, stream, tuple(view.owner for view in arrays))
        if key is not None and isinstance(plan, Launch):
            _keep(self._prepared, key, (encode_fields(fields), plan))

    def _repeat(self, key: Key | None, x: Any, out: Any, stream: StreamLike) -> bool:
        """Issues a call that was made before with arrays of the same fingerprints. False if there was none."""
        prepared = self._prepared.get(key) if key is not None else None
        if prepared is None:
            return False
        # On a GPU nothing need be kept alive: an array's memory is freed behind all work (gpu.py), a tensor's reused
        # in the order of its stream.
        owners = (x, out) if self._comm.runtime.name == "host" and x is not None else ()
        self._comm.issue(*prepared, self._comm.stream_for(stream, x), owners)
        return True

    # -- arguments ---

    def input(self, x: Any, argument: str) -> ArrayView:
        """Where an argument of a collective lies. Raises ArgumentError if this communicator can't use it."""
        self._comm.require_usable()
        view = as_view(x, argument, gpu=self._comm.runtime.name)
        runtime = self._comm.runtime
        if view.device[0] != runtime.name or view.device[1] not in (-1, runtime.device):
            raise ArgumentError(
                argument,
                f"the array lies on {view.device[0]}:{view.device[1]}, "
                f"the communicator uses {runtime.name}:{runtime.device}",
            )
        if view.device[1] == -1 and view.nbytes and (device := runtime.pointer_device(view.ptr)) != runtime.device:
            raise ArgumentError(
                argument,
                f"the array lies on device {device}, the communicator uses {runtime.name}:{runtime.device}",
            )
        if view.ptr % view.dtype.itemsize:
            raise ArgumentError(
                argument, f"the array is not aligned to its element size of {view.dtype.itemsize} bytes"
            )
        return view

    def _output(self, out: Any, default: Any, source: ArrayView, shape: tuple[int, ...]) -> tuple[Any, ArrayView]:
        """What the caller gets back, and where it lies.

        Without `out` it is `default` for an in-place call, else a new array.
        """
        if out is None:
            out = default if default is not None else self.new_like(source, shape)
            argument = "x" if default is not None else "out"
        else:
            argument = "out"
        view = self.input(out, argument)
        if not view.writable:
            raise ArgumentError(argument, "the array is read-only")
        if view.dtype != source.dtype:
            raise ArgumentError(argument, f"has element type {view.dtype}, x has {source.dtype}")
        if view.shape != shape:
            raise ArgumentError(argument, f"has shape {view.shape}, {shape} is wanted")
        return out, view

    def new_like(self, source: ArrayView, shape: tuple[int, ...]) -> Any:
        """A new array for a result.

        It is torch's where the argument was, else numpy's for arrays of the host, else one of `Communicator.empty`.
        """
        owner = source.owner
        if hasattr(owner, "new_empty"):  # a torch tensor
            return owner.new_empty(shape)
        if self._comm.runtime.name == "host" and not isinstance(owner, Array):
            return np.empty(shape, source.dtype.numpy())
        return self._comm.empty(shape, source.dtype)

    def _share_of(self, source: ArrayView, argument: str) -> tuple[int, ...]:
        ranks = self._comm.world_size
        if not source.shape or source.shape[0] % ranks:
            raise ArgumentError(
                argument, f"the first dimension of shape {source.shape} does not divide by the world size {ranks}"
            )
        return (source.shape[0] // ranks, *source.shape[1:])


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ArgumentError("op", f"{op!r} is none of {', '.join(OPS)}")


def _check_moving(algorithm: str | None) -> None:
    if algorithm not in (None, "proxy"):
        raise ArgumentError("algorithm", f"{algorithm!r} is neither None nor 'proxy'")


def _check_reducible(source: ArrayView) -> None:
    if not source.dtype.c_name:
        raise ArgumentError(
            "x", f"element type {source.dtype} can't be reduced; use one of {', '.join(reduction_dtypes())}"
        )


def _key(collective: str, x: Any, out: Any, *options: object) -> Key | None:
    """What makes two calls the same, if that can be told from the arrays' fingerprints."""
    if out is None:
        return None
    source = fingerprint(x)
    target = source if out is x else fingerprint(out)
    return None if source is None or target is None else (collective, source, target, *options)


def _keep(cache: dict[Key, Any], key: Key, value: object) -> None:
    if len(cache) >= _PLANS:
        del cache[next(iter(cache))]
    cache[key] = value


def _refuse_partial_overlap(whole: ArrayView, part: ArrayView, *, in_place: int) -> None:
    """Input and output must be apart, or lie as an in-place call's do: `part` begins `in_place` bytes into `whole`."""
    apart = part.ptr + part.nbytes <= whole.ptr or whole.ptr + whole.nbytes <= part.ptr
    if not apart and part.ptr != whole.ptr + in_place:
        raise ArgumentError("out", "overlaps x in part; it must be apart from it or the same array")
