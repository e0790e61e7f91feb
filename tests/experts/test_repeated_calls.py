"""Calls of a layer like earlier ones, in all their forms: made without most checks, with the same results."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from proxyccl import Communicator, EPAll2AllLayer  # noqa: E402
from proxyccl.channels.expert_parallel.combine_call import CombineCall  # noqa: E402
from proxyccl.channels.expert_parallel.context import DispatchCombineContext  # noqa: E402
from proxyccl.channels.expert_parallel.dispatch_call import DispatchCall  # noqa: E402
from proxyccl.channels.expert_parallel.repeated_call import RepeatedCall  # noqa: E402
from proxyccl.device.errors import ArgumentError  # noqa: E402
from support.devices import RUNTIME, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402

TOKENS, HIDDEN, TOPK, EXPERTS = 8, 256, 2, 4


@dataclass(frozen=True)
class Form:
    """A form of calls.

    Attributes:
        options: of the layer.
        pair: whether tokens are pairs of float8 rows and scales.
        halves: whether calls are made in two halves.
        own_stream: whether they are given a stream.
        records: whether torch records them.
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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of calls that were made in full."""
    names: list[str] = []

    def note(kind: type, method: str) -> None:
        start = getattr(kind, method)

        def noted(call: Any, *arguments: Any, **options: Any) -> Any:
            names.append(f"{kind.__name__}.{method}")
            return start(call, *arguments, **options)

        monkeypatch.setattr(kind, method, noted)

    note(DispatchCall, "__init__")
    note(CombineCall, "__init__")
    note(DispatchCombineContext, "repeat")
    return names


class Batch:
    """A rank's tokens: whole numbers, of which float8 rows with scales of 2 are exact."""

    def __init__(self, comm: Communicator, form: Form, turn: int) -> None:
        generator, device = torch.Generator().manual_seed(2 * turn + comm.rank), torch_device(comm)
        tokens = TOKENS - 3 * (turn % 2)
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
        """How many rows each token has."""
        if layer.layout != "rank":
            return TOPK
        return torch.stack([(self.ids // 2 == rank).any(1) for rank in range(2)]).sum(0).unsqueeze(1)


def plain(rows: Any) -> Any:
    """Rows as bfloat16: the experts add nothing."""
    if not isinstance(rows, tuple):
        return rows
    values, scales = rows
    groups = values.float().view(*values.shape[:-1], scales.shape[-1], -1) * scales.unsqueeze(-1)
    return groups.view(values.shape).to(torch.bfloat16)


def call_pair(comm: Communicator, layer: EPAll2AllLayer, form: Form, batch: Batch, stream: Any) -> None:
    """A dispatch, a redispatch and a combine."""
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
        else:
            filled = torch.arange(len(results)) < count
        assert torch.equal(plain(again)[filled], results[filled])
        assert torch.equal(combined, expected)
        assert layer.layout == "rank" or bool((weights[filled] > 0).all())
    if form.records:
        combined.backward(torch.ones_like(combined))
        assert torch.equal(x.grad, batch.times(layer) * torch.ones_like(x))


@pytest.mark.parametrize("name", FORMS)
def test_later_calls_of_a_form_are_repeated(pair: Ranks, made: list[str], name: str) -> None:
    form = FORMS[name]

    def body(comm: Communicator) -> list[str]:
        sizes = (TOKENS, HIDDEN, TOPK, comm.rank, EXPERTS, comm.local_world_size, comm.world_size)
        stream = comm.runtime.create_stream() if form.own_stream else None
        with EPAll2AllLayer(comm, *sizes, **form.options) as layer:
            for turn in range(4):
                call_pair(comm, layer, form, Batch(comm, form, turn), stream)
                comm.barrier()
                if turn == 0:
                    made.clear()
                comm.barrier()
        return list(made)

    assert pair.run(body) == [[], []]


@pytest.mark.parametrize("name", ["exact", "fixed", "float8", "float8 halves", "padded halves", "buffers"])
def test_on_the_stream_where_torch_works_c_alone_issues_them(
    monkeypatch: pytest.MonkeyPatch, pair: Ranks, name: str
) -> None:
    form, given, queued = FORMS[name], RepeatedCall.issuer, []
    if RUNTIME != "host":
        pytest.skip("pretends that the host runtime's stream is torch's")

    def issuer(call: RepeatedCall) -> tuple[Any, ...]:
        """The same as on a GPU, whose current stream is the one of calls without a stream."""
        calls, _, _, kind, stream_of, queue, _, number = given(call)
        handle = call._group.launches.default_stream.handle

        def note(*arguments: Any) -> None:
            queued.append(arguments)
            queue(*arguments)

        return calls, False, lambda _: handle, kind, stream_of, note, 0, number

    monkeypatch.setattr(RepeatedCall, "issuer", issuer)

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


def test_what_the_halves_of_repeated_calls_refuse(pair: Ranks) -> None:
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
