"""Runs scenarios of race_scenarios.py with instrumented extension modules, under ThreadSanitizer.

Arguments: the directory of the instrumented modules, then names of scenarios. Prints each scenario's name to stderr
before the sanitizer's reports, and its name and exit code to stdout.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def use_instrumented(directory: Path) -> None:
    """Replaces the installed extension modules by instrumented modules."""
    for name in ("proxyccl.device._native", "proxyccl.proxy._engine", "proxyccl.proxy._transfers"):
        spec = importlib.util.spec_from_file_location(name, directory / f"{name}.so")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def start_compilers_cheaply() -> None:
    """Makes compilers run without the sanitizer, and start without a copy of this process.

    The sanitizer replaces `vfork` by `fork`, which copies the page tables of shadow memory and takes a third of the
    run's time. `subprocess` uses `posix_spawn` instead if no descriptors must be closed.
    """
    del os.environ["LD_PRELOAD"]
    subprocess.Popen = functools.partial(subprocess.Popen, close_fds=False)  # type: ignore[assignment,misc]


if __name__ == "__main__":
    start_compilers_cheaply()
    use_instrumented(Path(sys.argv[1]))
    sys.path.append(str(Path(__file__).parent.parent.parent))  # the package `support` is in tests/
    scenarios = importlib.import_module("race_scenarios")
    for scenario in sys.argv[2:]:
        print(scenario, file=sys.stderr, flush=True)
        status = 0
        # After a race a process is unreliable, so each planted race runs in a separate fork.
        if not scenario.startswith("planted"):
            getattr(scenarios, scenario)()
        elif child := os.fork():
            _, status = os.waitpid(child, 0)
        else:
            getattr(scenarios, scenario)()
            sys.exit()
        print(scenario, os.waitstatus_to_exitcode(status), flush=True)
