"""Uses new torch groups in random orders on several threads, and checks each result.

    python tests/support/faults/torch_groups.py --count 1000 --seed 1

A seed determines a case. Ranks, which are processes, make equal and overlapping groups, and use each new group in
asynchronous collectives and transfers, on several threads and in a different order on every rank. Then the ranks
destroy the groups, and may make new groups. Findings are hangs, errors and wrong results. Without torch, nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_CASE_SECONDS = 180.0
_TIMEOUT = timedelta(seconds=60)
_MOST_OUTPUT = 4000


@dataclass(frozen=True)
class Case:
    """The parameters of a case, which are the same on all ranks.

    Attributes:
        ranks: number of ranks.
        groups: the ranks of each group.
        warm: whether the default group is used first, so that the other groups are split from it.
        threads: number of threads per rank that use the groups.
        turns: number of times that the groups are made, used and destroyed.
    """

    ranks: int
    groups: tuple[tuple[int, ...], ...]
    warm: bool
    threads: int
    turns: int

    @classmethod
    def of(cls, seed: int) -> Case:
        """Returns the case of a seed."""
        chance = random.Random(seed)
        ranks = chance.randint(2, 4)
        everyone = range(ranks)
        groups = [tuple(everyone), (0, 1), (0, 1)]
        groups += [
            tuple(sorted(chance.sample(everyone, chance.randint(2, ranks)))) for _ in range(chance.randint(1, 5))
        ]
        return cls(ranks, tuple(groups), chance.random() < 0.7, chance.randint(1, 3), chance.randint(1, 2))


def run_rank(seed: int) -> None:
    """Runs a rank's part of a case. Raises if there is a finding."""
    import torch
    import torch.distributed as dist

    import proxyccl.torch  # noqa: F401  (the import registers the backend)

    case = Case.of(seed)
    rank = int(os.environ["RANK"])
    chance = random.Random(seed * 1000 + rank)
    for turn, port in enumerate(os.environ["PORTS"].split()):
        os.environ["MASTER_PORT"] = port
        dist.init_process_group("proxyccl", timeout=_TIMEOUT)
        if case.warm:
            dist.barrier()
        made = [dist.new_group(list(members)) for members in case.groups]
        uses: list[Callable[[], Callable[[], None]]] = []
        for number, (members, group) in enumerate(zip(case.groups, made, strict=True)):
            if rank in members:
                uses += [_reduce(dist, torch, number, members, group, rank, turn)]
                uses += [_ring(dist, torch, number, members, group, rank, turn)]
        chance.shuffle(uses)
        _on_threads(uses, case.threads)
        dist.barrier()
        dist.destroy_process_group()


def _reduce(dist: Any, torch: Any, number: int, members: Any, group: Any, rank: int, turn: int) -> Any:
    def begin() -> Callable[[], None]:
        base = 1000.0 * number + 100.0 * turn
        x = torch.full((37,), base + rank)
        work = dist.all_reduce(x, group=group, async_op=True)

        def check() -> None:
            work.wait()
            expected = sum(base + member for member in members)
            assert (x == expected).all(), f"group {number} of {members}: {x[0]}, expected {expected}"

        return check

    return begin


def _ring(dist: Any, torch: Any, number: int, members: Any, group: Any, rank: int, turn: int) -> Any:
    def begin() -> Callable[[], None]:
        base, place = 1000.0 * number + 100.0 * turn, members.index(rank)
        right, left = members[(place + 1) % len(members)], members[place - 1]
        out = torch.full((19,), -1.0)
        works = [
            dist.irecv(out, left, group=group),
            dist.isend(torch.full((19,), base + rank), right, group=group),
        ]

        def check() -> None:
            for work in works:
                work.wait()
            assert (out == base + left).all(), f"group {number} of {members}: {out[0]}, expected {base + left}"

        return check

    return begin


def _on_threads(uses: list[Callable[[], Callable[[], None]]], count: int) -> None:
    """Splits the uses between `count` threads. Each thread begins all its uses in order, then checks their results."""
    errors: list[BaseException] = []

    def run(share: list[Callable[[], Callable[[], None]]]) -> None:
        try:
            for check in [begin() for begin in share]:
                check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(uses[i::count],)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in free]


def run_case(seed: int) -> str:
    """Runs a case's ranks. Returns the finding, or "" if there is none."""
    case = Case.of(seed)
    ports = " ".join(map(str, _free_ports(case.turns)))
    started = []
    for rank in range(case.ranks):
        places = {"RANK": rank, "WORLD_SIZE": case.ranks, "MASTER_ADDR": "127.0.0.1", "PORTS": ports}
        environment = {**os.environ, **{name: str(value) for name, value in places.items()}, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", "--seed", str(seed)]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    findings = []
    for rank, process in enumerate(started):
        try:
            output, _ = process.communicate(timeout=_CASE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            findings.append(f"rank {rank} did not end: {output[-_MOST_OUTPUT:]}")
        else:
            if process.returncode:
                findings.append(f"rank {rank} ended with {process.returncode}: {output[-_MOST_OUTPUT:]}")
    return "\n".join(findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help="run one rank of the seed's case, for the program itself")
    given = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(f"torch groups are skipped: {sys.executable} has no torch")
        return 0
    if given.rank:
        run_rank(given.seed)
        return 0
    found = 0
    for seed in range(given.seed, given.seed + given.count):
        if finding := run_case(seed):
            found += 1
            print(f"seed {seed}, {Case.of(seed)}: {finding}", flush=True)
    print(f"torch groups: {given.count} cases, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
