"""How the memory that a handle names is shared."""

from __future__ import annotations

DEVICE_MEMORY = b"PXCCLgpu"
"""Begins handles of a GPU's memory."""

MAPPED_BLOCKS = b"PXCCLvmm"
"""Begins a driver's handle of memory that a program mapped itself."""


def sharing_of(handle: bytes) -> str:
    """Names it: "IPC" or "VMM" for the two kinds of GPU memory, "shared memory" for the host runtime's."""
    if not handle.startswith(DEVICE_MEMORY):
        return "shared memory"
    return "VMM" if MAPPED_BLOCKS in handle else "IPC"
