"""`make demo`: trains two classifiers on 4 ranks, over both kinds of channel, and reports what moved.

It starts the two digits examples under mpiexec, shows their progress, and checks what they report: each one's final
weights against its own one-process run, the accuracy, and that triggers moved the data where they should have, and
only there. Ends with exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent
LIMIT = 120.0  # seconds that one training may take on a machine that does much else
TOLERANCE = 1e-5
ACCURACY = 0.9


@dataclass(frozen=True)
class Training:
    """One run of an example."""

    title: str
    program: str
    options: tuple[str, ...]
    channel: str


MOE = ("--epochs", "12")  # where it has learnt what it will; an epoch is 12 batches of 6 collectives
TRAININGS = (
    Training("Data-parallel: gradients are summed by all_reduce", "digits_data_parallel.py", (), "SmChannel"),
    Training("The same, by triggers", "digits_data_parallel.py", ("--algorithm", "proxy"), "ProxyChannel"),
    Training("Mixture of experts: samples travel by dispatch and combine", "moe_digits.py", MOE, "SmChannel"),
    Training("The same, by triggers", "moe_digits.py", (*MOE, "--proxied"), "ProxyChannel"),
)


class DemoError(Exception):
    """Something did not work as it should; the message says what."""


def show(line: str) -> None:
    """Progress: on a terminal a line replaces the one before."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {line}", end="", flush=True)
    else:
        print(f"  {line}", flush=True)


def train(training: Training, ranks: int) -> dict[str, Any]:
    """Runs one training and returns what its RESULT line says.

    Raises:
        DemoError: it failed, did not end in time, or gave no result.
    """
    directories = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=directories)
    if mpiexec is None:
        raise DemoError("mpiexec is missing; run `make demo`, which installs it")
    program = EXAMPLES / training.program
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(program), *training.options]
    # The matrices are small: threads of numpy's own would only take the cores from the ranks.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    result: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.terminate()

        timer = threading.Timer(LIMIT, expire)
        timer.start()
        show(f"starting {ranks} ranks")
        try:
            assert process.stdout is not None
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
            if sys.stdout.isatty():
                print()
        errors.seek(0)
        words = "\n".join(errors.read().strip().splitlines()[-20:])
    if expired.is_set():
        raise DemoError(f"{training.program} did not end within {LIMIT:.0f} s\n{words}")
    if code != 0 or result is None:
        raise DemoError(f"{training.program} ended with exit code {code}\n{words}")
    return result


def check(training: Training, result: dict[str, Any]) -> None:
    """Raises DemoError unless the result is what the training promises."""
    if not result["difference"] <= TOLERANCE:
        raise DemoError(
            f"{training.program}: the weights are {result['difference']:.1e} from the one-process run's, "
            f"more than {TOLERANCE:.0e}"
        )
    if not result["accuracy"] >= ACCURACY:
        raise DemoError(f"{training.program}: the accuracy is {result['accuracy']:.3f}, below {ACCURACY}")
    triggers = result["proxy"]["triggers"]
    if result["channel"] == "ProxyChannel" and triggers == 0:
        raise DemoError(f"{training.program}: no trigger was pushed, though the proxy should have moved the data")
    if result["channel"] == "SmChannel" and triggers > 0:
        raise DemoError(f"{training.program}: {triggers} triggers were pushed, though all memory is mapped")


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def report(results: list[dict[str, Any]], ranks: int, seconds: float) -> None:
    head = ("training", "channel", "exchanges", "payload", "triggers", "by proxy", "each", "accuracy", "difference")
    rows = [
        (
            str(r["name"]),
            str(r["channel"]),
            f"{r['calls']:,}",
            megabytes(r["payload_bytes"]),
            f"{r['proxy']['triggers']:,}",
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
    triggers = sum(r["proxy"]["triggers"] for r in results)
    moved = sum(r["proxy"]["bytes"] for r in results)
    print(
        f"\npayload: what all {ranks} ranks handed to the collectives. each: time of one exchange, with the wait for\n"
        f"slower ranks. difference: the largest between a final weight and that of the same training in one process."
    )
    if triggers:
        print(
            f"\nKernels pushed {triggers:,} triggers of 16 bytes, and the proxies moved {megabytes(moved)} for them.\n"
            f"Where peers' memory is mapped, kernels read and wrote it themselves and pushed none."
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
