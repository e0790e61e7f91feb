"""Links the device headers' functions into Numba's kernels, for devices that this machine need not have."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, int64, types

import proxyccl.numba as pn
from proxyccl import ArgumentError, Communicator
from support.kernels import numba as kernels
from support.running import run_ranks

pytestmark = pytest.mark.host_only(reason="needs only a compiler")

SIGNATURE = (int64, int64, int64, types.Array(types.int32, 1, "C"))


def linked(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kind: str) -> bytes:
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    (own, ours), _ = cuda.compile_all(
        kernels.everything, SIGNATURE, device=False, abi="numba", cc=capability, output="ltoir"
    )
    options = LinkerOptions(
        arch="sm_{}{}".format(*capability), link_time_optimization=True, ptx=True if kind == "ptx" else None
    )
    return bytes(Linker(ObjectCode.from_ltoir(own), ObjectCode.from_ltoir(ours.data), options=options).link(kind).code)


@pytest.mark.parametrize(
    ("capability", "push"),
    [
        ((8, 0), r"st\.relaxed\.sys\.b64.*\n(?:.*\n){0,3}?.*st\.release\.sys\.b64"),
        ((9, 0), r"st\.relaxed\.sys\.global\.b128 \["),
    ],
    ids=["sm_80", "sm_90"],
)
def test_the_functions_are_inlined(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], push: str) -> None:
    ptx = linked(monkeypatch, capability, "ptx").rstrip(b"\0").decode()
    assert len(re.findall(r"^\.visible \.entry \w*everything", ptx, re.MULTILINE)) == 1
    assert ".extern .func" not in ptx
    assert not re.findall(r"\bproxyccl_(?!default_control)\w+", ptx)
    assert len(re.findall(push, ptx)) == 8  # two functions push one trigger each, three push up to two each
    assert len(re.findall(r"ld\.acquire\.sys\.b64", ptx)) >= 5  # each wait polls with an acquire load


def test_a_kernel_links_to_a_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linked(monkeypatch, (9, 0), "cubin").startswith(b"\x7fELF")


def test_only_proxy_channels_have_an_address() -> None:
    with pytest.raises(ArgumentError, match="channels: expected a ProxyChannel or a set of them, not 5"):
        pn.address(5)  # type: ignore[arg-type]

    def body(comm: Communicator) -> None:
        memory = comm.empty(4, "int32")
        with pytest.raises(ArgumentError, match="channels: expected a ProxyChannel"):
            pn.address(comm.sm_channels(memory))  # type: ignore[arg-type]
        assert pn.address(comm.proxy_channels(memory)) == 0  # this rank has no peers, so there is no channel

    run_ranks(1, body)
