"""Behaviour that only the HIP runtime has: errors where ROCm or hip-python is missing, and calls that only HIP has.

HIP's calls go through hip-python to a test library that forwards them to the host runtime (support/hip).
`make test-hip` runs the tests of all runtimes on the test library. Each test starts a process, because hip-python loads
the library only once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.once import run_make
from support.paths import ROOT

pytestmark = pytest.mark.slow

ROCM = ROOT / "build/rocm-on-host"


@pytest.fixture(scope="module", autouse=True)
def _forwarding_libraries() -> None:
    run_make("rocm-on-host")


def run(body: str, **env: str) -> str:
    """Runs a program on the HIP runtime, and returns its output."""
    program = (
        f"from proxyccl.device.runtimes import open_driver, open_runtime\nfrom proxyccl.device.errors import *\n{body}"
    )
    environment = {**os.environ, "ROCM_PATH": str(ROCM), **env}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
try:
    open_runtime("hip")
except RuntimeUnavailableError as error:
    print(error)
"""


def test_without_hip_python_the_message_says_what_to_install() -> None:
    out = run("import sys\nsys.modules['hip'] = None\n" + REFUSED)
    assert out.startswith("hip: its Python package is missing")
    assert "pip install 'proxyccl[hip]'" in out


def test_without_rocm_the_message_says_so(tmp_path: Path) -> None:
    out = run(REFUSED, ROCM_PATH=str(tmp_path))
    assert out.startswith("hip: ROCm's runtime library can't be loaded")
    assert "libamdhip64.so" in out


