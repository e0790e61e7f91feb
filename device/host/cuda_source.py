"""Rewrites declarations of dynamic shared memory for the host, and finds unknown CUDA names in compiler errors.

CUDA functions for the host are in host_cuda.h and platform_host.h.
"""

from __future__ import annotations

import re

_ALIGNED = r"(?:(?:__align__|alignas)\s*\([^()]*\)\s*)?"
_DYNAMIC_SHARED = re.compile(
    rf"\bextern\s+{_ALIGNED}__shared__\s+{_ALIGNED}(?P<type>[\w:<>,*\s]+?)\s*\b(?P<name>\w+)\s*\[\s*\]\s*;"
)
_BRACE_OF_A_FUNCTION = re.compile(r"\)[^(){};]*\{|[{}]")
_UNKNOWN = re.compile(
    r"['\u2018](?P<name>\w+)['\u2019] (?:was not declared|has not been declared|does not name a type)"
)
_CUDA = re.compile(r"__\w+|(?:atomic|cuda|tex|surf|cg|cooperative_groups)\w*")


def for_the_host(source: str) -> str:
    """Returns the source with dynamic shared memory declared for the emulator. Line numbers stay the same.

    ``extern __shared__ float values[];`` becomes a pointer to memory that the launch has allocated.
    """

    def declared(match: re.Match[str]) -> str:
        kind, name, lines = match["type"].strip(), match["name"], "\n" * match[0].count("\n")
        if _in_a_function(source[: match.start()]):
            return f"{kind}* const {name} = static_cast<{kind}*>(::proxyccl::dynamicShared());{lines}"
        return f"static constexpr ::proxyccl::host::DynamicShared<{kind}> {name}{{}};{lines}"

    return _DYNAMIC_SHARED.sub(declared, source)


def _in_a_function(before: str) -> bool:
    """Whether the text ends inside a function's body: in braces that follow a closing parenthesis."""
    functions: list[bool] = []
    for brace in _BRACE_OF_A_FUNCTION.findall(before):
        if brace != "}":
            functions.append(brace != "{")
        elif functions:
            functions.pop()
    return any(functions)


def missing(log: str) -> str:
    """Returns an error text with the CUDA names that a compiler's log reports as unknown; "" if there are none."""
    unknown = dict.fromkeys(match["name"] for match in _UNKNOWN.finditer(log))
    names = [name for name in unknown if _CUDA.fullmatch(name)]
    return f": the host runtime has no {', '.join(names)}" if names else ""
