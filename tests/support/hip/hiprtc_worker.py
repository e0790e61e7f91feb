"""Compiles sources from standard input with HIPRTC, through hip-python, and disassembles the result.

HIPRTC needs another C library than the tests, so tests run this program in a separate process, and the program imports
no modules of the tests. A request is a line of JSON {source, options, disassemble}; the answer is a line of {status,
log, code, assembly}. `code` is in base 64. If `disassemble` names an architecture, `assembly` has the code's
instructions. An empty line ends the process.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from typing import Any

from hip import hiprtc

# The numbers below are those of amd_comgr.h version 3; version 2 has others.
COMGR = "libamd_comgr.so.3"
KIND_SOURCE = 0x1
KIND_EXECUTABLE = 0x8
DISASSEMBLE_EXECUTABLE_TO_SOURCE = 0xA


def check(status: Any, call: str) -> None:
    if int(status):
        raise RuntimeError(f"{call}: {status}")


def compile_source(source: str, options: list[str]) -> tuple[int, str, bytes]:
    """Compiles a source. Returns the compilation's status, log and code object."""
    status, program = hiprtc.hiprtcCreateProgram(source.encode(), b"source", 0, None, None)
    check(status, "hiprtcCreateProgram")
    (compiled,) = hiprtc.hiprtcCompileProgram(program, len(options), [option.encode() for option in options])
    status, size = hiprtc.hiprtcGetProgramLogSize(program)
    check(status, "hiprtcGetProgramLogSize")
    log = bytearray(size)
    check(hiprtc.hiprtcGetProgramLog(program, log)[0], "hiprtcGetProgramLog")
    code = bytearray()
    if int(compiled) == 0:
        status, size = hiprtc.hiprtcGetCodeSize(program)
        check(status, "hiprtcGetCodeSize")
        code = bytearray(size)
        check(hiprtc.hiprtcGetCode(program, code)[0], "hiprtcGetCode")
    check(hiprtc.hiprtcDestroyProgram(program.createRef())[0], "hiprtcDestroyProgram")
    return int(compiled), log.rstrip(b"\0").decode().strip(), bytes(code)


class Handle(ctypes.Structure):
    """A handle of comgr's data, data sets or actions: a struct of one number, passed by value."""

    _fields_ = (("handle", ctypes.c_uint64),)


def disassemble(code: bytes, architecture: str) -> str:
    """Returns the instructions of a code object, in objdump's format."""
    comgr = ctypes.CDLL(COMGR)

    def call(name: str, *arguments: Any) -> None:
        check(getattr(comgr, f"amd_comgr_{name}")(*arguments), name)

    data, inputs, outputs, action, text = Handle(), Handle(), Handle(), Handle(), Handle()
    call("create_data", KIND_EXECUTABLE, ctypes.byref(data))
    call("set_data", data, ctypes.c_size_t(len(code)), code)
    call("set_data_name", data, b"kernels")
    call("create_data_set", ctypes.byref(inputs))
    call("data_set_add", inputs, data)
    call("create_data_set", ctypes.byref(outputs))
    call("create_action_info", ctypes.byref(action))
    call("action_info_set_isa_name", action, f"amdgcn-amd-amdhsa--{architecture}".encode())
    call("do_action", DISASSEMBLE_EXECUTABLE_TO_SOURCE, action, inputs, outputs)
    call("action_data_get_data", outputs, KIND_SOURCE, ctypes.c_size_t(0), ctypes.byref(text))
    size = ctypes.c_size_t()
    call("get_data", text, ctypes.byref(size), None)
    buffer = ctypes.create_string_buffer(size.value)
    call("get_data", text, ctypes.byref(size), buffer)
    for set_ in (inputs, outputs):
        call("destroy_data_set", set_)
    call("destroy_action_info", action)
    for item in (data, text):
        call("release_data", item)
    return buffer.raw[: size.value].decode()


def main() -> None:
    while (line := sys.stdin.readline()).strip():
        request = json.loads(line)
        status, log, code = compile_source(request["source"], request["options"])
        answer = {"status": status, "log": log, "code": base64.b64encode(code).decode(), "assembly": ""}
        if status == 0 and request["disassemble"]:
            answer["assembly"] = disassemble(code, request["disassemble"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
