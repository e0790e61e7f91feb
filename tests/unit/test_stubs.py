"""The type stubs of the C extensions match their declarations."""

from pathlib import Path

import pytest

from proxyccl.device.build_stubs import make_stub

ROOT = Path(__file__).parents[2]


SCRIPTS = [ROOT / "device/build_native.py", *sorted([*ROOT.glob("proxy/build_*.py"), *ROOT.glob("tools/build_*.py")])]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_stub_is_what_the_build_script_declares(script: Path) -> None:
    pytest.importorskip("ruff", reason="formats the stubs")
    extension, text = make_stub(script)
    stub = script.with_name(f"{extension.rpartition('.')[2]}.pyi")
    assert stub.read_text() == text, f"{stub.relative_to(ROOT)} is out of date; run: make stubs"