def test_without_the_compiler_the_message_says_so(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libamdhip64.so").symlink_to(ROCM / "lib/libamdhip64.so")
    out = run(REFUSED, ROCM_PATH=str(tmp_path))
    assert out.startswith("hip: ROCm's run-time compiler can't be loaded")
    assert "libhiprtc.so" in out


def test_without_a_device_the_message_says_so() -> None:
    assert run(REFUSED, HIP_ON_HOST_DEVICES="0").startswith("hip: ROCm sees no device")


def test_a_driver_older_than_the_runtime_is_refused() -> None:
    out = run(REFUSED, HIP_ON_HOST_DRIVER_VERSION="60243480")
    assert out.startswith("hip: the driver supports HIP 6.2 and is older than the runtime, 6.4")


def test_devices_are_told_apart_and_described() -> None:
    out = run(
        """
for device in (0, 1):
    runtime = open_runtime("hip", device)
    print(runtime.device_id, runtime.describe())
try:
    open_runtime("hip", 2)
except ArgumentError as error:
    print(error)
""",
        HIP_ON_HOST_DEVICES="2",
    )
    first, second, refused = out.splitlines()
    assert first.split()[0] != second.split()[0]
    assert "CPU as HIP device 1, gfx942, 2 multiprocessors, 16 GiB, HIP 6.4" in second
    assert refused == "device: 2 is not one of the 2 hip devices, 0 to 1"


def test_the_device_that_was_current_is_current_again() -> None:
    out = run("""
driver = open_driver("hip")
here, there = open_runtime("hip", 0), open_runtime("hip", 3)
here.activate()
memory = there.allocate(64)
print(driver.current(), there.pointer_device(memory.ptr), there.pointer_device(id(memory)))
there.activate()
print(driver.current_device())
""")
    assert out == "0 3 None\n3"


def test_memory_has_an_owner_an_extent_and_a_number() -> None:
    out = run("""
driver = open_driver("hip")
runtime = open_runtime("hip")
memory = runtime.allocate(5000)
base, size = driver.address_range(memory.ptr + 4000)
print(base == memory.ptr, size >= 5000)
first, other = driver.allocation_id(memory.ptr), runtime.allocate(5000)
print(first == driver.allocation_id(memory.ptr + 1), first != driver.allocation_id(other.ptr))
address = memory.ptr
memory.close()
try:
    driver.address_range(address)
except DriverError as error:
    print(error)
try:
    runtime.allocate(1 << 40)
except ResourceError as error:
    print(error)
""")
    lines = out.splitlines()
    assert lines[:2] == ["True True", "True True"]
    assert lines[2] == "hipMemGetAddressRange: hipErrorNotFound, named symbol not found (status 500)"
    assert lines[3].startswith("can't allocate 1099511627776 bytes on hip device 0")


def test_memory_of_another_process_is_mapped() -> None:
    out = run(
        """
import subprocess, sys
import numpy as np
runtime = open_runtime("hip")
mine, copied = runtime.allocate(4096), np.zeros(2, np.int64)
handle = runtime.export(mine.ptr + 8, 16)
theirs = '''
from proxyccl.device.runtimes import open_runtime
import numpy as np
runtime = open_runtime("hip", 1)
memory, values = runtime.open(bytes.fromhex("%s")), np.array([7, 8])
runtime.copy(memory.ptr, values.ctypes.data, memory.nbytes)
memory.close()
''' % handle.hex()
subprocess.run([sys.executable, "-c", theirs], check=True, timeout=120)
runtime.copy(copied.ctypes.data, mine.ptr + 8, 16)
print(copied.tolist())
mine.close()
damaged = bytearray(handle)
damaged[8:24] = bytes(16)  # another process's, so it has to be opened
try:
    runtime.open(bytes(damaged))
except ArgumentError as error:
    print(error)
"""
    )
    values, refused = out.splitlines()
    assert values == "[7, 8]"
    assert refused.startswith("handle: the memory can't be mapped: hipIpcOpenMemHandle")


def test_what_the_compiler_says_is_told() -> None:
    out = run("""
runtime = open_runtime("hip")
try:
    runtime.compile('extern "C" __global__ void broken(int* p) { *p = missing; }')
except CompileError as error:
    print("missing" in error.log, str(error).splitlines()[0])
""")
    assert out == "True HIPRTC could not compile the kernel source"


def test_a_capture_mode_is_exchanged_and_given_back() -> None:
    out = run("""
driver = open_driver("hip")
print(driver.relax_capture(), driver.relax_capture(0), driver.relax_capture(0))
try:
    driver.relax_capture(7)
except DriverError as error:
    print(error)
""")
    assert out.splitlines() == [
        "0 2 0",
        "hipThreadExchangeStreamCaptureMode: hipErrorInvalidValue, invalid argument (status 1)",
    ]


def test_a_proxys_streams_have_the_highest_priority_and_a_programs_the_default() -> None:
    out = run("""
from hip import hip
runtime = open_runtime("hip")
for stream in runtime.create_stream(), runtime.create_stream(for_proxy=True):
    print(hip.hipStreamGetPriority(stream.handle)[1])
print(*hip.hipDeviceGetStreamPriorityRange()[1:])
""")
    assert out.split() == ["0", "-1", "1", "-1"]


def test_events_time_and_order_streams() -> None:
    out = run("""
runtime = open_runtime("hip")
first, second, event, start = (
    runtime.create_stream(), runtime.create_stream(), runtime.create_event(), runtime.create_event())
memory = runtime.allocate(8)
start.record(first)
runtime.fill(memory.ptr, 1, 8, first)
event.record(first)
runtime.wait_event(second.handle, event)
second.synchronize()
event.synchronize()
first.synchronize()  # an event may come a moment before its stream counts as done
print(event.query(), event.elapsed(start) >= 0, first.query())
""")
    assert out == "True True True"


def test_a_runtime_takes_what_proxyccl_compile_made(tmp_path: Path) -> None:
    out = run(
        """
from proxyccl.__main__ import main
from proxyccl.tools import compile as compile_kernels
compile_kernels.KERNELS_OF_STEPS = ()
compile_kernels.EXPERT_KERNELS = (("experts/spread.h", "expert_spread", None, None),)
runtime = open_runtime("hip")
for attempt in range(2):
    try:
        print(runtime.shipped("experts/spread.h", "expert_spread", compiled_only=True).name)
    except CompileError as error:
        print(error)
        print(main(["compile"]))
""",
        PROXYCCL_CACHE=str(tmp_path),
        PROXYCCL_RUNTIME="hip",
    )
    refusal, compiled, status, name = out.splitlines()
    assert refusal == "kernel expert_spread was not compiled for gfx942 beforehand; run: proxyccl compile"
    assert compiled.startswith("gfx942: 1 compiled in ")
    assert (status, name) == ("0", "expert_spread")
    assert len(list(tmp_path.iterdir())) == 1


def test_memory_stays_pinned_while_groups_of_other_devices_are_open() -> None:
    out = run(
        """
import os
from pathlib import Path
pinned, unpinned = [], []
driver = open_runtime("hip", 0).driver
call, noted = type(driver).call, {"MemHostRegister": pinned, "MemHostUnregister": unpinned}

def note(self, name, *args, **options):
    if name in noted:
        noted[name].append(args[0])
    return call(self, name, *args, **options)

type(driver).call = note
first, second = (open_runtime("hip", device) for device in range(2))

def mapped(ptr):
    return any(line.startswith(f"{ptr:x}-") for line in Path("/proc/self/maps").read_text().splitlines())

def descriptors():
    return len(os.listdir("/proc/self/fd"))

before = descriptors()
end_first, end_second = first.keep_pins(), second.keep_pins()
memory = first.allocate_pinned(1 << 20)
ptr, same = memory.host_ptr, second.open_pinned(memory.handle)
memory.close()
print(len(pinned), unpinned, descriptors() - before)
again = first.open_pinned(same.handle)
same.close(), again.close()
print(len(pinned), unpinned, descriptors() - before, mapped(ptr))
end_second()
print(unpinned, mapped(ptr))  # the first device's group is open
end_first()
print(unpinned == pinned, mapped(ptr))
end_first = first.keep_pins()
first.allocate_pinned(1 << 20).close()
print(len(pinned), unpinned == pinned)
"""
    )
    assert out.splitlines() == ["1 [] 1", "1 [] 0 True", "[] True", "True False", "2 True"]


def test_a_suspendable_communicator_is_refused_before_its_ranks_meet() -> None:
    out = run("""
from concurrent.futures import ThreadPoolExecutor
from proxyccl import Communicator, ThreadBootstrap

def refusal(bootstrap):
    try:
        Communicator(bootstrap, "hip", suspendable=bootstrap.rank == 0, timeout=30)
    except (CommunicatorError, RuntimeUnavailableError) as error:
        return f"{type(error).__name__} {error}"

with ThreadPoolExecutor(2) as ranks:
    print(*ranks.map(refusal, ThreadBootstrap.create(2)), sep="\\n")
""")
    first, second = out.splitlines()
    assert first.startswith("RuntimeUnavailableError suspendable: memory of hip can't be suspended")
    assert "hosts: rank 0" in second
    assert "suspendable: memory of hip can't be suspended" in second
