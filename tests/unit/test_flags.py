"""A flag of an API must be true or false. The error for another value names the flag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.errors import ArgumentError


@pytest.mark.parametrize("value", [True, 1, np.True_, np.array([1])])
def test_any_object_that_is_true_is_a_flag(value: Any) -> None:
    assert as_flag(value, "save") is True


@pytest.mark.parametrize("value", [False, 0, None, np.False_])
def test_any_object_that_is_false_is_a_flag(value: Any) -> None:
    assert as_flag(value, "save") is False


def test_an_array_of_several_elements_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"^save: must be True or False, not array\(\[1, 0\]\)"):
        as_flag(np.array([1, 0]), "save")
