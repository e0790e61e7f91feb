"""Makes the type stubs of the C extensions from the declarations that their build scripts pass to cffi."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cffi import FFI, model
from cffi.cparser import Parser

_CDATA = Path(__file__).with_name("_cdata.pyi")


def _read(tp: Any) -> str:
    match tp:
        case model.VoidType():
            return "None"
        case model.StructType():
            return _name(tp)
        case model.PointerType():
            return _pointer(tp.totype)
        case model.ArrayType():
            return f"Array[{_read(tp.item)}, {_pointer(tp.item)}]"
        case model.EnumType():
            return "int"
        case model.FunctionPtrType():
            return "CData"
    if tp.name == "char":
        return "bytes"
    if tp.name == "_Bool":
        return "bool"
    return "float" if tp.is_float_type() else "int"


def _pointer(to: Any) -> str:
    match to:
        case model.VoidType():
            return "VoidPointer"
        case model.ArrayType():
            return "Pointer"
        case model.StructType():
            return f"{_name(to)}Pointer"
        case model.PointerType():
            return f"PointerTo[{_pointer(to.totype)}]"
    return "".join(word.removesuffix("_t").capitalize() for word in _c_name(to).split()) + "Pointer"


def _argument(tp: Any) -> str:
    if not isinstance(tp, model.PointerType):
        return _read(tp)
    match tp.totype:
        case model.VoidType():
            return "Pointer"
        case model.PrimitiveType(name="char"):
            return "Passed[CharPointer] | bytes"
        case model.PrimitiveType() if tp.quals & model.Q_CONST:
            return f"Passed[{_pointer(tp.totype)}] | Sequence[int]"
        case model.PointerType():
            return f"Passed[{_pointer(tp.totype)}] | Sequence[{_argument(tp.totype)}]"
    return f"Passed[{_pointer(tp.totype)}]"


def _field(tp: Any) -> str:
    match tp:
        case model.PointerType(totype=model.VoidType()):
            return "Field[VoidPointer, Pointer]"
        case model.PointerType():
            return f"PointerField[{_pointer(tp.totype)}]"
        case model.ArrayType():
            return f"ArrayField[{_read(tp.item)}, {_pointer(tp.item)}]"
    return _read(tp)


def _name(tp: Any) -> str:
    return str(tp.name).removeprefix("$")


def _c_name(tp: Any) -> str:
    return str(tp.get_c_name()).replace("$", "").replace(" const ", " ")  # cffi ignores const


class _Declarations:
    """The declarations of a build script."""

    def __init__(self, ffi: FFI) -> None:
        source = "\n".join(ffi._cdefsources)
        parser = Parser()
        parser.parse(source)
        self.structs: dict[str, Any] = {}
        self.functions: dict[str, Any] = {}
        self.constants: list[str] = []
        for key, (tp, _) in parser._declarations.items():
            kind, _, name = key.partition(" ")
            if kind == "function":
                self.functions[name] = tp
            elif kind == "macro":
                self.constants.append(name)
            elif isinstance(tp, model.EnumType):
                self.constants += [each for each in tp.enumerators if each not in self.constants]
            elif isinstance(tp, model.StructType):
                self.structs[_name(tp)] = tp
        # cffi's types have no parameter names, so the names are read from the syntax tree.
        tree, _, _ = Parser()._parse(source)
        self.parameters = {
            node.name: [parameter.name for parameter in node.type.args.params if parameter.name]  # "(void)" has no name
            for node in tree.ext
            if node.name in self.functions
        }

    def pointed_to(self) -> dict[str, Any]:
        """Returns all structs, and all types to which a declaration has a pointer, by their C names."""
        found: dict[str, Any] = {}

        def note(tp: Any) -> None:
            if isinstance(tp, model.ArrayType):
                note(tp.item if isinstance(tp.item, model.ArrayType) else model.PointerType(tp.item))
            elif isinstance(tp, model.PointerType) and _c_name(tp.totype) not in found:
                found[_c_name(tp.totype)] = tp.totype
                note(tp.totype)

        for struct in self.structs.values():
            note(model.PointerType(struct))
            for tp in struct.fldtypes or ():
                note(tp)
        for function in self.functions.values():
            for tp in (*function.args, function.result):
                note(tp)
        return found


def _structs(declared: _Declarations) -> Iterator[str]:
    for name, struct in declared.structs.items():
        if not struct.fldnames:
            yield f"class {name}(CData): ...\nclass {name}Pointer(Pointer): ...\n"
            continue
        yield f"class _{name}:\n"
        for field, tp in zip(struct.fldnames, struct.fldtypes, strict=True):
            yield f"    {field}: {_field(tp)}\n"
        yield f"class {name}(_{name}, CData): ...\nclass {name}Pointer(_{name}, ItemPointer[{name}]): ...\n"


def _lib(declared: _Declarations) -> Iterator[str]:
    yield "class Lib:\n"
    for name in declared.constants:
        yield f"    {name}: Final[int]\n"
    for name, tp in declared.functions.items():  # "lib", because a parameter may be called "self"
        names = declared.parameters[name]
        arguments = ", ".join(f"{n}: {_argument(a)}" for n, a in zip(names, tp.args, strict=True))
        yield f"    def {name}(lib{f', {arguments}, /' if arguments else ''}) -> {_read(tp.result)}: ...\n"


def _ffi(declared: _Declarations) -> Iterator[str]:
    pointed_to = declared.pointed_to()
    sized = {name: tp for name, tp in pointed_to.items() if not isinstance(tp, model.VoidType) and not _is_opaque(tp)}
    if not pointed_to:
        yield "class FFI(BaseFFI): ...\n"
        return
    yield "class FFI(BaseFFI):\n"
    for name, tp in sized.items():
        initial = f"Initial[{_name(tp)}]" if isinstance(tp, model.StructType) else _argument(tp)
        yield from _overload("new", f"{_spaced(name)}*", f"init: {initial} = ...", _pointer(tp))
        array = f"Array[{_read(tp)}, {_pointer(tp)}]"
        yield from _overload("new", f"{name}[]", f"init: int | Sequence[{initial}]", array)
    for name, tp in pointed_to.items():
        yield from _overload("cast", f"{_spaced(name)}*", "value: CData | int", _pointer(tp))
    yield from _overload("cast", "uintptr_t", "value: CData | int", "Number")
    names = ", ".join(f'"{name}"' for name in sized)
    yield f"    def sizeof(self, cdecl: CData | Literal[{names}], /) -> int: ...\n"
    yield "    def offsetof(self, cdecl: str, field: str, /) -> int: ...\n"


def _is_opaque(tp: Any) -> bool:
    return isinstance(tp, model.StructType) and tp.fldnames is None


def _spaced(name: str) -> str:
    return name if name.endswith("*") else f"{name} "


def _overload(method: str, cdecl: str, parameter: str, result: str) -> Iterator[str]:
    yield f'    @overload\n    def {method}(self, cdecl: Literal["{cdecl}"], {parameter}, /) -> {result}: ...\n'


def make_stub(script: Path) -> tuple[Path, str]:
    """Returns the path and the text of the type stub of a build script's extension."""
    ffi = runpy.run_path(str(script))["ffi"]
    declared = _Declarations(ffi)
    body = "".join((*_structs(declared), *_lib(declared), *_ffi(declared), "ffi: FFI\nlib: Lib\n"))
    shared = re.findall(r"^(?:class )?(\w+)[:(]", _CDATA.read_text(), re.MULTILINE)
    used = sorted(name for name in shared if re.search(rf"\b{name}\b", body))
    imports = "".join(f"from proxyccl.device._cdata import {name} as {name}\n" for name in used)  # re-exported
    standard = {"collections.abc": ("Sequence",), "typing": ("Final", "Literal", "overload")}
    text = f'"""Made by device/build_stubs.py from {script.name}."""\n\n'
    for module, names in standard.items():
        if found := ", ".join(name for name in names if name in body):
            text += f"from {module} import {found}\n"
    text += f"\n{imports}\n{body}"
    return script.with_name(f"{ffi._assigned_source[0].rpartition('.')[2]}.pyi"), text
