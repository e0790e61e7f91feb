"""Fills structs of C extensions that cffi has built."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ArgumentError


def realize_types(ffi: Any) -> None:
    """Makes cffi compute the fields of all structs of an extension now.

    cffi computes a struct's fields at the first use, and fails or crashes if two threads do so at once (cffi 2.1.1,
    realize_c_type.c).
    """
    types, structs, _ = ffi.list_types()
    for ctype in (*map(ffi.typeof, types), *(ffi.typeof(f"struct {name}") for name in structs)):
        if ctype.kind == "struct" and _is_complete(ffi, ctype):
            _ = ctype.fields


def set_functions(ffi: Any, struct: Any, calls: object, *names: str, **other_names: str) -> None:
    """Sets fields of a struct that point to functions.

    Args:
        ffi: the extension's `ffi`.
        struct: the struct.
        calls: an object whose attributes are the functions' addresses; 0 means NULL.
        names: the fields whose attribute in `calls` has the same name.
        other_names: for each other field, its attribute's name in `calls`.
    """
    for field, name in (*zip(names, names, strict=True), *other_names.items()):
        setattr(struct, field, ffi.cast("void *", getattr(calls, name)))


def _is_complete(ffi: Any, ctype: Any) -> bool:
    try:
        ffi.sizeof(ctype)
    except ffi.error:
        return False
    return True


def fill(native_options: Any, **fields: Any) -> Any:
    """Sets fields of a C struct, and returns the struct.

    Raises:
        ArgumentError: a value does not fit its field; the error names the field.
    """
    for name, value in fields.items():
        try:
            setattr(native_options, name, value)
        except (OverflowError, TypeError) as error:
            raise ArgumentError(name, f"must be a number that fits its field, not {value!r}") from error
    return native_options
