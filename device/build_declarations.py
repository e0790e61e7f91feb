"""Finds the declarations in C headers for cffi, which does not read preprocessor lines, attributes and bodies.

It relies on the layout that clang-format gives the headers: a declaration begins at the beginning of a line, where no
other code does. The build scripts run it.
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
    """Returns the integer constants, types and functions that C code declares or defines, without those of its
    includes.

    ``...`` makes cffi take the layout of a struct and the value of a constant from the compiler. Raises ValueError if a
    function's layout differs.
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
