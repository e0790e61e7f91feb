"""`import proxyccl` loads each module only when a program first uses it."""

from __future__ import annotations

import subprocess
import sys

import proxyccl
from proxyccl.device.errors import ArgumentError


def loaded(program: str) -> set[str]:
    """Runs a program in a new interpreter, and returns the modules that it has loaded at its end."""
    program += "\nimport sys\nprint(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120).split())


def test_the_package_imports_none_of_its_parts() -> None:
    found = loaded("import proxyccl\nassert 'Communicator' in dir(proxyccl)")
    ours = {name for name in found if name.startswith("proxyccl.")}
    assert ours == {"proxyccl.channels", "proxyccl.channels.array_libraries"}
    assert not found & {"numpy", "msgspec", "mpi4py", "cffi", "dataclasses", "subprocess", "importlib.metadata"}


def test_a_communicator_imports_no_part_that_its_ranks_may_not_use() -> None:
    found = loaded("import proxyccl\nproxyccl.Communicator")
    unused = {"subprocess", "tempfile", "statistics", "secrets", "numpy.ma", "torch", "mpi4py.MPI"}
    unused |= {f"proxyccl.proxy.{name}" for name in ("verbs.devices", "verbs.endpoint", "fabric.library")}
    unused |= {"proxyccl.channels.expert_parallel", "proxyccl.channels.collectives.tuning", "proxyccl.device.host"}
    assert not found & unused


def test_a_command_imports_nothing_for_the_others() -> None:
    found = loaded("from proxyccl.__main__ import command_parser\ncommand_parser('')")
    assert not found & {"numpy", "msgspec", "proxyccl.proxy", "proxyccl.tools"}
    found = loaded("from proxyccl.__main__ import command_parser\ncommand_parser('tune')")
    assert not found & {"numpy", "proxyccl.tools.info", "proxyccl.tools.trace", "proxyccl.proxy.daemon"}


def test_commands_that_only_look_do_without_numpy_and_without_kernels() -> None:
    found = loaded("from proxyccl.tools import info, top\nimport proxyccl.device.host")
    assert not found & {"numpy", "proxyccl.device.kernel", "proxyccl.device.host.runtime", "proxyccl.proxy.daemon"}


def test_every_public_name_is_found_and_kept() -> None:
    assert sorted(proxyccl.__all__) == proxyccl.__all__
    for name in proxyccl.__all__:
        assert getattr(proxyccl, name) is vars(proxyccl)[name]
    assert proxyccl.ArgumentError is ArgumentError
    assert proxyccl.MemoryChannel is proxyccl.SmChannel
    assert proxyccl.PortChannel is proxyccl.ProxyChannel


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import proxyccl\nproxyccl.Comunicator"], capture_output=True, text=True, check=False
    )
    expected = "module 'proxyccl' has no attribute 'Comunicator'. Did you mean: 'Communicator'?"
    assert done.stderr.endswith(f"AttributeError: {expected}\n")
