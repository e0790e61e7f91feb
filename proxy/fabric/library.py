"""Loads libfabric at run time, lists the endpoints that its providers offer, and chooses an endpoint for a rank. No
other module loads libfabric.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import itertools
import os
import platform
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.requirements import INSTALL, library_name
from proxyccl.proxy.placement import NOWHERE, SYSFS, Nearness, NearnessTo, Place, nearest
from proxyccl.proxy.remote_options import FabricOptions

ffi, lib = _engine.ffi, _engine.lib

_FUNCTIONS = ("fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric")
_FLAGS = ("ordered", "reads", "remote", "device_memory", "virtual_keys", "provider_keys")
_NUMBERS = ("address_format", "parts", "key_bytes", "depth", "max_message")
"""Fields that a FabricOffer copies from the engine's ProxycclFabricOffer."""
_SIGACTION_BYTES = 256  # at least the size of C's struct sigaction
_NO_DATA = 61
"""FI_ENODATA, libfabric's error if no provider has a matching offer."""
_EXHAUSTED = (12, 24)
"""FI_ENOMEM and FI_EMFILE."""
_STREAMS = frozenset({"tcp", "net"})
"""Providers that send messages over a byte stream and store the received data in the stream's order."""
_LAST_RESORT = frozenset({"udp", "sockets", "net"})
"""Providers for old programs or experiments, which are used only if the user names one, or if there is no other
provider.
"""
_ORDERED_STORES = frozenset({"x86_64", "AMD64"})
"""CPUs whose stores other cores see in program order. With other CPUs, a core may see a message's end before its
beginning.
"""
# libfabric's address formats (rdma/fabric.h) that contain an IP address.
_SOCKADDR_IN, _SOCKADDR_IN6 = 2, 3
_IPV4, _IPV6 = slice(4, 8), slice(8, 24)


@contextlib.contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """A context manager for code that loads libraries; restores the process's signal handlers at the end.

    PSM's libraries, which some builds of libfabric load, replace the handlers of SIGINT, SIGTERM and fault signals with
    a handler that ends the process.
    """
    sigaction = ctypes.CDLL(None).sigaction

    def actions() -> dict[int, bytes]:
        found = {}
        for number in signal.valid_signals():
            action = ctypes.create_string_buffer(_SIGACTION_BYTES)
            if sigaction(int(number), None, action) == 0:
                found[int(number)] = action.raw
        return found

    before = actions()
    try:
        yield
    finally:
        for number, action in actions().items():
            if action != before[number]:
                sigaction(number, before[number], None)


class Library:
    """libfabric, loaded into this process.

    Attributes:
        functions: a ProxycclFabricLibrary with the addresses of the library's functions.
        version: the library's version, such as "1.17".

    Raises:
        RuntimeUnavailableError: the library can't be loaded; the message says what to install.
    """

    def __init__(self, name: str) -> None:
        try:
            with keeping_signal_handlers():
                loaded = ctypes.CDLL(name)
        except OSError as error:
            raise RuntimeUnavailableError(f"libfabric can't be loaded ({error}): {INSTALL}") from None
        self.functions = ffi.new("ProxycclFabricLibrary *")
        for function in _FUNCTIONS:
            setattr(self.functions, function, ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value)
        loaded.fi_strerror.restype = ctypes.c_char_p
        self._strerror = loaded.fi_strerror
        loaded.fi_version.restype = ctypes.c_uint32
        number = loaded.fi_version()
        self.version = f"{number >> 16}.{number & 0xFFFF}"

    def words(self, error: int) -> str:
        return str(self._strerror(error).decode())

    def check(self, call: str, subject: str, error: int) -> None:
        """Raises an exception if `error` is not 0: ResourceError if memory or descriptors ran out, otherwise
        RuntimeUnavailableError.
        """
        if error:
            kind = ResourceError if error in _EXHAUSTED else RuntimeUnavailableError
            raise kind(f"{call} of {subject}: {self.words(error)} (error {error})")


@functools.cache
def load() -> Library:
    """Loads libfabric at the first call, and returns it. The library is the file that ``PROXYCCL_LIBFABRIC`` names,
    otherwise the libfabric that MPI has loaded, otherwise the system's libfabric. Raises RuntimeUnavailableError if
    libfabric can't be loaded.
    """
    return Library(library_name())


