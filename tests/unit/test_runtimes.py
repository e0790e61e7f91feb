"""Runtimes are opened by name, and an unknown name is refused with a list of the known names."""

from collections.abc import Callable

import pytest

from proxyccl import ArgumentError
from proxyccl.device.runtimes import open_compiler, open_driver, open_runtime


@pytest.mark.parametrize(
    ("opening", "message"),
    [
        (open_runtime, "runtime: unknown runtime 'metal'; expected one of host, cuda, hip"),
        (open_driver, "name: unknown GPU runtime 'metal'; expected one of cuda, hip"),
        (open_compiler, "name: unknown GPU runtime 'metal'; expected one of cuda, hip"),
    ],
)
def test_an_unknown_name_is_refused(opening: Callable[[str], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        opening("metal")
