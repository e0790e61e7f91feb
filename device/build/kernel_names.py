"""Finds the names of the kernels in a source, so that exports for them (kernel.h) can be appended before compiling.

Where macros or ``#if`` may hide kernels, a source must be preprocessed. The host's compiler can preprocess. NVRTC and
HIPRTC can't, so a GPU's source is compiled once without exports, and the kernels' names are read from the image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NO_KERNEL = 'no kernel in it: a kernel is an extern "C" __global__ void function'

_RAW_STRING = r'R"(?P<fence>[^(\s]*)\(.*?\)(?P=fence)"'
_QUOTED = r'"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\''
_COMMENT_OR_TEXT = re.compile(rf"//[^\n]*|/\*.*?\*/|{_RAW_STRING}|{_QUOTED}", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?P<name>\w*)(?P<rest>(?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
_OWN_HEADER = re.compile(
    r'[ \t]*(?:"{0}"|<{0}>)[ \t]*'.format(
        r"(?:proxyccl/\w+\.h|mscclpp/\w+\.hpp|cuda_(?:fp16|bf16|fp8)\.h|assert\.h|c(?:assert|stdint|stddef)|stdint\.h)"
    )
)  # this library's headers, and others that contain no kernels
_TOKEN = re.compile(r"\w+|[(){};<>]|\[\[|\]\]")
_NOT_A_FUNCTION = {"alignas", "decltype", "noexcept", "sizeof"}


def _without_text(source: str) -> str:
    """Returns the source without comments and literals. Names of included headers stay."""

    def blank(match: re.Match[str]) -> str:
        before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        return match[0] if match[0][0] == '"' and re.fullmatch(r"[ \t]*#[ \t]*include[ \t]*", before) else " "

    return _COMMENT_OR_TEXT.sub(blank, source)


def in_plain_text(source: str, options: Iterable[str] = ()) -> bool:
    """Whether `kernel_names` finds all kernels of the source without a preprocessor."""
    if any("__global__" in option for option in options):
        return False
    for directive in _DIRECTIVE.finditer(_without_text(source)):
        name, rest = directive["name"], directive["rest"]
        if name.startswith(("if", "el")) or (name == "define" and "__global__" in rest):
            return False
        if name == "include" and not _OWN_HEADER.fullmatch(rest):
            return False
    return True


def kernel_names(source: str) -> list[str]:
    """Returns the names of the ``__global__`` functions that a source defines.

    The source is preprocessed or `in_plain_text`. Templates and declarations are left out.
    """
    tokens = _TOKEN.findall(_DIRECTIVE.sub("", _without_text(source)))
    names: dict[str, None] = {}
    start = 0  # index of the first token of the current declaration
    for at, token in enumerate(tokens):
        if token in ("{", "}", ";"):
            start = at + 1
        elif token == "__global__" and "template" not in tokens[start:at]:
            name = _defined(tokens, at + 1)
            if name is not None:
                names[name] = None
    return list(names)


def _defined(tokens: list[str], at: int) -> str | None:
    """Returns the name of the function whose declaration continues with token `at`; None if no body follows."""
    name, depth = None, 0
    for here in range(at, len(tokens)):
        token = tokens[here]
        if token == "(":
            before = tokens[here - 1]
            # A name that starts with two underscores, such as __launch_bounds__, is an attribute.
            if depth == 0 and name is None and before.isidentifier() and not before.startswith("__"):
                name = before if before not in _NOT_A_FUNCTION else None
            depth += 1
        elif token == ")":
            depth -= 1
        elif depth == 0 and token in ("{", ";"):
            return name if token == "{" else None
    return None


# For each kernel a cubin has a section ".nv.constant0.NAME", and AMD's code object a symbol "NAME.kd".
_IN_IMAGE = re.compile(rb"\0(?:\.nv\.constant0\.(\w+)|(\w+)\.kd)(?=\0)")
_CONSTANTS = b".nv.constant0."
_IN_NAMESPACE = re.compile(rb"_ZN8proxyccl(\d+)(\w+)(\.kd)?")


def kernels_of_image(image: bytes) -> list[str]:
    """Returns the names of the ``extern "C"`` kernels in an image that NVRTC or HIPRTC compiled."""
    found = {(match[1] or match[2]).decode() for match in _IN_IMAGE.finditer(image)}
    return sorted(name for name in found if not name.startswith("_Z"))


def symbols_in_namespace(image: bytes) -> dict[str, str]:
    """Returns the mangled symbols of an image's kernels in the namespace `proxyccl`, by the unmangled names."""
    return {
        match[2][: int(match[1])].decode(): match[0].removesuffix(b".kd").decode()
        for match in _IN_NAMESPACE.finditer(image)
        if match[3] or image.endswith(_CONSTANTS, 0, match.start())
    }


def text_with_exports(source: str, names: Iterable[str]) -> str:
    """Returns a source with exports of its kernels appended. Compilers report the original line numbers."""
    exports = "".join(f"PROXYCCL_EXPORT_KERNEL({name})\n" for name in names)
    return f'#include "proxyccl/kernel.h"\n#line 1 "kernel source"\n{source}\n{exports}'
