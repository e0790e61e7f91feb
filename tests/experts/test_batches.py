"""Between nodes, one message carries the rows of several consecutive segments (parts of a rank's tokens)."""

from __future__ import annotations

import pytest

from proxyccl import Communicator
from proxyccl.channels.expert_parallel import geometry
from proxyccl.channels.expert_parallel.members import Nodes
from proxyccl.device.host.runtime import HostRuntime
from proxyccl.device.runtime import Runtime
from support.cases.expert_layer import Case, check, combine_of, dispatch_of, plan_of
from support.devices import ON_HOST, rank_runtime
from support.running import run_ranks

BLOCKS = 6


def runtime_with_segments(rank: int) -> Runtime:
    return HostRuntime(blocks=BLOCKS) if ON_HOST else rank_runtime(rank)


@pytest.mark.parametrize("copied", [False, True], ids=["", "lengthened"])
@pytest.mark.parametrize("batch_tokens", [1, 5, 1000])
def test_rows_arrive_in_any_number_of_batches(monkeypatch: pytest.MonkeyPatch, batch_tokens: int, copied: bool) -> None:
    monkeypatch.setattr(geometry, "BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(Nodes, "copied", lambda *_: copied)
    plan = plan_of(Case((25, 0, 14, 9), local_world_size=2, num_sm=BLOCKS))
    run_ranks(4, lambda comm: check(comm, plan), local_world_size=2, make_runtime=runtime_with_segments)


@pytest.mark.parametrize("batch_tokens", [1000, 12, 1])
def test_few_tokens_take_one_message_and_their_routing_another(
    monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    monkeypatch.setattr(geometry, "BATCH_TOKENS", batch_tokens)
    # No message may be lengthened, because that would change the number of messages.
    monkeypatch.setattr(Nodes, "copied", lambda *_: False)
    tokens = 24
    plan = plan_of(Case((tokens, tokens), local_world_size=1, num_sm=BLOCKS))

    def body(comm: Communicator) -> None:
        def messages() -> int:
            comm.synchronize()
            comm.group.exchange.barrier("all messages have arrived")
            return sum(comm.proxy.counters(channel).triggers for channel in range(64))

        with plan.case.layer(comm, max_recv_tokens=plan.most_rows) as layer:
            batches = min(max(1, tokens // batch_tokens), layer.ctx.blocks)
            before = messages()
            rows, _, desc = dispatch_of(layer, plan, comm)
            dispatched = messages()
            assert dispatched - before == 1 + batches
            combine_of(layer, plan, rows, desc)
            assert messages() - dispatched == batches

    run_ranks(2, body, local_world_size=1, make_runtime=runtime_with_segments)
