"""Runs scenarios of race_scenarios.py on instrumented extension modules, in a process with ThreadSanitizer.

Arguments: the directory of the instrumented modules, then names of scenarios.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def use_instrumented(directory: Path) -> None:
    """Replaces the installed extension modules by the instrumented ones."""
    for name in ("proxyccl.device._native", "proxyccl.proxy._engine"):
        spec = importlib.util.spec_from_file_location(name, directory / f"{name}.so")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__":
    use_instrumented(Path(sys.argv[1]))
    sys.path.append(str(Path(__file__).parent.parent.parent))  # for the modules beside it
    scenarios = importlib.import_module("race_scenarios")
    for scenario in sys.argv[2:]:
        getattr(scenarios, scenario)()
        print(scenario, "done", flush=True)
