"""Costs that grow with the number of ranks: python benchmarks/scale.py -n 8 16 32

The program starts jobs with increasing numbers of ranks on the host runtime. Each rank is a process, and a node has 8
ranks. The nodes are rehearsed: each is a group of ranks on this machine. With --hosts, ranks of different nodes share
no memory. The program measures for each rank:

- descriptors, mappings, sockets, threads and memory;
- the connections, channels and memory ids of the rank's proxy;
- the time to make the communicator, by phase;
- the times of an exchange of the bootstrap, a barrier, an all_reduce of 1 KiB, and splits;
- the share of a core that the rank takes at rest.

The table shows the maximum over ranks for times, and the median over ranks for other quantities.

The program fits a formula of the number of ranks n to each quantity, by least squares of the relative errors. For times
the formula is a + b n + c n², because all ranks share the machine's cores. For other quantities the formula is a + b n,
or a + b n + c (number of nodes) if jobs with several node sizes were measured. The program prints the formula's values
for 1,024 and 16,384 ranks.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from program import common_arguments, end_if_it_hangs
from start_up import environment

from proxyccl.tools import options
from proxyccl.tools.results import Fields, installed_version, machine, write_json
from proxyccl.tools.tables import Column, Table

_RANK = Path(__file__).with_name("scale_rank.py")
_NODE = 8
_FORETOLD = (1024, 16384)
_HELD = ("descriptors", "sockets", "mappings", "threads", "rss_kib", "pss_kib", "private_kib")
_UNITS = {"kib": (1 / 1024, "MiB"), "s": (1e3, "ms"), "cores": (1e3, "‰ of a core"), "bytes": (1 / 1024, "KiB")}


def run(ranks: int, node: int, seconds: int, kind: str) -> list[Fields]:
    """Runs one job. Returns the results of all ranks. Raises RuntimeError if a rank fails or exceeds the time."""
    with tempfile.TemporaryDirectory(prefix="scale-") as place, contextlib.ExitStack() as running:
        deadline = time.monotonic() + seconds
        processes = []
        log = running.enter_context((Path(place) / "log").open("w+"))
        for rank in range(ranks):
            command = [sys.executable, str(_RANK), place, *map(str, (rank, ranks, node, seconds)), kind]
            env = {**environment(), "OPENBLAS_NUM_THREADS": "1"}  # disables numpy's threads
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            running.callback(process.wait)
            running.callback(process.kill)
            processes.append(process)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        failed = [rank for rank, process in enumerate(processes) if process.poll() != 0]
        if failed:
            log.seek(0)
            raise RuntimeError(f"ranks {failed} of {ranks} failed or were late:\n{log.read()[-4000:]}")
        return [json.loads((Path(place) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def summary(found: list[Fields]) -> Fields:
    """Returns one value for each quantity of a job: for times the maximum over ranks, for other quantities the
    median.
    """
    values: Fields = {}
    for name, first in found[0].items():
        each = [rank[name] for rank in found]
        if isinstance(first, dict):
            values |= {f"{name}: {part}": statistics.median(one[part] for one in each) for part in first}
        elif name != "rank":
            values[name] = max(each) if name.endswith("_s") and "processor" not in name else statistics.median(each)
    values["node_pss_kib"] = sum(rank["used"]["pss_kib"] for rank in found) * _NODE / len(found)
    return values


def fit(rows: list[Fields], name: str) -> Fields:
    """Fits a formula to a quantity over the jobs. Returns the coefficients, the largest relative error, and the
    formula's values for more ranks.
    """
    terms: dict[str, Callable[[float, float], float]] = {"1": lambda *_: 1.0, "n": lambda ranks, _: ranks}
    if name.endswith("_s"):
        terms["n²"] = lambda ranks, _: ranks**2
    elif len({row["node"] for row in rows}) > 1:
        terms["nodes"] = lambda ranks, nodes: nodes
    x = np.array([[term(row["ranks"], row["ranks"] / row["node"]) for term in terms.values()] for row in rows])
    y = np.array([row[name] for row in rows], float)
    weights = 1 / np.maximum(np.abs(y), max(np.abs(y).max() * 1e-3, 1e-12))
    coefficients = np.linalg.lstsq(x * weights[:, None], y * weights, rcond=None)[0]
    coefficients[np.abs(coefficients) * np.abs(x).max(0) < 1e-9 * max(np.abs(y).max(), 1e-9)] = 0  # of rounding alone
    foretold = {
        str(ranks): float(np.dot(coefficients, [term(ranks, ranks / _NODE) for term in terms.values()]))
        for ranks in _FORETOLD
    }
    return {
        "terms": list(terms),
        "coefficients": coefficients.tolist(),
        "worst_error": float(np.max(np.abs((x @ coefficients - y) * weights))),
        "foretold": foretold,
    }


def shown(name: str) -> tuple[float, str]:
    """Returns the factor and the unit with which tables show a quantity."""
    return next((unit for end, unit in _UNITS.items() if name.endswith(f"_{end}")), (1, ""))


def print_tables(rows: list[Fields], fits: Fields) -> None:
    """Prints the measured values, and the formulas that were fitted to them."""
    table = Table(
        [
            Column("quantity", "", 32, left=True),
            *(Column(f"{row['ranks']}", f"by {row['node']}", 8, ".4g") for row in rows),
            Column("a", "", 9, ".3g"),
            Column("b", "n", 9, ".3g"),
            Column("c", "n², nodes", 9, ".3g"),
            Column("error", "", 6, ".0%"),
            *(Column(f"{ranks}", "", 8, ".3g") for ranks in _FORETOLD),
        ]
    )
    table.header()
    for name, fitted in fits.items():
        factor, unit = shown(name)
        coefficients = [factor * each for each in fitted["coefficients"]]
        table.row(
            f"{name.removesuffix('_' + name.rpartition('_')[2]) if unit else name}{f' ({unit})' if unit else ''}",
            *(factor * row[name] for row in rows),
            *coefficients,
            *[None] * (3 - len(coefficients)),
            fitted["worst_error"],
            *(factor * value for value in fitted["foretold"].values()),
        )


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=options.count, nargs="+", default=[8, 16, 32], help="ranks of the jobs")
    parser.add_argument("--nodes", type=options.count, nargs="+", default=[_NODE], help="ranks of a node")
    parser.add_argument("--hosts", action="store_true", help="make each node a host, with libfabric between them")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    facts, began, kind = machine(), time.monotonic(), "hosts" if parsed.hosts else "nodes"
    print(f"# ProxyCCL {installed_version('proxyccl') or ''} scale: jobs of ranks as processes, host runtime")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}", flush=True)
    rows: list[Fields] = []
    for ranks, node in sorted((n, node) for n in parsed.ranks for node in parsed.nodes if n % node == 0):
        try:
            found = run(ranks, node, max(1, round(parsed.seconds + began - time.monotonic())), kind)
        except RuntimeError as error:
            print(f"# {error}")
            break
        rows.append({"ranks": ranks, "node": node, **summary(found)})
        print(f"# {ranks} ranks in {kind} of {node}: {time.monotonic() - began:.1f} s", flush=True)
    if not rows:
        return 1
    names = [name for name in rows[0] if name not in ("ranks", "node")]
    fits = {name: fit(rows, name) for name in names}
    print_tables(rows, fits)
    if parsed.json is not None:
        fields = {"benchmark": f"scale_{kind}", "kind": kind, "runtime": "host", "world_size": rows[-1]["ranks"]}
        write_json(parsed.json, {**fields, "results": rows, "fits": fits})
    return 0


if __name__ == "__main__":
    sys.exit(main())
