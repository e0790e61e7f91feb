"""Extracts declarations from C headers for cffi, which can't parse preprocessor lines, attributes and bodies.

The headers must be formatted by clang-format, so that exactly the declarations begin in a line's first column.
"""

import re

_DROPPED = re.compile(r"/\*.*?\*/|\s__attribute__\(\(\w+\(\d+\)\)\)|_Alignas\(\d+\)", re.DOTALL)
_DECLARED = re.compile(
    r"""
      ^\#define\ (?P<constant>PROXYCCL_\w+)\ (?!__|extern)\S
    | ^(?P<type>(?:typedef\ )?(?:struct|enum)\b[^;{]*(?:\{[^}]*\}[^;]*)?;)
    | ^(?:static\ )?(?:inline\ )?(?P<function>(?!PROXYCCL_)\w[\w\ *]*[\ *]proxyccl_\w+\([^;{]*\))\s*[;{]
    """,
    re.MULTILINE | re.VERBOSE,
)
_FUNCTION_NAME = re.compile(r"^(?!PROXYCCL_)(?:[A-Za-z][^;=\n]*\W)?(proxyccl_\w+)\(", re.MULTILINE)


def declarations(source: str) -> str:
    """Returns declarations of the integer constants, types and functions of C code, without those of included headers.

    ``...`` makes cffi ask the compiler for a struct's layout or a constant's value. Raises ValueError if a function's
    return type and name are not on one line.
    """
    found = []
    code = _DROPPED.sub("", source)
    for each in _DECLARED.finditer(code):
        if each["constant"]:
            found.append(f"#define {each['constant']} ...")
        elif each["function"]:
            found.append(f"{each['function']};")
        elif "struct" in each["type"]:
            found.append(each["type"].replace("}", "...; }"))
        else:
            found.append(each["type"])
    missed = set(_FUNCTION_NAME.findall(code)) - set(re.findall(r"\bproxyccl_\w+", "\n".join(found)))
    if missed:
        raise ValueError(
            f"{', '.join(sorted(missed))}: expected the return type and the name on one line, as clang-format puts them"
        )
    return "\n".join(found)
