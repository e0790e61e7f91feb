"""Runs a program under a system call filter like Docker's: under_seccomp.py PROGRAM ARGUMENTS

The filter refuses, with EPERM, the system calls that Docker's default profile refuses, including debuggers' calls and
calls that access another process's memory. A process can't remove its filter, and its children inherit the filter.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import struct
import sys
from pathlib import Path

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # _REFUSE returns EPERM
_NUMBER, _ARCHITECTURE, _X86_64 = 0, 4, 0xC000003E
_CALLS = """
    ptrace=101 syslog=103 pivot_root=155 chroot=161 acct=163 mount=165 umount2=166 swapon=167 reboot=169
    sethostname=170 iopl=172 ioperm=173 init_module=175 delete_module=176 quotactl=179 lookup_dcookie=212
    mbind=237 set_mempolicy=238 get_mempolicy=239 kexec_load=246 add_key=248 request_key=249 keyctl=250
    migrate_pages=256 unshare=272 move_pages=279 perf_event_open=298 fanotify_init=300 name_to_handle_at=303
    open_by_handle_at=304 setns=308 process_vm_readv=310 process_vm_writev=311 kcmp=312 finit_module=313
    bpf=321 userfaultfd=323 io_uring_setup=425 io_uring_enter=426 io_uring_register=427 pidfd_getfd=438
    process_madvise=440
"""
REFUSED = {name: int(number) for name, number in (call.split("=") for call in _CALLS.split())}
"""Numbers of system calls on x86-64."""


def confine() -> None:
    """Installs the filter in this process."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    calls = sorted(REFUSED.values())
    program = [
        instruction(_LOAD_WORD, _ARCHITECTURE),
        instruction(_JUMP_IF_EQUAL, _X86_64, 1, 0),
        instruction(_RETURN, _REFUSE),
        instruction(_LOAD_WORD, _NUMBER),
        *(instruction(_JUMP_IF_EQUAL, call, len(calls) - i, 0) for i, call in enumerate(calls)),
        instruction(_RETURN, _ALLOW),
        instruction(_RETURN, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, header, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    if platform.machine() != "x86_64":
        sys.exit("the filter is of x86-64")
    confine()
    assert (
        ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0) == -1
    )  # PTRACE_TRACEME, which is otherwise always allowed
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
