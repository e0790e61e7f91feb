"""`make demo`: trains two classifiers on 4 ranks, over both kinds of channel, and reports the data moved.

The demo starts the two digits examples under mpiexec and shows their progress. The demo checks that the final weights
equal those of a training in one process, that the accuracy is high enough, and that the proxies moved data only in the
variants that use them. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

EXAMPLES = Path(__file__).parent
LIMIT = 120.0  # seconds that one training may take, even on a busy machine
TOLERANCE = 1e-5
ACCURACY = 0.9


@dataclass(frozen=True)
class Training:
    """A run of one of the two trainings."""

    title: str
    program: str
    options: tuple[str, ...]
    channel: str
    pushes_triggers: bool = False


MOE = ("--epochs", "12")  # enough epochs to reach the final accuracy; an epoch has 72 collectives
TRAININGS = (
    Training("Data-parallel: gradients are summed by all_reduce", "digits_data_parallel.py", (), "SmChannel"),
    Training("The same, by proxy", "digits_data_parallel.py", ("--algorithm", "proxy"), "ProxyChannel"),
    Training("Mixture of experts: samples travel by dispatch and combine", "moe_digits.py", MOE, "SmChannel"),
    Training("The same, by triggers", "moe_digits.py", (*MOE, "--proxied"), "ProxyChannel", pushes_triggers=True),
)


class DemoError(Exception):
    """A training failed or gave a wrong result."""


def show(line: str) -> None:
    """Prints a line of progress, which on a terminal replaces the previous line."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {line}", end="", flush=True)
    else:
        print(f"  {line}", flush=True)


def show_progress(stream: IO[str], others: list[str]) -> None:
    """Shows a training's progress messages, and collects its other lines of output."""
    for line in stream:
        if line.startswith("proxyccl: "):
            show(line.removeprefix("proxyccl: ").rstrip())
        else:
            others.append(line)


def train(training: Training, ranks: int) -> dict[str, Any]:
    """Runs one training and returns the content of its RESULT line.

    Raises:
        DemoError: the training failed, did not end within the time limit, or printed no result.
    """
    directories = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=directories)
    if mpiexec is None:
        raise DemoError("mpiexec is missing; run `make demo`, which installs it")
    program = EXAMPLES / training.program
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(program), *training.options]
    # numpy's own threads would only take cores away from the ranks, because the matrices are small.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    result: dict[str, Any] | None = None
    errors: list[str] = []
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.terminate()

    timer = threading.Timer(LIMIT, expire)
    reader = threading.Thread(target=show_progress, args=(process.stderr, errors))
    timer.start()
    show(f"starting {ranks} ranks")
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
            else:
                show(line.rstrip())
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait()
        reader.join()
        if sys.stdout.isatty():
            print()
    words = "".join(errors[-20:]).strip()
    if expired.is_set():
        raise DemoError(f"{training.program} did not end within {LIMIT:.0f} s\n{words}")
    if code != 0 or result is None:
        raise DemoError(f"{training.program} ended with exit code {code}\n{words}")
    return result


def check(training: Training, result: dict[str, Any]) -> None:
    """Raises DemoError if the weights, the accuracy or the proxies' traffic is wrong."""
    if not result["difference"] <= TOLERANCE:
        raise DemoError(
            f"{training.program}: the weights differ from those of the one-process run by {result['difference']:.1e}, "
            f"expected at most {TOLERANCE:.0e}"
        )
    if not result["accuracy"] >= ACCURACY:
        raise DemoError(f"{training.program}: the accuracy is {result['accuracy']:.3f}, expected at least {ACCURACY}")
    triggers, puts = result["proxy"]["triggers"], result["proxy"]["puts"]
    if result["channel"] == "ProxyChannel" and puts == 0:
        raise DemoError(f"{training.program}: the proxies moved nothing, but should have moved the data")
    if result["channel"] == "SmChannel" and puts > 0:
        raise DemoError(f"{training.program}: the proxies made {puts} puts; expected none: all memory is mapped")
    if result["channel"] == "ProxyChannel" and training.pushes_triggers and triggers == 0:
        raise DemoError(f"{training.program}: no trigger was pushed; the kernels should have pushed some")


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def report(results: list[dict[str, Any]], ranks: int, seconds: float) -> None:
    moved_by = ("triggers", "puts", "by proxy")
    head = ("training", "channel", "exchanges", "payload", *moved_by, "each", "accuracy", "difference")
    rows = [
        (
            str(r["name"]),
            str(r["channel"]),
            f"{r['calls']:,}",
            megabytes(r["payload_bytes"]),
            f"{r['proxy']['triggers']:,}",
            f"{r['proxy']['puts']:,}",
            megabytes(r["proxy"]["bytes"]),
            f"{r['exchange_seconds'] / r['calls'] * 1e3:.2f} ms",
            f"{r['accuracy']:.1%}",
            f"{r['difference']:.0e}",
        )
        for r in results
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    print()
    for row in (head, *rows):
        cells = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    triggers, puts, moved = (sum(r["proxy"][what] for r in results) for what in ("triggers", "puts", "bytes"))
    print(
        f"\npayload: bytes that all {ranks} ranks passed to the collectives. each: time of one exchange, including\n"
        f"the wait for slower ranks. difference: largest difference of a final weight from a training in one process."
    )
    if puts:
        print(
            f"\nThe proxies moved {megabytes(moved)} in {puts:,} puts. Kernels pushed {triggers:,} triggers for them,\n"
            "of 16 bytes each; an all_reduce by proxy needs no triggers: a stream starts it. In the others,\n"
            "kernels read and wrote the peers' mapped memory themselves."
        )
    print(f"All {len(results)} trainings end where one process ends, within {TOLERANCE:.0e}. {seconds:.0f} s in all.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes of each training (default 4)")
    ranks = parser.parse_args().ranks
    print(f"ProxyCCL on {ranks} ranks, {os.cpu_count()} cores: scikit-learn's digits, four trainings", flush=True)
    began = time.monotonic()
    results = []
    try:
        for number, training in enumerate(TRAININGS, 1):
            print(f"\n{number}. {training.title} ({training.channel})", flush=True)
            result = train(training, ranks)
            check(training, result)
            results.append(result)
    except DemoError as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo interrupted", file=sys.stderr)
        return 1
    report(results, ranks, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