@dataclass(frozen=True)
class FabricOffer:
    """A kind of endpoint that a provider of libfabric offers, on one interface.

    Attributes:
        provider: the provider's name, including the names of providers below it, such as "tcp;ofi_rxm".
        domain: the provider's name for the interface or device.
        address: the endpoint's IP address if known in advance; otherwise None.
        address_format: libfabric's number for the format of addresses.
        ordered: whether an endpoint's writes reach a peer's memory in order.
        parts: the most memory ranges that one write may read from or write to.
        reads: whether an endpoint can also read peers' memory, for gets.
        remote: whether an endpoint reaches other hosts.
        device_memory: whether an endpoint can access GPUs' memory; False if the offers were requested without it.
        virtual_keys: whether requests name a peer's registered memory by address; if not, by offset from the memory's
            start.
        provider_keys: whether the provider chooses the keys of registered memory; if not, this rank chooses them.
        key_bytes: length of a key in bytes.
        depth: most outstanding writes.
        max_message: most bytes of one write; if `ordered`, most bytes of a write that keeps the order.
        rate: the link's rate in Gbit/s; 0 if unknown.
        source: the list that contains the offer (a ProxycclFabricOffers), and the offer's index in it.
    """

    provider: str
    domain: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
    address_format: int
    ordered: bool
    parts: int
    reads: bool
    remote: bool
    device_memory: bool
    virtual_keys: bool
    provider_keys: bool
    key_bytes: int
    depth: int
    max_message: int
    rate: float
    source: tuple[Any, int]

    @property
    def kind(self) -> tuple[str, int]:
        """The provider and the format of addresses, which two connected ranks must have in common."""
        return self.provider, self.address_format

    @property
    def in_order(self) -> bool:
        """Whether the bytes of one write reach this host's memory in order. libfabric has a flag for this order
        (FI_ORDER_DATA), but hardly any provider sets the flag.
        """
        return self.is_stream and platform.machine() in _ORDERED_STORES

    @property
    def is_stream(self) -> bool:
        """Whether an endpoint sends data to a peer over one byte stream, whose speed is limited by one core."""
        return not _STREAMS.isdisjoint(self.provider.split(";"))

    @property
    def recovers(self) -> bool:
        """Whether each peer has its own endpoint if the rank has several interfaces, so that a connection goes on after
        an interface has failed. With "ofi_rxm" between the provider and libfabric, an endpoint takes 70 MB.
        """
        return self.is_stream and self.reads and "ofi_rxm" not in self.provider.split(";")

    @property
    def facts(self) -> str:
        """A text that describes the offer, without the provider's name."""
        facts = [self.domain, *([str(self.address)] if self.address is not None else [])]
        facts.append("ordered writes" if self.ordered else "unordered writes")
        if self.rate:
            facts.append(f"{self.rate:g} Gbit/s")
        if self.device_memory:
            facts.append("GPUs' memory")
        if not self.reads:
            facts.append("no reads")
        if not self.remote:
            facts.append("this host alone")
        return ", ".join(facts)

    def __str__(self) -> str:
        return f"{self.provider} on {self.facts}"


def fabric_offers(*, device_memory: bool = False) -> list[FabricOffer]:
    """Returns the endpoints that providers offer, in libfabric's order of preference. All offered endpoints can write
    to peers' memory. Some endpoints can also read peers' memory or, with `device_memory`, access GPU memory.

    Raises:
        ResourceError: out of memory.
        RuntimeUnavailableError: libfabric can't be used.
    """
    # Some providers offer ordered writes, reads or access to GPUs only on request.
    memories = (True, False) if device_memory else (False,)
    demands = itertools.product(memories, (True, False), (True, False))
    return best_of([list(_ask(ordered=order, reads=reads, device_memory=memory)) for memory, order, reads in demands])


def best_of(answers: list[list[FabricOffer]]) -> list[FabricOffer]:
    """Merges libfabric's answers to requests, of which each asks for fewer features than the previous request. Each
    offer is taken from the first answer that contains the offer. The result has the order of the last answer. The last
    request asks for no optional features, so this order is libfabric's order of preference.
    """
    best: dict[tuple[str, str, object, int], FabricOffer] = {}
    for answer in reversed(answers):
        first: dict[tuple[str, str, object, int], FabricOffer] = {}
        for offer in answer:
            first.setdefault((offer.provider, offer.domain, offer.address, offer.address_format), offer)
        best.update(first)
    return list(best.values())


def _ask(*, ordered: bool, reads: bool, device_memory: bool) -> Iterator[FabricOffer]:
    library = load()
    made = ffi.new("ProxycclFabricOffers **")
    error = lib.proxyccl_fabric_offers(library.functions, ordered, reads, device_memory, made)
    if error == _NO_DATA:
        return
    library.check("fi_getinfo", "all providers", error)
    offers = ffi.gc(made[0], lib.proxyccl_fabric_offers_free)
    native = ffi.new("ProxycclFabricOffer *")
    number = 0
    while lib.proxyccl_fabric_offer(offers, number, native):
        source = bytes(ffi.buffer(native.source, native.source_bytes)) if native.source else b""
        yield FabricOffer(
            provider=_text(native.provider),
            domain=_text(native.domain),
            address=_ip_address(native.address_format, source),
            rate=native.bits_per_second / 1e9,
            source=(offers, number),
            **{name: bool(getattr(native, name)) for name in _FLAGS},
            **{name: getattr(native, name) for name in _NUMBERS},
        )
        number += 1


def _text(chars: Any) -> str:
    return ffi.string(chars).decode() if chars else ""


