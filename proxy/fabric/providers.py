"""Chooses one of libfabric's offers for a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.proxy.fabric.library import FabricOffer
from proxyccl.proxy.remote_options import FabricOptions

# Providers for old programs or experiments, which are used only by name, or if there is no other.
_LAST_RESORT = frozenset({"udp", "sockets", "net"})


def choose_offer(offers: list[FabricOffer], options: FabricOptions, *, local_rank: int = 0) -> FabricOffer:
    """Chooses the first provider in libfabric's order that reaches other hosts, and one of its interfaces.

    Of interfaces with an IP address, the loopback's and link-local ones are skipped, and IPv4 is preferred. Ranks of a
    host are spread, by `local_rank`, over a provider's interfaces without IP addresses. Those with addresses lead to
    separate networks.

    Raises:
        ArgumentError: an option names something that does not exist; the message lists what exists.
        RuntimeUnavailableError: no provider reaches other hosts.
    """
    usable = offers
    if options.provider is not None:
        wanted = options.provider
        usable = [offer for offer in usable if wanted in (offer.provider, *offer.provider.split(";"))]
        if not usable:
            raise ArgumentError("provider", f"no provider {wanted!r}; there is {_listed(o.provider for o in offers)}")
    elif options.interface is None:
        usable = [offer for offer in usable if offer.remote]
    if options.interface is not None:
        matches = _interface_filter(options.interface)
        domains = _listed(offer.domain for offer in usable)
        usable = [offer for offer in usable if matches(offer.domain)]
        if not usable:
            raise ArgumentError("interface", f"{options.interface!r} is not one of {domains}")
    if options.signal == "ordered":
        usable = [offer for offer in usable if offer.ordered]
        if not usable:
            raise ArgumentError("signal", "no such provider keeps the order of writes; expected 'delivered' or 'auto'")
    usable = [offer for offer in usable if not _is_confined(offer)] or (
        usable if options.provider is not None or options.interface is not None else []
    )
    if not usable:
        raise RuntimeUnavailableError(f"no provider of libfabric reaches other hosts; there is {_listed(offers)}")
    best = min(usable, key=_remoteness)
    equals = [offer for offer in usable if offer.provider == best.provider and offer.address is None]
    return equals[local_rank % len(equals)] if best.address is None else best


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
