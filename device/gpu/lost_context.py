"""The statuses of a GPU's driver that say that an error has ended the process's context.

CUDA's and HIP's numbers are the same. All later calls into the context return such a status too, and other processes'
contexts are not affected. Source: cuda.h, on CUresult ("the process ... must be terminated and relaunched").
"""

from __future__ import annotations

LOST_CONTEXT = {
    214: "memory had an error that could not be corrected",
    220: "NVLink had an error that could not be corrected",
    700: "a kernel accessed an illegal address",
    702: "a kernel ran longer than the system allows",
    710: "a kernel's assertion failed",
    714: "a kernel's stack was corrupted",
    715: "a kernel executed an illegal instruction",
    716: "a kernel accessed a misaligned address",
    717: "a kernel accessed an address space that its instruction does not reach",
    718: "a kernel's program counter left its program",
    719: "a kernel failed",
}
"""Descriptions, by status."""
