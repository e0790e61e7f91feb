"""Protocols between processes and machines as models for SPIN, which visits every reachable state.

A C program prints the constants of the models (protocols/*.pml) from the shipped headers. Each model is verified
without a bug, and then with each of its planted bugs (BUG(n) in the model), which SPIN must find.

If PROXYCCL_MODELS_DEPTH is more than 1, larger models are verified too (make test-models DEPTH=100).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.models.checkers import checkers
from support.once import made_once, shared_directory
from support.paths import ROOT, TESTS

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="needs no device")]

MODELS = TESTS / "models/protocols"
TIMEOUT = 280.0
DEEP = int(os.environ.get("PROXYCCL_MODELS_DEPTH", "1")) > 1

# For each verifier: the model, and the sizes with which it is compiled.
VERIFIERS = {
    "staged, both sides send": ("staged", ("RING=2", "PUTS=2")),
    "staged, both sides send in a ring with room": ("staged", ("RING=3", "PUTS=2")),
    "staged, one side sends several laps": ("staged", ("RING=2", "PUTS=3", "REPLIES=1")),
    "staged, one side sends many laps": ("staged", ("RING=2", "PUTS=4", "REPLIES=1")),
    "staged, few messages without a credit": ("staged", ("RING=6", "PUTS=3", "REPLIES=1", "MESSAGES=1")),
    "staged, both sides send few messages without a credit": ("staged", ("RING=6", "PUTS=3", "MESSAGES=1")),
    "gets, room for one message": ("gets", ("OPERATIONS=2", "MORE=3", "ROOM=1", "GETS=1")),
    "gets, room for several": ("gets", ("OPERATIONS=2", "MORE=3", "ROOM=3", "GETS=2")),
    "gets, both sides do more in room for one message": ("gets", ("ROOM=1", "GETS=1")),
    "gets, both sides do more in room for several": ("gets", ("ROOM=3", "GETS=2")),
    "exchange": ("exchange", ()),
    "close": ("close", ()),
    "survivors, nobody late": ("survivors", ("DEATHS=2",)),
    "survivors, some late": ("survivors", ("DEATHS=0", "LATE=1", "ATTEMPTS=1")),
    "survivors, some late twice": ("survivors", ("DEATHS=0", "LATE=1", "ATTEMPTS=2")),
    "reordering": ("reordering", ()),
    "packets": ("packets", ()),
    "rails": ("rails", ()),
    "rails, three": ("rails", ("RAILS=3", "ROUNDS=1", "FAILURES=2", "RETURNS=0")),
}
if DEEP:
    VERIFIERS |= {
        "staged, both sides send more": ("staged", ("RING=2", "PUTS=3")),
        "staged, one side sends more": ("staged", ("RING=4", "PUTS=6", "REPLIES=1")),
        "gets, more of them": ("gets", ("OPERATIONS=3", "MORE=5", "ROOM=2", "GETS=2")),
        "exchange, more of them": ("exchange", ("EXCHANGES=5",)),
        "rails, more rounds": ("rails", ("ROUNDS=4",)),
        "rails, more failures": ("rails", ("ROUNDS=1", "FAILURES=2")),
        "survivors, some late, one ends": ("survivors", ("DEATHS=1", "LATE=1", "ATTEMPTS=2")),
    }

# For each planted bug: the verifier that must find it, and the bug's number in the model.
BUGS = {
    "the sender takes the ring for longer than it is": ("staged, one side sends several laps", 1),
    "a message is posted before it is copied": ("staged, both sides send", 2),
    "a place is free before its requests are complete": ("staged, both sides send", 3),
    "the receiver's window is one message short": ("staged, few messages without a credit", 4),
    "credits wait for room to send": ("staged, both sides send", 5),
    "a message is credited before it is placed": ("staged, both sides send", 6),
    "a credit too many": ("staged, one side sends several laps", 7),
    "a count that is half written is believed": ("staged, one side sends several laps", 8),
    "a request is credited when it is answered": ("gets, room for one message", 1),
    "a get is answered before what came before it is placed": ("gets, room for several", 2),
    "a put or signal does not wait for gets": ("gets, room for several", 3),
    "gets are asked for without a limit": ("gets, room for several", 4),
    "nobody looks whether a peer has left": ("exchange", 1),
    "a peer that left after the exchange counts as missing": ("exchange", 2),
    "a rank leaves before it tells its exchanges": ("exchange", 3),
    "nobody tells that it waits for another communicator": ("close", 1),
    "memory is freed while a peer waits elsewhere": ("close", 2),
    "a rank waits for peers that wait elsewhere": ("close", 3),
    "an answer stands before it is written": ("survivors, nobody late", 1),
    "a rank believes its own answer": ("survivors, some late", 2),
    "a rank goes on that is not a member": ("survivors, some late", 3),
    "a rank that has joined believes that all have": ("survivors, nobody late", 4),
    "an outcome is settled twice": ("survivors, nobody late", 5),
    "a branch alone orders a trigger's first word": ("reordering", 1),
    "no register waits for a row that is loaded": ("reordering", 2),
    "nothing orders a row's reuse after its flag": ("reordering", 3),
    "a kernel begins before the program's has ended": ("reordering", 4),
    "no fence follows the packets that are cleared": ("reordering", 5),
    "a branch alone orders packets behind cleared ones": ("reordering", 6),
    "a call is looked for without a full fence": ("reordering", 7),
    "a block's number is read before the block is copied": ("reordering", 8),
    "a block is overwritten before it is revoked": ("reordering", 9),
    "a block's number is read before the transfer is counted": ("reordering", 10),
    "a transfer is no longer counted before the block is copied": ("reordering", 11),
    "the counts are read before the block is revoked": ("reordering", 12),
    "a device copies a block after the process has ended": ("reordering", 13),
    "a block is written before its number is read": ("reordering", 14),
    "the end of a lease is compared before the block is copied": ("reordering", 15),
    "a block's number is read before the end of its lease": ("reordering", 16),
    "a later grant's lease is stored before the word is cleared": ("reordering", 17),
    "packets are never cleared": ("packets", 1),
    "packets of one parity are cleared": ("packets", 2),
    "the last flag of a lap is 0": ("packets", 3),
    "packets are cleared once a lap": ("packets", 4),
    "a signal does not wait for the part on the other rail": ("rails", 1),
    "parts are posted again before the peer has answered": ("rails", 2),
    "parts that the peer has are posted again": ("rails", 3),
    "the peer's words are read before it has answered": ("rails", 4),
    "the peer answers before its queue pair is stopped": ("rails", 5),
    "a queue pair is connected again before the peer's is stopped": ("rails", 6),
    "a message on a rail that fails is not sent again": ("rails, three", 7),
    "parts are moved before the parts that were moved earlier and whose rail has failed": ("rails, three", 8),
}


def run(command: list[str], directory: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(own: Path) -> None:
    """Builds a verifier in the directory `own`, which has the verifier's name."""
    model, sizes = VERIFIERS[own.name]
    includes = [f"-I{ROOT / place}" for place in ("device/include", "proxy/engine", "proxy/segment")]
    shutil.copytree(MODELS, own, dirs_exist_ok=True)
    run(["gcc", *includes, str(MODELS / "constants.c"), "-o", "constants"], own)
    (own / "constants.h").write_text(run(["./constants"], own))
    run([str(checkers() / "usr/bin/spin"), *(f"-D{size}" for size in sizes), "-a", f"{model}.pml"], own)
    # Safety properties suffice, because an endless wait is a deadlock. For few states, compiling with -O0 saves time.
    level = "-O2" if DEEP else "-O0"
    run(["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "pan.c", "-o", "verify"], own)


@pytest.fixture(scope="session")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory in which each verifier's first test builds the verifier."""
    checkers()
    return made_once(shared_directory(tmp_path_factory) / "protocols", lambda _: None)


def verify(directory: Path, bug: int = 0) -> str:
    """Runs a verifier, with a planted bug if `bug` is not 0. Returns SPIN's report: the number of states, and the first
    error.
    """
    table = "-w18" if bug else "-w22"  # log2 of the hash table's slots; a search that finds a bug needs few
    report = run(["./verify", "-m1000000", table], made_once(directory, build), BUG=str(bug))
    assert "max search depth too small" not in report, report
    return report


# Larger models are verified without planted bugs, because smaller sizes of the same models find every bug.
LARGE = {
    "staged, both sides send in a ring with room",
    "staged, one side sends many laps",
    "staged, both sides send few messages without a credit",
    "gets, both sides do more in room for one message",
    "gets, both sides do more in room for several",
    "survivors, some late twice",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LARGE and not DEEP else []) for name in VERIFIERS]
)
def test_every_state_is_right(verifiers: Path, name: str) -> None:
    report = verify(verifiers / name)
    assert "errors: 0" in report, report


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(verifiers: Path, bug: str) -> None:
    name, number = BUGS[bug]
    report = verify(verifiers / name, number)
    assert "errors: 1" in report, report
