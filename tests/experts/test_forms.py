"""A layer prepares each kind of call once, and later calls of the same kind reuse the prepared call with new arrays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from proxyccl import Communicator, EPAll2AllLayer  # noqa: E402
from proxyccl.channels.expert_parallel.call_form import CallForm  # noqa: E402
from proxyccl.device.errors import ArgumentError, CapacityError  # noqa: E402
from support.devices import RUNTIME, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402

TOKENS, HIDDEN, TOPK, EXPERTS = 8, 256, 2, 4


@dataclass(frozen=True)
class Form:
    """A kind of call.

    Attributes:
        options: the layer's options.
        pair: whether tokens are pairs of float8 rows and scales.
        halves: whether calls are split into a sending and a receiving half.
        own_stream: whether calls get a `stream` argument.
        records: whether torch's autograd records calls.
    """

    options: dict[str, Any] = field(default_factory=dict)
    pair: bool = False
    halves: bool = False
    own_stream: bool = False
    records: bool = False


FLOAT8: dict[str, Any] = {"dispatch_dtype": "float8_e4m3fn"}
PADDED: dict[str, Any] = {"layout": "padded"}
COLUMNS: dict[str, Any] = {"scales_by_columns": True}
BUFFERS: dict[str, Any] = {"layout": "rank", "output_buffers": 2, "keeps_outputs": True}
FIXED: dict[str, Any] = {"max_recv_tokens": 2 * TOKENS * TOPK}
FORMS = {
    "exact": Form(),
    "exact halves": Form(halves=True),
    "exact by rank": Form({"layout": "rank"}),
    "aligned": Form({"expert_alignment": 4}),
    "aligned halves": Form({"expert_alignment": 4}, halves=True),
    "aligned fixed": Form({"expert_alignment": 4, "max_recv_tokens": 2 * TOKENS * TOPK + 16}),
    "aligned fixed halves": Form({"expert_alignment": 4, "max_recv_tokens": 2 * TOKENS * TOPK + 16}, halves=True),
    "exact by rank halves": Form({"layout": "rank"}, halves=True),
    "fixed": Form(FIXED),
    "fixed halves": Form(FIXED, halves=True),
    "fixed stream": Form(FIXED, own_stream=True),
    "exact halves stream": Form(halves=True, own_stream=True),
    "padded halves": Form(PADDED, halves=True),
    "float8": Form(FLOAT8 | PADDED),
    "float8 halves": Form(FLOAT8 | PADDED, halves=True),
    "pairs": Form(FLOAT8 | PADDED, pair=True),
    "pairs halves": Form(FLOAT8 | PADDED, pair=True, halves=True),
    "pairs by columns": Form(FLOAT8 | PADDED | COLUMNS, pair=True),
    "float8 by columns halves": Form(FLOAT8 | PADDED | COLUMNS, halves=True),
    "pairs exact": Form(FLOAT8, pair=True),
    "buffers": Form(BUFFERS),
    "buffers float8": Form(BUFFERS | FLOAT8 | FIXED),
    "buffers pairs": Form(BUFFERS | FLOAT8 | FIXED, pair=True),
    "buffers halves": Form(BUFFERS, halves=True),
    "buffers stream": Form(BUFFERS, own_stream=True),
    "recorded": Form(records=True),
    "recorded fixed": Form(FIXED, records=True),
    "recorded halves": Form(halves=True, records=True),
    "recorded buffers": Form(BUFFERS, records=True),
}


class Batch:
    """A rank's tokens. The tokens' values are integers that float8 rows with scales of 2 represent exactly."""

    def __init__(self, comm: Communicator, form: Form, turn: int) -> None:
        generator, device = torch.Generator().manual_seed(2 * turn + comm.rank), torch_device(comm)
        tokens = (TOKENS, TOKENS - 3, 0 if comm.rank else 1, TOKENS, 0)[turn % 5]
        values = torch.randint(-8, 8, (tokens, HIDDEN), generator=generator)
        self.scale = 2 if form.pair else 1
        self.ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].int().contiguous().to(device)
        self.weights = torch.randint(1, 4, (tokens, TOPK), generator=generator).float().to(device)
        self.values = (self.scale * values).to(torch.bfloat16).to(device)
        self.given: Any = self.values
        if form.pair:
            scales = torch.full((tokens, HIDDEN // 128), float(self.scale), device=device)
            self.given = values.to(torch.float8_e4m3fn).to(device), scales

    def times(self, layer: EPAll2AllLayer) -> Any:
        """Returns the number of rows that are sent for each token."""
        if layer.layout != "rank":
            return TOPK
        return torch.stack([(self.ids // 2 == rank).any(1) for rank in range(2)]).sum(0).unsqueeze(1)


def plain(rows: Any) -> Any:
    """Returns rows as bfloat16."""
    if not isinstance(rows, tuple):
        return rows
    values, scales = rows
    groups = values.float().view(*scales.shape, values.shape[-1] // scales.shape[-1]) * scales.unsqueeze(-1)
    return groups.view(values.shape).to(torch.bfloat16)


def call_pair(comm: Communicator, layer: EPAll2AllLayer, form: Form, batch: Batch, stream: Any) -> None:
    """Makes a dispatch, a redispatch and a combine, and checks their results."""
    on: dict[str, Any] = {} if stream is None else {"stream": stream}
    x = batch.given.requires_grad_() if form.records else batch.given
    if form.halves:
        rows, weights, desc = layer.dispatch_recv(layer.dispatch_send(x, batch.ids, batch.weights, **on), **on)
    else:
        rows, weights, desc = layer.dispatch(x, batch.ids, batch.weights, **on)
    with torch.no_grad():
        again = layer.redispatch(batch.given, desc, **on)
    comm.group.synchronize()
    results = plain(rows)
    if form.halves:
        combined = layer.combine_recv(layer.combine_send(results, desc, **on), **on)
    else:
        combined = layer.combine(results, desc, **on)
    comm.group.synchronize()
    expected = (batch.values.float() * batch.times(layer)).to(torch.bfloat16)
    torch.testing.assert_close(combined, expected, rtol=0.07 if layer.quantized else 0, atol=0.6 * layer.quantized)
    if not layer.quantized or form.pair:
        count = desc.rows if desc.num_recv_tokens is None else int(desc.num_recv_tokens)
        if layer.layout == "padded":
            filled = torch.arange(results.shape[1]) < desc.expert_rows.cpu().unsqueeze(1)
        elif desc.has_gaps:
            filled = desc.row_slots.cpu() >= 0
        else:
            filled = torch.arange(len(results)) < count
        assert torch.equal(plain(again)[filled], results[filled])
        assert torch.equal(combined, expected)
        assert layer.layout == "rank" or bool((weights[filled] > 0).all())
    if form.records:
        combined.backward(torch.ones_like(combined))
        assert torch.equal(x.grad, batch.times(layer) * torch.ones_like(x))


@pytest.mark.parametrize("name", FORMS)
def test_each_call_of_a_form_has_arrays_and_tokens_of_its_own(pair: Ranks, name: str) -> None:
    form = FORMS[name]

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        stream = comm.runtime.create_stream() if form.own_stream else None
        with EPAll2AllLayer(comm, *sizes, **form.options) as layer:
            for turn in range(6):
                call_pair(comm, layer, form, Batch(comm, form, turn), stream)
                if turn == 0:
                    first = comm.calls
        assert comm.calls.made > first.made
        assert comm.calls.prepared == first.prepared

    pair.run(body)


@pytest.mark.parametrize("name", ["exact", "fixed", "float8", "float8 halves", "padded halves", "buffers"])
def test_on_the_stream_where_torch_works_c_alone_issues_them(
    monkeypatch: pytest.MonkeyPatch, pair: Ranks, name: str
) -> None:
    form, given, queued = FORMS[name], CallForm.common, []
    if RUNTIME != "host":
        pytest.skip("pretends that the host runtime's stream is torch's")

    def common(call: CallForm, *launches: Any) -> tuple[Any, ...]:
        """Lets calls without a stream use the default stream, as on a GPU."""
        calls, _, _, kind, stream_of, queue, _, *others = given(call, *launches)
        handle = call._group.launches.default_stream.handle

        def note(*arguments: Any) -> None:
            queued.append(arguments)
            queue(*arguments)

        return calls, False, lambda _: handle, kind, stream_of, note, 0, *others

    monkeypatch.setattr(CallForm, "common", common)

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        with EPAll2AllLayer(comm, *sizes, **form.options) as layer:
            for turn in range(3):
                batch = Batch(comm, form, turn)
                if form.halves:
                    rows, _, desc = layer.dispatch_recv(layer.dispatch_send(batch.given, batch.ids))
                    combined = layer.combine_recv(layer.combine_send(plain(rows), desc))
                else:
                    rows, _, desc = layer.dispatch(batch.given, batch.ids)
                    combined = layer.combine(plain(rows), desc)
                comm.group.synchronize()
                expected = (batch.values.float() * batch.times(layer)).to(torch.bfloat16)
                torch.testing.assert_close(combined, expected, rtol=0.07, atol=0.6)

    pair.run(body)
    assert not queued


def test_a_stream_of_the_callers_is_used_after_torchs(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        sizes, form = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size), Form(FIXED)
        streams = [None, comm.runtime.create_stream(), comm.runtime.create_stream(), None]
        with EPAll2AllLayer(comm, *sizes, **form.options) as layer:
            for turn, (there, back) in enumerate(itertools.product(streams, streams)):
                batch = Batch(comm, form, turn)
                rows, _, desc = layer.dispatch(batch.given, batch.ids, stream=there)
                combined = layer.combine(rows, desc, stream=back)
                comm.group.synchronize()
                assert torch.equal(combined, TOPK * batch.values)

    pair.run(body)


@pytest.mark.host_only(reason="numpy arrays are the host runtime's")
def test_kinds_of_arrays_alternate(pair: Ranks) -> None:
    """A call's arguments may be arrays of different libraries; its results are arrays of the tokens' library."""

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        changes: list[Any] = [lambda x: x, lambda x: x.numpy(), torch.nn.Parameter, OfNoLibrary]
        with EPAll2AllLayer(comm, *sizes, dtype="float32", layout="rank") as layer, torch.no_grad():
            for turn, (change, wide) in enumerate(itertools.product(changes * 2, (False, True))):
                batch = Batch(comm, Form(), turn)
                x, ids = batch.values.float(), batch.ids.long() if wide else batch.ids
                if turn % 2:
                    rows, _, desc = layer.dispatch(change(x), ids, batch.weights)
                else:
                    pending = layer.dispatch_send(change(x), ids.numpy(), batch.weights)
                    rows, _, desc = layer.dispatch_recv(pending)
                assert isinstance(rows, torch.Tensor) == isinstance(change(x), torch.Tensor)
                again = torch.as_tensor(layer.redispatch(x, desc))
                assert torch.equal(again, torch.as_tensor(rows))
                combined = layer.combine(change(again), desc, out=None if turn % 3 else np.empty(x.shape, np.float32))
                assert torch.equal(torch.as_tensor(combined), x * batch.times(layer))

    pair.run(body)


class OfNoLibrary:
    """An array with no interface but DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_more_tokens_than_a_layer_has_room_for(pair: Ranks) -> None:
    """If one rank passes too many tokens, all ranks refuse the call, and later calls work."""

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        for name in ("exact", "exact halves", "buffers", "pairs exact"):
            form = FORMS[name]
            with EPAll2AllLayer(comm, *sizes, **form.options, grows=True) as layer:
                for turn in range(3):
                    batch = Batch(comm, form, turn)
                    call_pair(comm, layer, form, batch, None)
                    times = 3 if comm.rank == turn % 2 else 1
                    batch = Batch(comm, form, 0)
                    ids, weights = batch.ids.repeat(times, 1), batch.weights.repeat(times, 1)
                    x = tuple(each.repeat(times, 1) for each in (batch.given if form.pair else (batch.given,)))
                    given = (x if form.pair else x[0]), ids, weights
                    with pytest.raises(CapacityError) as caught:
                        _ = layer.dispatch_recv(layer.dispatch_send(*given)) if form.halves else layer.dispatch(*given)
                    assert caught.value.needed == 3 * TOKENS

    pair.run(body)


