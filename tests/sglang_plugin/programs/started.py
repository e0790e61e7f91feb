"""The start and the end of a rank's program. The import loads SGLang's plug-ins, before SGLang's other modules."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/
from support.fakes import empty_packages

ON_GPUS = os.environ["PROXYCCL_RUNTIME"] != "host"
empty_packages.install(on_gpus=ON_GPUS)

import torch
from sglang.srt.plugins import load_plugins

load_plugins()
DEVICE = torch.device("cuda", int(sys.argv[1])) if ON_GPUS else torch.device("cpu")
if ON_GPUS:
    torch.cuda.set_device(DEVICE)
torch.set_default_device(DEVICE)
torch.set_grad_enabled(False)  # SGLang's processes also disable gradients


class expecting:  # noqa: N801  named like pytest.raises, which takes long to import
    """Asserts that the block raises an error whose text matches a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        assert error is not None, f"no error matched {self._pattern}"
        assert re.search(self._pattern, str(error)), str(error)
        return True


def print_outcomes(cases: Sequence[Callable[[], None]]) -> None:
    """Runs the cases, and prints the error of each, or "" without one, as JSON."""
    outcomes: dict[str, str] = {}
    for each in cases:
        try:
            each()
            outcomes[each.__name__] = ""
        except Exception as error:
            outcomes[each.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes), flush=True)
