"""Endpoints of libfabric's TCP provider on this host's loopback, and what connections over these endpoints can do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from proxyccl import ArgumentError, ClosedError, FabricOptions
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy.fabric.endpoint import ADDRESS, FabricContext, FabricEndpoint
from proxyccl.proxy.fabric.library import FabricOffer, choose_offers, fabric_offers
from proxyccl.proxy.hosts import is_running
from proxyccl.proxy.placement import NOWHERE
from proxyccl.proxy.registrations import RailRegistrations
from proxyccl.proxy.remote_options import RemoteSetup
from support.packages.fabric import environment
from support.transports import needs_fabric

pytestmark = [
    pytest.mark.host_only(reason="the provider reaches the CPU's memory"),
    pytest.mark.own_proxy(reason="opens endpoints itself"),
    needs_fabric,
]

SIGNAL_KEY = 1


@pytest.fixture
def tcp(library: str, monkeypatch: pytest.MonkeyPatch) -> FabricOffer:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return choose_offers(fabric_offers(), FabricOptions(provider="tcp", interface="=lo"))[0]


def test_the_programs_signal_handlers_stay(library: str) -> None:
    """Libraries that libfabric loads replace signal handlers, so ProxyCCL must restore the program's handlers."""
    program = """
import os, signal
from proxyccl.proxy.fabric.library import load
load()
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""
    env = environment() | {"PROXYCCL_LIBFABRIC": library}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.parametrize(("signal", "joined"), [("auto", True), ("ordered", False), ("delivered", False)])
def test_signals_join_data_that_tcp_brings(tcp: FabricOffer, signal: str, joined: bool) -> None:
    with closing(FabricEndpoint(tcp, FabricOptions(signal=signal))) as endpoint:
        assert endpoint.connect(endpoint.address, SIGNAL_KEY).joined == joined


def test_signals_join_no_data_for_a_peer_that_may_store_it_in_another_order(tcp: FabricOffer) -> None:
    with closing(FabricEndpoint(tcp, FabricOptions())) as endpoint:
        told = ADDRESS.decode(endpoint.address, "the peer")
        theirs = ADDRESS.encode(msgspec.structs.replace(told, in_order=False))
        assert told.in_order
        assert not endpoint.connect(theirs, SIGNAL_KEY).joined


def test_signals_join_no_data_where_a_write_takes_one_range(tcp: FabricOffer) -> None:
    with closing(FabricEndpoint(replace(tcp, parts=1), FabricOptions())) as endpoint:
        assert not endpoint.connect(endpoint.address, SIGNAL_KEY).joined


def test_an_endpoint_that_cant_register_the_segment_is_closed(tcp: FabricOffer) -> None:
    FabricEndpoint(tcp, FabricOptions()).close()  # some resources of the first endpoint stay until the process exits
    before = len(os.listdir("/proc/self/fd"))
    nothing = cast(PinnedMemory, SimpleNamespace(host_ptr=4096, nbytes=0))
    setup = RemoteSetup(HostRuntime(), nothing, range(0), near=NOWHERE, local_rank=0, core_share=1)
    with pytest.raises(ArgumentError):
        FabricContext(setup, FabricOptions(provider="tcp", interface="=lo"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_has_a_key_for_each_interface(tcp: FabricOffer) -> None:
    memory = np.zeros(100, np.uint8)
    made = [FabricEndpoint(tcp, FabricOptions(), interfaces=2) for _ in range(2)]
    with closing(made[0]), closing(made[1]), closing(RailRegistrations(made)) as registrations:
        keys = registrations.register(memory.ctypes.data, memory.nbytes).keys
        assert keys == tuple(endpoint.register(memory.ctypes.data, memory.nbytes).key for endpoint in made)


def test_an_endpoint_for_a_peer_is_opened_again_at_its_address(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    (offer,) = choose_offers(fabric_offers(), FabricOptions(provider="net", interface="=lo"))
    assert offer.recovers
    with (
        closing(FabricEndpoint(offer, FabricOptions(), interfaces=2)) as rank,
        closing(rank.peer_endpoint()) as own,
        closing(rank.peer_endpoint()) as peer,
    ):
        address, options = own.address, own.connect(peer.address, SIGNAL_KEY)
        assert own.stop()
        with pytest.raises(ClosedError):
            own.address  # noqa: B018  the property raises
        assert own.stop(), "a second call finds the endpoint closed"
        assert own.reconnect(1)
        assert own.address == address
        assert options.endpoint == own.parts.endpoint != 0
        monkeypatch.setattr(rank, "is_running", lambda: False)
        assert own.stop()
        assert not own.reconnect(2), "the interface is down"


def test_an_interface_that_is_missing_does_not_run() -> None:
    assert is_running("lo")
    assert not is_running("nothing0")