def test_calls_with_lost_ranks_and_indices_change_too(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS + 2, comm.local_world_size, comm.world_size)
        # Rank 1 of three is lost, so the second remaining rank is rank 2, which has experts 4 and 5.
        with EPAll2AllLayer(comm, *sizes, lost_ranks=[1], layout="rank") as layer:
            for turn in range(5):
                batch = Batch(comm, Form(), turn)
                lost = torch.arange(batch.ids.numel(), device=batch.ids.device).view(batch.ids.shape) % 3 == turn % 3
                ids = torch.where(lost, 2 + batch.ids % 2, torch.where(batch.ids < 2, batch.ids, batch.ids + 2))
                if turn % 2:
                    rows, _, desc = layer.dispatch(batch.given, ids if turn == 1 else ids.long())
                else:
                    rows, _, desc = layer.dispatch_recv(layer.dispatch_send(batch.given, ids))
                assert torch.equal(desc.lost_slots, lost)
                times = torch.stack([(~lost & (batch.ids // 2 == rank)).any(1) for rank in range(2)]).sum(0)
                assert torch.equal(layer.combine(rows, desc), times.unsqueeze(1) * batch.values)

    pair.run(body)


def test_rows_lie_where_each_calls_indices_say(pair: Ranks) -> None:
    options: tuple[dict[str, Any], ...] = ({}, FIXED)

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        for chosen, halves in itertools.product(options, (False, True)):
            with EPAll2AllLayer(comm, *sizes, **chosen) as layer:
                for turn in range(5):
                    batches = [Batch(cast("Any", Other(comm, rank)), Form(), turn) for rank in range(2)]
                    batch, slots = batches[comm.rank], torch.cat([each.ids.flatten() for each in batches]).long()
                    places = torch.empty_like(slots)
                    generator = torch.Generator().manual_seed(turn)
                    for rank in range(2):  # rows are numbered over all ranks, and each rank's rows have a random order
                        here = slots // 2 == rank
                        first = int((slots // 2 < rank).sum())
                        places[here] = first + torch.randperm(int(here.sum()), generator=generator).to(places.device)
                    scatter = places.int().view(-1, TOPK)
                    if halves:
                        sent = layer.dispatch_send(batch.given, batch.ids, batch.weights, scatter)
                        rows, _, desc = layer.dispatch_recv(sent)
                    else:
                        rows, _, desc = layer.dispatch(batch.given, batch.ids, batch.weights, scatter)
                    values = torch.cat([each.values.repeat_interleave(TOPK, 0) for each in batches])
                    here, before = slots // 2 == comm.rank, int((slots // 2 < comm.rank).sum())
                    assert torch.equal(rows[places[here] - before], values[here])
                    assert torch.equal(layer.combine(rows, desc), TOPK * batch.values)

    pair.run(body)


class Other:
    """Stands in for the communicator of another rank, so that a `Batch` can be made for that rank."""

    def __init__(self, comm: Communicator, rank: int) -> None:
        self.rank, self.runtime, self.group = rank, comm.runtime, comm.group


def test_what_halves_refuse(pair: Ranks) -> None:
    form = Form(halves=True)

    def body(comm: Communicator) -> None:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        with EPAll2AllLayer(comm, *sizes) as layer:
            batch = Batch(comm, form, 0)
            for _ in range(2):
                call_pair(comm, layer, form, batch, None)
            sent = layer.dispatch_send(batch.given, batch.ids)
            with pytest.raises(ArgumentError, match="another dispatch is under way"):
                layer.dispatch_send(batch.given, batch.ids)
            with pytest.raises(ArgumentError, match="was not received"):
                layer.combine(batch.given, sent.desc)
            rows, _, desc = layer.dispatch_recv(sent)
            with pytest.raises(ArgumentError, match=r"^pending: "):
                layer.dispatch_recv(sent)
            returned = layer.combine_send(rows, desc)
            with pytest.raises(ArgumentError, match="another combine is under way"):
                layer.combine(rows, desc)
            for out, message in (
                (rows[: len(batch.ids)], "overlaps"),
                (batch.values.float(), "element type"),
                (batch.values[1:], "shape"),
            ):
                with pytest.raises(ArgumentError, match=rf"^out: .*{message}"):
                    layer.combine_recv(returned, out=out)
            out = torch.empty_like(batch.values)
            assert layer.combine_recv(returned, out=out) is out
            assert torch.equal(out, TOPK * batch.values)
            wrong = batch.ids.clone()
            wrong[0, 0] = EXPERTS + 1 if comm.rank else 0
            sent = layer.dispatch_send(batch.given, wrong)
            with pytest.raises(ArgumentError, match=r"\[0, 0\] on rank 1"):
                layer.dispatch_recv(sent)
            with pytest.raises(ArgumentError, match="was refused"):
                layer.combine(rows, sent.desc)
            with pytest.raises(ArgumentError, match=r"\[0, 0\] on rank 1"):
                layer.dispatch(batch.given, wrong)
            call_pair(comm, layer, form, batch, None)

    pair.run(body)
