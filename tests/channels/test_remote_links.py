"""A rank makes remote endpoints only for peers with which it exchanges data."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from proxyccl import ResourceError, RuntimeUnavailableError, ThreadBootstrap
from proxyccl.channels.joining.exchange import Exchange
from proxyccl.channels.remote import RemoteLinks
from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.remote_options import TransportOptions
from support.running import TIMEOUT

RANKS = 4


class Context:
    """A `RemoteContext` that records the peers for which it makes endpoints. All peers except the last share one
    endpoint, as peers do under libfabric.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[int] = []
        self.connected: dict[int, bytes] = {}
        self.full = False

    def unsupported_reason(self, _: str) -> str:
        return ""

    def make_endpoint(self, peer: int, _: str) -> EndpointInfo:
        if self.full:
            raise ResourceError("no room")
        self.made.append(peer)
        return EndpointInfo(f"{self.rank}{'-' if peer == RANKS - 1 else ''}".encode(), 0, 0)

    def connect_endpoint(self, peer: int, theirs: EndpointInfo, _: float) -> None:
        assert peer not in self.connected
        self.connected[peer] = theirs.endpoint


def on_all_ranks(body: Callable[[RemoteLinks, Context], object]) -> list[Any]:
    bootstraps = ThreadBootstrap.create(RANKS)

    def rank_body(rank: int) -> object:
        context = Context(rank)
        meeting: Any = SimpleNamespace(
            runtime=SimpleNamespace(pci_address=None),
            control=SimpleNamespace(semaphore_offset=lambda _: 0, semaphores_bytes=8),
            exchange=Exchange(bootstraps[rank], TIMEOUT),
            topology=SimpleNamespace(same_host=lambda _: False),
            options=SimpleNamespace(transports=TransportOptions()),
        )
        proxy: Any = SimpleNamespace(open_remote=lambda *_, **__: context)
        links = RemoteLinks(meeting, lambda: proxy, core_share=1)
        transports = {peer: "copy" if peer // 2 == rank // 2 else "fabric" for peer in range(RANKS) if peer != rank}
        links.probe(transports)
        links.by_peer = transports
        return body(links, context)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(rank_body, range(RANKS)))


def test_endpoints_are_made_for_the_peers_that_are_used() -> None:
    def body(links: RemoteLinks, context: Context) -> tuple[list[int], dict[int, bytes]]:
        links.connect_endpoints([])
        assert context.made == []
        links.connect_endpoints([(context.rank + 2) % RANKS, context.rank ^ 1])
        links.connect_endpoints([(context.rank + 2) % RANKS])  # once
        return context.made, context.connected

    assert on_all_ranks(body) == [([2], {2: b"2"}), ([3], {3: b"3"}), ([0], {0: b"0"}), ([1], {1: b"1-"})]


def test_a_rank_that_another_one_uses_makes_an_endpoint_too() -> None:
    def body(links: RemoteLinks, context: Context) -> list[int]:
        links.connect_endpoints([2, 3] if context.rank == 0 else [])
        return context.made

    assert on_all_ranks(body) == [[2, 3], [], [0], [0]]


def test_all_ranks_hear_that_one_has_no_room_and_may_try_again() -> None:
    def body(links: RemoteLinks, context: Context) -> dict[int, bytes]:
        context.full = context.rank == 3
        peers = [(context.rank + 2) % RANKS]
        with pytest.raises(ResourceError if context.full else RuntimeUnavailableError, match="no room"):
            links.connect_endpoints(peers)
        context.full = False
        links.connect_endpoints(peers)
        return context.connected

    assert [sorted(connected) for connected in on_all_ranks(body)] == [[2], [3], [0], [1]]
