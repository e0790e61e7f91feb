"""The table of element types is consistent, and agrees with the types in kernels."""

from dataclasses import replace

import pytest

from proxyccl import ArgumentError, CompileError
from proxyccl.device.arrays.dtypes import DTYPES, reduction_dtypes
from proxyccl.device.arrays.element_types import ELEMENT_TYPES, ElementType, check_table
from proxyccl.device.host import HostRuntime

_KERNEL = '#include "proxyccl/reduce.h"\n{check}extern "C" __global__ void nothing() {{}}\n'


def test_a_type_that_numpy_lacks_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="dtype: numpy has no float4_e2m1fn_x2; expected an array of another library"
    ):
        DTYPES["float4_e2m1fn_x2"].numpy()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ElementType("float24", 3, (2, 32)), "float24: 32 bits in DLPack, but 3 bytes"),
        (ElementType("int32", 8, (0, 999)), "int32: 999 bits"),
        (ElementType("float32", 16, (2, 128)), "float32: its name, its DLPack type or its c_name is also float32's"),
        (ElementType("single", 4, (2, 32)), "single: .* is also float32's"),
        (ElementType("float128", 16, (2, 128), "float"), "float128: .* is also float32's"),
        (ElementType("float128", 16, (2, 128), tokens=True), "float128: .* need its c_name"),
    ],
)
def test_a_contradictory_row_is_refused_by_name(row: ElementType, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_table((*ELEMENT_TYPES, row))


def test_kernels_compile_where_header_and_table_agree() -> None:
    checks = "".join(DTYPES[dtype].c_check() for dtype in reduction_dtypes())
    HostRuntime().compile(_KERNEL.format(check=checks))


@pytest.mark.parametrize("wrong", [{"itemsize": 4}, {"accumulator": 2}])
def test_no_kernel_compiles_where_header_and_table_differ(wrong: dict[str, int]) -> None:
    row = replace(DTYPES["float16"], **wrong)
    with pytest.raises(CompileError, match=r"element_types\.py and reduce\.h differ on float16"):
        HostRuntime().compile(_KERNEL.format(check=row.c_check()))
