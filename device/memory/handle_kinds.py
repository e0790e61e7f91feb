"""Tells from a handle how its memory is shared."""

from __future__ import annotations

DEVICE_MEMORY = b"PXCCLgpu"
"""The first bytes of handles of a GPU's memory."""

MAPPED_BLOCKS = b"PXCCLvmm"
"""The first bytes of a `VirtualMemory` handle of mapped blocks."""


def sharing_of(handle: bytes) -> str:
    """Returns how a handle's memory is shared: for GPU memory "IPC" (CUDA or HIP IPC) or "VMM" (CUDA virtual memory),
    for the host runtime's memory "shared memory"."""
    if not handle.startswith(DEVICE_MEMORY):
        return "shared memory"
    return "VMM" if MAPPED_BLOCKS in handle else "IPC"


NOT_PASSED = (
    "memory of cudaMalloc does not pass PID namespaces; allocate it with Communicator.empty(), or torch's with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
"""The reason why GPU memory that `passes_namespaces` refuses can't be mapped, and the remedy."""


def passes_namespaces(handle: bytes) -> bool:
    """Whether processes of other PID namespaces can open a handle. IPC handles can't pass PID namespaces."""
    return sharing_of(handle) != "IPC"
