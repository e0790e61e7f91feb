"""The shipped rings, semaphores, barriers, packets and failure words under a checker of C++'s memory model.

The device headers and the engine are compiled unchanged, but the compiler's atomic built-ins access memory that Relacy
simulates (weak_memory/checked_builtins.h). Each scenario (weak_memory/scenarios.cpp) is executed many times, with
different schedules and different values of its loads. Then the scenarios are executed with planted bugs, each of which
Relacy must find.

PROXYCCL_MODELS_DEPTH multiplies the executions (make test-models DEPTH=100).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.models.checkers import checkers
from support.models.planted_bugs import Bug, copy_sources, plant, replace
from support.once import made_once, shared_directory
from support.paths import ROOT, TESTS

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="explores the host's platform header")]

MODELS = TESTS / "models/weak_memory"
DEPTH = int(os.environ.get("PROXYCCL_MODELS_DEPTH", "1"))
TIMEOUT = 280.0 if DEPTH == 1 else 3600.0
WARNINGS = ("-Wall", "-Wextra", "-Wno-ignored-qualifiers")

# For each scenario: the bounds on switches between threads in the exhaustive search, if DEPTH is 1 and if it is larger.
BOUNDS = {
    "ring_of_2_with_2_producers": (1, 2),
    "channel_by_the_cpu": (1, 2),
    "tickets_by_the_cpu": (1, 2),
    "semaphores": (3, 4),
    "shared_semaphores": (3, 4),
    "grid": (1, 2),
    "packets_of_16_bytes": (2, 4),
    "packets_of_8_bytes": (3, 4),
    "failed_rank": (3, 4),
    "record": (2, 3),
    "question": (2, 3),
    "announcements": (2, 3),
    "calls": (2, 3),
    "overwritten_calls": (2, 3),
}
# For each scenario: the number of random executions, which have more switches than BOUNDS allows.
RANDOM = {
    "ring_of_2_with_2_producers": 15000,
    "ring_of_2_with_2_producers_and_3_laps": 15000,
    "ring_of_2_with_3_producers": 10000,
    "ring_of_4_with_3_producers": 5000,
    "channel_by_the_cpu": 10000,
    "channel_by_a_stream": 10000,
    "tickets_by_the_cpu": 5000,
    "tickets_by_a_stream": 5000,
    "semaphores": 10000,
    "shared_semaphores": 10000,
    "grid": 20000,
    "packets_of_16_bytes": 10000,
    "packets_of_8_bytes": 10000,
    "abort": 20000,
    "failed_rank": 10000,
    "record": 20000,
    "question": 10000,
    "announcements": 20000,
    "calls": 20000,
    "overwritten_calls": 20000,
}

TRIGGER_STORES = """\
  __atomic_store_n(slot, word0, __ATOMIC_RELAXED);
  __atomic_store_n(slot + 1, word1, __ATOMIC_RELEASE);"""

# From sm_90 on a trigger is stored by one 16-byte access, after a fence that follows the ticket (platform_cuda.h). A
# planted bug leaves out the fence.
WIDE_TRIGGERS = (
    (
        "orderBeforeTrigger() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }",
        "orderBeforeTrigger() { if (checked_planted == 0) __atomic_thread_fence(__ATOMIC_ACQ_REL); }",
    ),
    (
        TRIGGER_STORES,
        "  checked_store_wide(slot, word0, word1, __ATOMIC_RELAXED, CHECKED_HERE);",
    ),
)

TWO_PRODUCERS, THREE_LAPS = "ring_of_2_with_2_producers", "ring_of_2_with_2_producers_and_3_laps"

_REPLY = """__atomic_store_n(&own->address, address, __ATOMIC_RELAXED);
  __atomic_store_n(&own->version, version, __ATOMIC_%s);"""
_HANDLE = """__atomic_store_n(&own->version, version, __ATOMIC_%s);
  __atomic_store_n(&table->changes, table->changes + 1, __ATOMIC_RELEASE);"""

BUGS = (
    Bug(
        TWO_PRODUCERS,
        "the word with the parity is stored first",
        "platform_host.h",
        TRIGGER_STORES,
        "PROXYCCL_STORE(slot + 1, word1, RELEASE, SYSTEM); PROXYCCL_STORE(slot, word0, RELAXED, SYSTEM);",
    ),
    Bug(
        TWO_PRODUCERS,
        "a trigger is stored relaxed",
        "platform_host.h",
        "__atomic_store_n(slot + 1, word1, __ATOMIC_RELEASE);",
        "__atomic_store_n(slot + 1, word1, __ATOMIC_RELAXED);",
    ),
    Bug(
        TWO_PRODUCERS,
        "a trigger is loaded relaxed",
        "ring.h",
        "__atomic_load_n(&slot->word1, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(&slot->word1, __ATOMIC_RELAXED)",
    ),
    Bug(
        TWO_PRODUCERS,
        "the tail is stored relaxed",
        "ring.h",
        "__atomic_store_n(ring->tail, ring->next, __ATOMIC_RELEASE);",
        "__atomic_store_n(ring->tail, ring->next, __ATOMIC_RELAXED);",
    ),
    Bug(
        TWO_PRODUCERS,
        "sync() loads the tail relaxed",
        "fifo.h",
        "(*seen = loadAcquireSystem(tail)) > ticket",
        "(*seen = loadRelaxedSystem(tail)) > ticket",
    ),
    Bug(
        TWO_PRODUCERS,
        "a slot is given back before its trigger is issued",
        "drain.c",
        "if (traced) trace_trigger(record++, trigger);",
        "Ring early = ring; ++early.next; ring_release(&early);",
    ),
    Bug(TWO_PRODUCERS, "the cached tail is never refreshed", "fifo.h", "        refreshTail();", ";"),
    Bug(
        TWO_PRODUCERS,
        "the lock of the refresh is never released",
        "fifo.h",
        "storeReleaseDevice<uint32_t>(refresh_lock, 0);",
        ";",
    ),
    Bug(
        TWO_PRODUCERS,
        "the refresh takes no lock, so the cached tail may go back",
        "fifo.h",
        "exchangeAcquireDevice<uint32_t>(refresh_lock, 1) == 0",
        "true",
    ),
    Bug(
        THREE_LAPS,
        "the lock of the refresh is taken relaxed",
        "fifo.h",
        "exchangeAcquireDevice<uint32_t>(refresh_lock, 1)",
        "exchangeRelaxedDevice<uint32_t>(refresh_lock, 1)",
    ),
    Bug(TWO_PRODUCERS, "a slot too many", "fifo.h", "ticket >= known_tail + size", "ticket > known_tail + size"),
    Bug(
        TWO_PRODUCERS,
        "a slot too many after a wait",
        "fifo.h",
        "ticket < loadAcquireDevice(tail_cache) + (1ull << size_log2)",
        "ticket <= loadAcquireDevice(tail_cache) + (1ull << size_log2)",
    ),
    Bug(
        TWO_PRODUCERS,
        "the producer's parity is a lap off",
        "fifo.h",
        "~(ticket >> size_log2) & 1",
        "(ticket >> size_log2) & 1",
    ),
    Bug(
        TWO_PRODUCERS,
        "the consumer's parity changes a slot late",
        "ring.h",
        "~(ring->next >> ring->size_log2) & 1",
        "~((ring->next - 1) >> ring->size_log2) & 1",
    ),
    Bug(
        "channel_by_the_cpu",
        "the engine stores a word relaxed",
        "order.h",
        "__atomic_store_n(word, value, __ATOMIC_RELEASE);",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED);",
    ),
    Bug(
        "channel_by_the_cpu",
        "a flush loads its word relaxed",
        "proxy_channel.h",
        "(*seen = loadAcquireSystem(word)) > ticket",
        "(*seen = loadRelaxedSystem(word)) > ticket",
    ),
    Bug(
        "channel_by_the_cpu",
        "a flush is complete with the trigger before it",
        "proxy_channel.h",
        "(*seen = loadAcquireSystem(word)) > ticket",
        "(*seen = loadAcquireSystem(word)) + 1 > ticket",
    ),
    Bug(
        "tickets_by_the_cpu",
        "a wait for a ticket loads its word relaxed",
        "proxy_channel.h",
        "(*seen = loadAcquireSystem(word)) > ticket",
        "(*seen = loadRelaxedSystem(word)) > ticket",
    ),
    Bug(
        "tickets_by_a_stream",
        "a ticket is complete before the copy",
        "poll.c",
        "completed >= channel->awaited.triggers",
        "completed + 1 >= channel->awaited.triggers",
    ),
    Bug(
        "channel_by_a_stream",
        "the CPU stores a signal while the stream copies",
        "copy_transport.c",
        "if (copy_idle(base)) {\n    word_store(address, value);\n    return 0;\n  }",
        "word_store(address, value); return 0;",
    ),
    Bug(
        "semaphores",
        "a signal is stored relaxed",
        "semaphore.h",
        "storeReleaseSystem<uint64_t>(remote_inbound, ++*outbound);",
        "storeRelaxedSystem<uint64_t>(remote_inbound, ++*outbound);",
    ),
    Bug(
        "semaphores",
        "a wait loads its word relaxed",
        "semaphore.h",
        "loadAcquireSystem(p)",
        "loadRelaxedSystem(p)",
    ),
    Bug(
        "shared_semaphores",
        "poll() loads its word relaxed",
        "shared_semaphore.h",
        "loadAcquireSystem(inbound) > taken",
        "loadRelaxedSystem(inbound) > taken",
    ),
    Bug(
        "shared_semaphores",
        "a signal adds relaxed",
        "shared_semaphore.h",
        "addReleaseSystem(remote_inbound, 1);",
        "addRelaxedSystem(remote_inbound, 1);",
    ),
    Bug(
        "shared_semaphores",
        "a signal stores the count that it has seen",
        "shared_semaphore.h",
        "addReleaseSystem(remote_inbound, 1);",
        "storeReleaseSystem<uint64_t>(remote_inbound, loadRelaxedSystem(remote_inbound) + 1);",
    ),
    Bug(
        "grid",
        "a block arrives relaxed",
        "sync.h",
        "fetchAddAcqRelDevice<uint32_t>(&arrived, 1)",
        "fetchAddRelaxedDevice<uint32_t>(&arrived, 1)",
    ),
    Bug(
        "grid",
        "the generation is stored relaxed",
        "sync.h",
        "storeReleaseDevice<uint32_t>(&generation, now + 1);",
        "storeRelaxedDevice<uint32_t>(&generation, now + 1);",
    ),
    Bug(
        "grid",
        "the generation is loaded relaxed",
        "sync.h",
        "(*seen = loadAcquireDevice(&generation)) != now",
        "(*seen = loadRelaxedDevice(&generation)) != now",
    ),
    Bug(
        "grid",
        "the arrivals are reset after the generation",
        "sync.h",
        "storeRelaxedDevice<uint32_t>(&arrived, 0);",
        "storeReleaseDevice<uint32_t>(&generation, now + 1); storeRelaxedDevice<uint32_t>(&arrived, 0);",
    ),
    Bug(
        "packets_of_16_bytes",
        "one half's flag counts for both",
        "packet.h",
        "low >> 32 == flag && high >> 32 == flag",
        "low >> 32 == flag",
    ),
    Bug(
        "packets_of_8_bytes",
        "any flag but the last counts",
        "packet.h",
        "word >> 32 == flag_",
        "word >> 32 >= flag_ - 1",
    ),
    Bug(
        "abort",
        "a stopped wait loads the abort word relaxed",
        "wait.h",
        "         loadAcquireSystem(&control->abort) != PROXYCCL_OK",
        "loadRelaxedSystem(&control->abort) != PROXYCCL_OK",
    ),
    Bug(
        "abort",
        "the abort word is stored relaxed",
        "wait.h",
        "storeReleaseSystem(&control->peers[i]->abort, code);",
        "storeRelaxedSystem(&control->peers[i]->abort, code);",
    ),
    Bug(
        "failed_rank",
        "the name of the failed rank is stored relaxed",
        "wait.h",
        "storeReleaseSystem(failed_rank, control->rank + 1);",
        "storeRelaxedSystem(failed_rank, control->rank + 1);",
    ),
    Bug(
        "abort",
        "waits are stopped before the failed rank is named",
        "wait.h",
        "&control->peers[i]->failed_rank",
        "storeReleaseSystem(&control->peers[i]->abort, code), &control->peers[i]->failed_rank",
    ),
    Bug(
        "record",
        "the record is published relaxed",
        "wait.h",
        "storeReleaseSystem<uint32_t>(&record->state, PROXYCCL_RECORD_VALID);",
        "storeRelaxedSystem<uint32_t>(&record->state, PROXYCCL_RECORD_VALID);",
    ),
    Bug(
        "record",
        "two failures fill one record",
        "wait.h",
        "compareExchangeSystem<uint32_t>(&record->state, PROXYCCL_RECORD_EMPTY, PROXYCCL_RECORD_CLAIMED)",
        "true",
    ),
    Bug(
        "question",
        "an answer is published relaxed",
        "wait.h",
        "storeReleaseSystem(&wait->answered, question);",
        "storeRelaxedSystem(&wait->answered, question);",
    ),
    Bug(
        "announcements",
        "a handle is visible before its entry is odd",
        "announcements.c",
        "__atomic_thread_fence(__ATOMIC_RELEASE);",
        ";",
    ),
    Bug(
        "announcements",
        "the version is read again before the handle",
        "announcements.c",
        "__atomic_thread_fence(__ATOMIC_ACQUIRE);",
        ";",
    ),
    Bug(
        "announcements",
        "a reply is published relaxed",
        "announcements.c",
        _REPLY % "RELEASE",
        _REPLY % "RELAXED",
    ),
    Bug(
        "announcements",
        "a handle's version is published relaxed",
        "announcements.c",
        _HANDLE % "RELEASE",
        _HANDLE % "RELAXED",
    ),
    Bug(
        "calls",
        "a rank looks at its peers' logs before it has written its own",
        "calls.c",
        "__atomic_thread_fence(__ATOMIC_SEQ_CST);",
        "__atomic_thread_fence(__ATOMIC_ACQ_REL);",
    ),
    Bug(
        "calls",
        "the fields of a call may come after its stamp",
        "calls.c",
        "__atomic_store_n(&entry->stamp, stamp, __ATOMIC_RELEASE);",
        "__atomic_store_n(&entry->stamp, stamp, __ATOMIC_RELAXED);",
    ),
    Bug(
        "overwritten_calls",
        "a call that is overwritten keeps its stamp meanwhile",
        "calls.c",
        "__atomic_store_n(&entry->stamp, 0, __ATOMIC_RELAXED);",
        "",
    ),
    Bug(
        "overwritten_calls",
        "the fields of a call may come before the end of the one that they overwrite",
        "calls.c",
        "__atomic_thread_fence(__ATOMIC_RELEASE);",
        "",
    ),
    Bug(
        "overwritten_calls",
        "a call's stamp is read again before its fields are",
        "calls.c",
        "__atomic_thread_fence(__ATOMIC_ACQUIRE);",
        "",
    ),
)


def compile_object(source: str, directory: Path, *flags: str) -> Path:
    """Compiles a file of the models, with the shipped sources that are copied into the directory."""
    made = directory / f"{source}.o"
    compiler = ["g++", "-std=c++17"] if source.endswith(".cpp") else ["gcc", "-std=gnu11"]
    includes = [
        f"-I{MODELS}",
        f"-I{directory}/proxy/engine",
        f"-I{directory}/proxy/segment",
        f"-I{directory}/device/include",
        f"-I{ROOT}/device",
    ]
    # Optimising explore.cpp pays, because it is compiled once; the other files are compiled three times.
    level = "-O1" if DEPTH > 1 else "-Og" if source == "explore.cpp" else "-O0"
    run([*compiler, level, *WARNINGS, *flags, *includes, "-c", str(MODELS / source), "-o", str(made)])
    return made


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


def link(directory: Path, explorer: Path, *flags: str) -> None:
    """Compiles the scenarios and the engine with the sources in the directory, and links the program."""
    prelude = ("-include", str(MODELS / "checked_builtins.h"))
    objects = [compile_object(source, directory, *prelude, *flags) for source in ("scenarios.cpp", "engine.c")]
    run(["g++", *map(str, [explorer, *objects]), "-o", str(directory / "explore")])


def build(directory: Path) -> None:
    """Builds three programs: from the sources as they are, with wide triggers, and with planted bugs."""
    shipped, wide, planted = (directory / name for name in ("shipped", "wide", "planted"))
    for copy in (shipped, wide, planted):
        copy_sources(copy)
        # checked_builtins.h replaces this header's proxyccl_memmove
        (copy / "device/include/proxyccl/platform_host_memmove.h").write_text("#pragma once\n")
    explorer = compile_object("explore.cpp", shipped, "-isystem", str(checkers() / "usr/include"), "-w")
    link(shipped, explorer)
    for text, other in WIDE_TRIGGERS:
        replace(wide, "platform_host.h", text, other)
    link(wide, explorer, "-DPROXYCCL_WIDE_TRIGGERS")
    plant(planted, BUGS, "checked_planted")
    link(planted, explorer)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkers()
    return made_once(shared_directory(tmp_path_factory) / "weak-memory", build)


def explore(program: Path, *arguments: str | int) -> tuple[bool, str]:
    """Runs the explorer. Returns whether all executions were right, and the explorer's output."""
    done = subprocess.run(
        [str(program / "explore"), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.returncode == 0, done.stdout


@pytest.mark.parametrize("scenario", BOUNDS)
def test_every_execution_within_a_bound_of_switches_is_right(programs: Path, scenario: str) -> None:
    right, output = explore(programs / "shipped", scenario, "bound", BOUNDS[scenario][DEPTH > 1])
    assert right, output


@pytest.mark.parametrize("scenario", RANDOM)
def test_executions_at_random_are_right(programs: Path, scenario: str) -> None:
    right, output = explore(programs / "shipped", scenario, "random", RANDOM[scenario] * DEPTH)
    assert right, output


@pytest.mark.parametrize("scenario", [scenario for scenario in RANDOM if scenario.startswith("ring")])
def test_triggers_of_one_16_byte_store_behind_a_fence_are_right(programs: Path, scenario: str) -> None:
    right, output = explore(programs / "wide", scenario, "random", RANDOM[scenario] * DEPTH)
    assert right, output


def test_a_missing_fence_before_such_a_trigger_is_found(programs: Path) -> None:
    right, output = explore(programs / "wide", TWO_PRODUCERS, "random", 50000, 1)
    assert not right, output


@pytest.mark.parametrize("number", range(1, len(BUGS) + 1), ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(programs: Path, number: int) -> None:
    right, output = explore(programs / "planted", BUGS[number - 1].scenario, "random", 50000, number)
    assert not right, output
