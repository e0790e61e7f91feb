"""all_gather and all_to_all of short shares, which GPUs send in packets by default."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from proxyccl import Communicator, Runtime
from proxyccl.channels.collectives.packet_team import PacketLaunch, PacketTeam
from proxyccl.channels.collectives.request import CtaPolicy
from support.cases.reference import Call
from support.devices import runtime_with_blocks
from support.running import run_ranks

SHAPES = (("uint8", 1), ("int32", 17), ("int32", 301), ("uint8", 603), ("float64", 50_000))
"""The last share takes several epochs."""


def runtime_with_packets(rank: int) -> Runtime:
    """Returns a runtime that sends shares of up to 200 bytes in packets, and longer shares in lines."""
    runtime = runtime_with_blocks(rank)
    runtime.launch_defaults = replace(  # type: ignore[misc]
        runtime.launch_defaults, line_move_bytes=1 << 20, line_bytes=200
    )
    return runtime


@pytest.mark.host_only(reason="GPUs move short shares so without being told")
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_short_shares_arrive_in_packets(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are in place and out of place, with empty shares and with shares that fill no whole packets."""
    in_lines: list[bool] = []
    move = PacketTeam.move

    def record(self: PacketTeam, share: int, policy: CtaPolicy) -> PacketLaunch:
        launch = move(self, share, policy)
        in_lines.append(launch.lines)
        return launch

    monkeypatch.setattr(PacketTeam, "move", record)

    def body(comm: Communicator) -> None:
        for i, (dtype, count) in enumerate((("float32", 0), *SHAPES)):
            for in_place in (False, True):
                Call(collective, dtype, "sum", None, count, i % 4, in_place).start(comm).finish()

    run_ranks(3, body, make_runtime=runtime_with_packets)
    assert len(in_lines) >= 3 * 2 * len(SHAPES)
    assert set(in_lines) == {False, True}
