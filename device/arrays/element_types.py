"""The table of element types. A new element type needs only a row in this table.

`dtypes.py` makes the `DType` objects from the table; setup.py and `compile_cache.py` make kernel sources from it. Each
kernel source checks that `reduce.h` agrees with the type's row (`c_check`).

This module imports nothing of the project: setup.py reads it before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # dlpack.h, DLDataTypeCode
_E4M3FN, _E4M3FNUZ, _E5M2, _E5M2FNUZ, _E8M0FNU, _E2M1FN = 10, 11, 12, 13, 14, 17


@dataclass(frozen=True)
class ElementType:
    """An element type."""

    name: str  # the name in numpy, ml_dtypes and torch: ``"float32"``, ``"bfloat16"``, …
    itemsize: int  # bytes of an element
    dlpack: tuple[int, int]  # DLPack's (type code, bits)
    c_name: str = ""  # the type's name in kernels (``reduce.h``); "" if kernels do not reduce the type
    accumulator: int = 0  # bytes of the type in which reductions accumulate; 0 if that is the element type
    tokens: bool = False  # whether tokens of the expert-parallel layer can have this type
    plan_name: str = ""  # the type's name in ``float8.h``, if only kernels of execution plans reduce the type
    lanes: int = 1  # the number of DLPack values in an element

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of the type that reductions accumulate in."""
        return self.accumulator or self.itemsize

    @property
    def bitwise(self) -> bool:
        """Whether the type is an integer, so that kernels support bitwise reductions of it."""
        return bool(self.c_name) and self.dlpack[0] in (_INT, _UINT)

    def c_check(self) -> str:
        """Returns a line of C that compiles only if ``reduce.h`` describes the type as this row does."""
        name = self.c_name or self.plan_name
        return (
            f"static_assert(sizeof({name}) == {self.itemsize} && "
            f"sizeof(proxyccl::Element<{name}>::Accumulator) == {self.accumulator_itemsize}, "
            f'"element_types.py and reduce.h differ on {self.name}");\n'
        )


ELEMENT_TYPES = (
    ElementType("float16", 2, (_FLOAT, 16), "proxyccl::Half", accumulator=4, tokens=True),
    ElementType("bfloat16", 2, (_BFLOAT, 16), "proxyccl::BFloat16", accumulator=4, tokens=True),
    ElementType("float32", 4, (_FLOAT, 32), "float", tokens=True),
    ElementType("float64", 8, (_FLOAT, 64), "double", tokens=True),
    ElementType("int32", 4, (_INT, 32), "int32_t"),
    ElementType("int64", 8, (_INT, 64), "int64_t"),
    ElementType("int8", 1, (_INT, 8), "int8_t"),
    ElementType("int16", 2, (_INT, 16), "int16_t"),
    ElementType("uint8", 1, (_UINT, 8), "uint8_t"),
    ElementType("uint16", 2, (_UINT, 16), "uint16_t"),
    ElementType("uint32", 4, (_UINT, 32), "uint32_t"),
    ElementType("uint64", 8, (_UINT, 64), "uint64_t"),
    ElementType("bool", 1, (_BOOL, 8)),
    ElementType("complex64", 8, (_COMPLEX, 64)),
    ElementType("complex128", 16, (_COMPLEX, 128)),
    ElementType("float8_e4m3fn", 1, (_E4M3FN, 8), accumulator=4, plan_name="proxyccl::Float8E4M3"),
    ElementType("float8_e5m2", 1, (_E5M2, 8), accumulator=4, plan_name="proxyccl::Float8E5M2"),
    ElementType("float8_e4m3fnuz", 1, (_E4M3FNUZ, 8)),
    ElementType("float8_e5m2fnuz", 1, (_E5M2FNUZ, 8)),
    ElementType("float8_e8m0fnu", 1, (_E8M0FNU, 8)),
    ElementType("float4_e2m1fn_x2", 1, (_E2M1FN, 4), lanes=2),
)


def check_table(rows: tuple[ElementType, ...]) -> None:
    """Raises ValueError, which names the row, if a row is inconsistent in itself or with another row."""
    for i, row in enumerate(rows):
        if row.dlpack[1] * row.lanes != 8 * row.itemsize:
            raise ValueError(f"{row.name}: {row.dlpack[1]} bits in DLPack, but {row.itemsize} bytes")
        if not row.c_name and (row.tokens or (row.accumulator and not row.plan_name)):
            raise ValueError(f"{row.name}: kernels that compute with it need its c_name")
        for other in rows[:i]:
            if row.name == other.name or row.dlpack == other.dlpack or (row.c_name and row.c_name == other.c_name):
                raise ValueError(f"{row.name}: its name, its DLPack type or its c_name is also {other.name}'s")


check_table(ELEMENT_TYPES)