def _ip_address(address_format: int, raw: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    match int.from_bytes(raw[:2], "little") if address_format <= _SOCKADDR_IN6 else 0:
        case socket.AF_INET:
            return ipaddress.IPv4Address(raw[_IPV4])
        case socket.AF_INET6:
            return ipaddress.IPv6Address(raw[_IPV6])
    return None


def choose_offers(
    offers: list[FabricOffer],
    options: FabricOptions,
    near: Place = NOWHERE,
    *,
    local_rank: int = 0,
    root: Path = SYSFS,
    first_address: bool = False,
) -> list[FabricOffer]:
    """Returns the offers of a rank's interfaces: of the `options.interfaces`, the `options.rails` that are nearest
    to the rank's place `near`, in the order of their names; without `interfaces`, one offer. Each is an offer of the
    first provider, in libfabric's order, that reaches other hosts.

    Skips interfaces with loopback or link-local addresses, and prefers IPv4 to IPv6. If the provider's interfaces have
    no IP addresses, chooses among the interfaces that are nearest to `near`, over which `local_rank` distributes the
    ranks of a host. With `first_address`, if the interfaces have IP addresses, returns the first `options.rails` of
    them: interfaces with IP addresses may belong to separate networks. Distances are read from sysfs, which is mounted
    at `root`.

    Raises:
        ArgumentError: no provider or interface matches the options; the message names the option.
        RuntimeUnavailableError: no provider reaches other hosts.
    """
    nearness = NearnessTo(near, root)

    def distance(offer: FabricOffer) -> Nearness:
        return nearness.adapter(adapter_of(offer.domain, root))

    option, names = ("interfaces", options.interfaces) if options.interfaces else ("interface", (options.interface,))
    chosen = [nearest(_usable(offers, options, option, name), distance, 1, local_rank)[0] for name in names]
    if len({offer.domain for offer in chosen}) < len(chosen) or len({offer.kind for offer in chosen}) > 1:
        raise ArgumentError("interfaces", f"must name different interfaces of one provider, not {_listed(chosen)}")
    if first_address and chosen[0].address is not None:
        return chosen[: options.rails]
    return nearest(chosen, distance, options.rails, local_rank)


def _usable(offers: list[FabricOffer], options: FabricOptions, option: str, text: str | None) -> list[FabricOffer]:
    """Returns the offers of the best provider that the options allow, or one offer if the offers have IP addresses.
    `text` is the value of the option `option`, or one of its names; None for all interfaces.
    """
    usable = offers
    if options.provider is not None:
        wanted = options.provider
        usable = [offer for offer in usable if wanted in (offer.provider, *offer.provider.split(";"))]
        if not usable:
            raise ArgumentError("provider", f"no provider {wanted!r}; there is {_listed(o.provider for o in offers)}")
    elif text is None:
        usable = [offer for offer in usable if offer.remote]
    if text is not None:
        domains = [offer.domain for offer in usable]
        matches = _interface_filter(f"={text}" if option == "interfaces" and text in domains else text)
        usable = [offer for offer in usable if matches(offer.domain)]
        if not usable:
            raise ArgumentError(option, f"{text!r} is not one of {_listed(domains)}")
    if options.signal == "ordered":
        usable = [offer for offer in usable if offer.ordered]
        if not usable:
            raise ArgumentError("signal", "no such provider keeps the order of writes; expected 'delivered' or 'auto'")
    usable = [offer for offer in usable if not _is_confined(offer)] or (
        usable if options.provider is not None or text is not None else []
    )
    if not usable:
        raise RuntimeUnavailableError(f"no provider of libfabric reaches other hosts; there is {_listed(offers)}")
    best = min(usable, key=_remoteness)
    if best.address is not None:
        return [best]
    return [offer for offer in usable if offer.provider == best.provider and offer.address is None]


def adapter_of(domain: str, root: Path = SYSFS) -> Path:
    """Returns the directory in sysfs of the adapter for which a domain is named: of the RDMA device "rdmap79s0" for
    "rdmap79s0-rdm", or of the network interface "eth0" for "eth0".
    """
    adapters = root / "class/infiniband"
    names = os.listdir(adapters) if adapters.is_dir() else []
    name = max((name for name in names if domain.startswith(name)), key=len, default=None)
    return root / "class/net" / domain if name is None else adapters / name


def _is_confined(offer: FabricOffer) -> bool:
    return offer.address is not None and (offer.address.is_loopback or offer.address.is_link_local)


def _remoteness(offer: FabricOffer) -> tuple[bool, bool]:
    return (
        not _LAST_RESORT.isdisjoint(offer.provider.split(";")),
        offer.address is not None and offer.address.version == 6,
    )


def _interface_filter(text: str) -> Callable[[str], bool]:
    excluded, whole = text.startswith("^"), text.removeprefix("^").startswith("=")
    names = tuple(name for name in text.lstrip("=^").split(",") if name)
    return lambda domain: excluded != (domain in names if whole else domain.startswith(names))


def _listed(things: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, things))) or "none"
