"""SGLang's plug-in without SGLang: the group in which a trainer broadcasts weights, and the plug-in's switch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from concurrent.futures import ThreadPoolExecutor

from proxyccl.device.errors import ArgumentError
from proxyccl.sglang import register
from support.running import run_alone

PROGRAM = Path(__file__).parent / "programs" / "weight_group.py"


@pytest.mark.host_only(reason="the program's tensors are the host's")
def test_a_trainer_broadcasts_weights_to_servers(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        done = run_alone(PROGRAM, str(tmp_path / "store"), str(rank), env={"PROXYCCL_RUNTIME": "host"})
        return done.stdout + done.stderr * bool(done.returncode)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == ["received\n"] * 3


def test_the_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_SGLANG", "yes")
    with pytest.raises(ArgumentError, match=r"^PROXYCCL_SGLANG: must be 0 or 1, not 'yes'$"):
        register()


def test_another_deep_ep_that_is_imported_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_SGLANG", "1")
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    with pytest.raises(RuntimeError, match=r"^PROXYCCL_SGLANG=1: expected that deep_ep is not imported before"):
        register()


def test_functions_that_sglang_lacks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_SGLANG", "1")
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)  # other tests may have imported the package
    monkeypatch.setitem(sys.modules, "sglang", None)  # lets imports fail, as those of another version's functions
    with pytest.raises(RuntimeError, match=r"^PROXYCCL_SGLANG=1: expected the functions of SGLang 0\.5\.23, .*sglang"):
        register()
    assert "deep_ep" not in sys.modules
