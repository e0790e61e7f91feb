"""How other processes observe a proxy: finding proxies, counters, rings, `proxyccl top` and the metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import (
    ArgumentError,
    Communicator,
    HandlerError,
    ProxyService,
    ResourceError,
    Runtime,
    ThreadBootstrap,
    TriggerError,
)
from proxyccl.channels.proxy_channel import free_handles
from proxyccl.channels.segment.published import find_ranks
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.metrics import metrics_text, serve
from proxyccl.proxy.observe.publications import Description, Publication
from proxyccl.proxy.observe.rates import rates_between
from proxyccl.proxy.observe.reader import (
    ChannelView,
    ConnectionView,
    Observer,
    RingView,
    ServiceView,
    WorkerView,
    snapshots,
)
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.tools.communicators import device_memory
from proxyccl.tools.top import short, table_of
from support.daemons import running_daemon
from support.device_arrays import barrier, on_device, on_host
from support.devices import ON_HOST, rank_runtime
from support.observing import KERNELS, called, channels_of, command, look, output_of
from support.ranks import Gate, Ranks
from support.running import TIMEOUT, run_ranks, wait_for

pytestmark = pytest.mark.own_proxy(reason="looks in its own directory, and starts a daemon if it needs one")

MEGABYTES = 8 << 20


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "proxyccl"


# -- views of a proxy ---


def test_a_look_finds_what_a_known_number_of_triggers_did() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        comm.compile(KERNELS, "mixed")(1, 1, channels, 7, 5, 3)
        comm.synchronize()
        wait_for(lambda: look(comm).connections[0].completed == 15, "the proxy sees that all is complete")
        view = look(comm)
        (channel,), (connection,), (ring,) = view.channels, view.connections, view.rings
        assert (channel.triggers, channel.puts, channel.bytes, channel.signals) == (15, 7, 700, 5)
        assert (channel.flushes, channel.errors) == (3, 0)
        assert view.connection_of(channel) == connection
        assert (connection.peer, connection.transport) == (1 - comm.rank, channels[0].transport)
        assert (connection.outstanding, connection.errors) == (0, 0)
        assert (ring.taken, ring.full, ring.size) == (15, 0, 8192)
        assert view.publication.description == Description.of_this_program(comm.rank, 2, comm.job)
        barrier(comm)

    run_ranks(2, body)


def test_a_look_finds_how_full_a_ring_is() -> None:
    with Gate() as gate:

        def body(comm: Communicator) -> None:
            channel = comm.handler_channel(lambda _: gate.wait())
            comm.compile(KERNELS, "custom")(1, 1, channel, 16)
            wait_for(lambda: look(comm).rings[0].full == 16, "the ring is full")
            view = look(comm)
            assert view.rings[0].taken == 0
            assert view.channels[0].connection is None
            gate.open()
            comm.synchronize()
            wait_for(lambda: look(comm).rings[0].taken == 16, "the ring is empty")
            assert look(comm).rings[0].full == 0
            assert look(comm).channels[0].triggers == 16

        run_ranks(1, body, fifo_size=16)


@pytest.mark.parametrize("count", range(9))
def test_a_ring_of_any_fill_is_counted(count: int) -> None:
    with Gate() as gate:

        def body(comm: Communicator) -> None:
            kernel = comm.compile(KERNELS, "custom")
            channel = comm.handler_channel(lambda trigger: gate.wait() if trigger.size == 0 else None)
            others = comm.handler_channel(lambda _: None)
            kernel(1, 1, others, 5)  # moves the ring's tail, so that later triggers wrap around the ring's end
            comm.synchronize()
            wait_for(lambda: look(comm).rings[0].taken == 5, "the first triggers are taken")
            kernel(1, 1, channel, count)
            comm.synchronize()
            assert look(comm).rings[0].full == count
            gate.open()

        run_ranks(1, body, fifo_size=8)


def test_a_worker_that_has_nothing_to_do_is_seen_to_idle() -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        wait_for(lambda: look(comm).workers[0].sleeps > 10, "the worker sleeps")
        (worker,) = look(comm).workers
        assert 0 < worker.slept_ns <= worker.idle_ns <= worker.age_ns
        assert worker.looks > worker.sleeps
        barrier(comm)

    run_ranks(2, body)


def test_a_worker_that_has_ended_is_seen_to_do_nothing() -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        before = look(comm)
        comm.abort("enough")
        wait_for(lambda: look(comm).workers[0].age_ns == 0, "the worker has ended")
        (worker,) = rates_between(before, look(comm)).workers
        assert worker.busy == 0

    run_ranks(1, body)


def test_a_channel_begins_at_zero_where_another_had_its_id() -> None:
    def body(comm: Communicator) -> None:
        ids = []
        for _ in range(2):
            channels = channels_of(comm)
            assert look(comm).channels[0].triggers == 0
            comm.compile(KERNELS, "mixed")(1, 1, channels, 3, 2, 1)
            comm.synchronize()
            assert channels[0].counters.puts == 3
            ids.append(look(comm).channels[0].id)
            comm.drain()
            barrier(comm)
            free_handles(comm.group, {1 - comm.rank: list(channels)})
        assert ids[0] == ids[1]

    run_ranks(2, body)


def test_a_flush_that_waits_for_data_is_timed() -> None:
    def copying(rank: int) -> Runtime | None:
        return HostRuntime(async_copies=True) if ON_HOST else rank_runtime(rank)

    def body(comm: Communicator) -> None:
        channels = channels_of(comm, MEGABYTES)
        comm.compile(KERNELS, "flush_large")(1, 1, channels, MEGABYTES, 5)
        comm.synchronize()
        wait_for(lambda: look(comm).channels[0].timed_flushes > 0, "a flush is timed")
        (channel,) = look(comm).channels
        assert channel.timed_flushes <= channel.flushes == 5
        assert channel.flush_ns > 1000 * channel.timed_flushes  # a flush waits more than 1 µs for a copy of 8 MiB
        barrier(comm)

    with Ranks(2, make_runtime=copying) as ranks:
        ranks.run(body)


def test_a_trigger_that_is_refused_counts_as_an_error() -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(8, "uint8"))
        barrier(comm)
        if comm.rank == 0:
            comm.compile(KERNELS, "mixed")(1, 1, channels, 1, 0, 0)  # puts 100 bytes from a source of 8 bytes
            wait_for(lambda: comm.group.failure.aborted, "the trigger is refused")
            assert look(comm).channels[0].errors == 1
        comm.synchronize()

    with pytest.raises(TriggerError):
        run_ranks(2, body)


def test_a_handler_that_raises_counts_as_an_error() -> None:
    def body(comm: Communicator) -> None:
        channel = comm.handler_channel(lambda trigger: 1 // trigger.size)
        comm.compile(KERNELS, "custom")(1, 1, channel, 1)
        wait_for(lambda: comm.group.failure.aborted, "the handler raises")
        assert look(comm).channels[0].errors == 1
        comm.synchronize()

    with pytest.raises(HandlerError, match="ZeroDivisionError"):
        run_ranks(1, body)


def test_each_of_several_workers_has_its_own_numbers() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        comm.compile(KERNELS, "to_each")(1, 1, channels, 2)
        x = on_device(comm, np.ones(999, np.float32))
        comm.all_reduce(x, algorithm="proxy")
        assert (on_host(x) == 3).all()
        wait_for(lambda: all(not way.outstanding for way in look(comm).connections), "all is complete")
        view = look(comm)
        assert [worker.number for worker in view.workers] == [0, 1]
        assert {way.worker for way in view.connections} == {0, 1}
        for way in view.connections:
            of_way = [channel for channel in view.channels if view.connection_of(channel) == way]
            pushed = [channel for channel in of_way if channel.triggers]
            sent = [channel for channel in of_way if channel.signals and not channel.triggers]  # by the schedule
            assert [(each.triggers, each.puts, each.bytes, each.signals) for each in pushed] == [(2, 1, 100, 1)]
            assert [(each.puts, each.bytes, each.signals, each.errors) for each in sent] == [(1, x.nbytes, 1, 0)]
            assert way.completed == sum(channel.triggers for channel in pushed) + len(sent)
            assert {view.rings[channel.ring].worker for channel in of_way} == {way.worker}
        assert sum(ring.taken for ring in view.rings) == sum(channel.triggers for channel in view.channels) == 4
        barrier(comm)

    run_ranks(3, body, fifos=4, proxy_threads=2)


# -- how services are found ---


def a_publication(**changed: object) -> Publication:
    """Returns a publication of this process that does not name memory."""
    whose = Description(0, 1, "job", "program")
    own = Publication.of_this_process(whose, "host", workers=1, observed="", counters="", rings=())
    return replace(own, **changed)  # type: ignore[arg-type]


def test_a_service_is_found_while_it_runs(directory: Path) -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        assert len(publications.find(comm.job)) == 2
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
        barrier(comm)

    run_ranks(2, body)
    assert list(directory.iterdir()) == []


def test_files_of_processes_that_are_gone_are_removed(directory: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)
    there = publications.publish(a_publication())
    publications.publish(a_publication(pid=int(ended.stdout)))
    publications.publish(a_publication(started=12345))  # the recorded process started earlier and had this process's id
    (directory / f".{int(ended.stdout)}-7.json").write_text("it was killed while it wr")
    (directory / f"{os.getpid()}-77.json").write_text('{"format": 0, "of": "another version"}')
    assert [path for path, _ in publications.find()] == [there]
    assert {path.name for path in directory.iterdir()} == {there.name, f"{os.getpid()}-77.json"}


def test_a_service_of_another_container_is_left_alone(directory: Path) -> None:
    path = publications.publish(a_publication(namespace="pid:[1]", started=12345))
    assert publications.find() == []
    assert path.exists()


def test_a_killed_service_leaves_nothing(directory: Path) -> None:
    program = (
        "import os, signal\n"
        "from proxyccl import Communicator, ThreadBootstrap\n"
        "comm = Communicator(ThreadBootstrap.create(1)[0], 'host')\n"
        "comm.handler_channel(print)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.suffix for path in directory.iterdir()) == [".json", ".rank"]
    assert publications.find() == []
    assert find_ranks() == []
    assert list(directory.iterdir()) == []


def test_a_directory_of_somebody_else_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for use in (lambda: publications.publish(a_publication()), publications.find):
        with pytest.raises(ArgumentError, match="belongs to user"):
            use()


def test_a_link_in_place_of_the_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: publications.publish(a_publication()), publications.find):
        with pytest.raises(ArgumentError, match="is not a directory"):
            use()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with pytest.raises(ArgumentError, match="chmod 700"):
        publications.publish(a_publication())


def test_a_service_that_cant_publish_works_and_says_so_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.write_text("in the way")

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(10, np.float32))
        comm.all_reduce(x, algorithm="proxy")
        assert (on_host(x) == 2).all()

    with caplog.at_level(logging.WARNING):
        run_ranks(2, body)
    assert len([r for r in caplog.records if "cannot see this process" in r.message]) == 1


def test_a_service_whose_file_cant_be_removed_ends(directory: Path) -> None:
    def body(comm: Communicator) -> ProxyService:
        service = comm.proxy
        shutil.rmtree(directory)
        directory.write_text("in the way")
        return service

    (service,) = run_ranks(1, body)
    assert service.close()
    assert service.ended == [True]


def test_of_ranks_that_cant_publish_at_the_same_time_one_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_text("in the way")
    together = threading.Barrier(4)

    def slowly(_: logging.LogRecord) -> bool:
        time.sleep(0.1)  # gives the other threads time to log the same warning
        return True

    def rank_main() -> None:
        together.wait(TIMEOUT)
        assert publications.try_publish(a_publication()) is None

    monkeypatch.setattr(caplog.handler, "filters", [slowly])
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as ranks:
        for rank in [ranks.submit(rank_main) for _ in range(4)]:
            rank.result(TIMEOUT)
    assert len([r for r in caplog.records if "cannot see this process" in r.message]) == 1


def test_what_is_published_wrongly_is_refused(directory: Path) -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        ((_, publication),) = publications.find(comm.job, {comm.rank})
        for wrong in (
            replace(publication, observed=publication.counters),
            replace(publication, workers=1000),
            replace(publication, counters="not hexadecimal"),
            replace(publication, rings=(replace(publication.rings[0], size_log2=20),)),
        ):
            with pytest.raises(ArgumentError):
                Observer(wrong)
        barrier(comm)

    run_ranks(2, body)


def test_a_channel_of_a_ring_that_is_not_published_is_left_out() -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        ((_, publication),) = publications.find(comm.job, {comm.rank})
        with Observer(replace(publication, rings=())) as observer:
            view = observer.snapshot()
        assert (view.rings, view.channels) == ((), ())
        assert rates_between(view, view).channels == ()

    run_ranks(1, body)


def test_files_that_are_none_of_a_service_are_left_alone(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / "1-1.json")
    (directory / "1-2.json").mkdir()
    (directory / "1-3.json").symlink_to("1-3.json")
    names = ("1-4.json", "²-1.json", f"{'9' * 100}-1.json", "-1.json")
    for name, data in zip(names, (b"\xff" * 9, b"{}", b"[" * 10_000, b""), strict=True):
        (directory / name).write_bytes(data)
    assert publications.find() == []
    assert find_ranks() == []
    assert (directory / "1-1.json").exists()


# -- top ---


def test_top_shows_a_running_job_as_json_and_as_a_table() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        kernel = comm.compile(KERNELS, "mixed")
        if comm.rank == 0:
            top = command("top", "--once", "--json", "--interval", "1", "--job", comm.job)
            while top.poll() is None:
                kernel(1, 1, channels, 10, 0, 1)
                comm.synchronize()
            services = json.loads(output_of(top))
            assert [service["rank"] for service in services] == [0, 1]
            (channel,) = services[0]["channels"]
            assert channel["peer"] == 1
            assert channel["triggers_per_s"] > 0
            assert channel["bytes_per_s"] > 0
            assert services[1]["channels"][0]["triggers_per_s"] == 0
            assert services[0]["memory"]["channels"] == comm.memory_usage()["channels"]
            assert 0 <= services[0]["workers"][0]["busy"] <= 1
            table = called("top", "--once", "--interval", "0.1")[1]
            assert f"job {comm.job}" in table
            assert "2 ranks" in table
        comm.barrier()

    run_ranks(2, body)


def test_top_shows_a_program_s_name_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train\njob fake\x1b[31m"])

    def body(comm: Communicator) -> None:
        channels_of(comm)
        if comm.rank == 0:
            table = called("top", "--once", "--interval", "0.1")[1]
            assert f"job {comm.job}: train\\njob fake\\x1b[31m, 1 ranks" in table.splitlines()[0]
            assert all(line.isprintable() for line in table.splitlines())

    run_ranks(1, body)


def test_top_shows_what_schedules_move() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(999, np.float32))
        before = None
        for _ in range(2):
            comm.all_reduce(x, algorithm="proxy")
            comm.synchronize()
            before, view = (before or look(comm)), look(comm)
        rates = rates_between(before, view)
        (moving,) = (channel for channel in rates.channels if channel.puts_per_s)
        assert (moving.peer, moving.triggers, moving.signals) == (1 - comm.rank, 0, 2)
        assert moving.bytes_per_s == pytest.approx(moving.puts_per_s * x.nbytes)
        _, _, _, total, line = table_of([rates]).splitlines()
        assert line.split()[:2] == [str(moving.id), str(1 - comm.rank)]
        assert short(moving.puts_per_s) in line.split()
        triggers, sends = total.split()[2:4]
        assert triggers == "0", "no kernel pushed a trigger"
        assert sends == short(moving.sends_per_s) != "0"
        barrier(comm)

    run_ranks(2, body)


def test_top_keeps_two_jobs_apart() -> None:
    def body(comm: Communicator) -> None:
        with Communicator(others[comm.rank]) as other:
            for each in (comm, other):
                channels_of(each)
            if comm.rank == 0:
                assert comm.job != other.job
                table = called("top", "--once", "--interval", "0.1")[1]
                assert f"job {comm.job}" in table
                assert f"job {other.job}" in table
                one = json.loads(called("top", "--once", "--json", "--interval", "0.1", "--job", other.job)[1])
                assert [(service["job"], service["rank"]) for service in one] == [(other.job, 0), (other.job, 1)]
            comm.barrier()

    others = ThreadBootstrap.create(2)
    run_ranks(2, body)


def test_top_goes_on_until_nothing_runs_any_more() -> None:
    def body(comm: Communicator) -> subprocess.Popen[str]:
        comm.handler_channel(print)
        top = command("top", "--json", "--interval", "0.05")
        assert top.stdout is not None
        lines = [json.loads(top.stdout.readline()) for _ in range(3)]
        assert [service["rank"] for line in lines for service in line] == [0, 0, 0]
        return top

    (top,) = run_ranks(1, body)
    output_of(top)


@pytest.mark.parametrize("form", ["--json", "--interval=0.02"], ids=["json", "table"])
def test_top_ends_well_when_nobody_reads_on(form: str) -> None:
    def body(comm: Communicator) -> None:
        comm.handler_channel(print)
        top = command("top", "--interval", "0.02", form)
        assert top.stdout is not None
        assert top.stderr is not None
        top.stdout.readline()
        top.stdout.close()
        assert top.wait(TIMEOUT) == 0
        assert top.stderr.read() == ""

    run_ranks(1, body)


def test_top_says_when_nothing_runs(directory: Path) -> None:
    top = command("top")
    _, error = top.communicate(timeout=120)
    assert top.returncode == 1
    assert f"this user runs no proxy on this machine; looked in {directory}" in error


def test_an_observer_that_is_killed_leaves_the_proxy_unharmed() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        if comm.rank == 0:
            top = command("top", "--json", "--interval", "0.01")
            assert top.stdout is not None
            top.stdout.readline()
            top.kill()
            top.communicate()
        comm.compile(KERNELS, "mixed")(1, 1, channels, 7, 0, 1)
        comm.synchronize()
        assert channels[0].counters.puts == 7
        barrier(comm)

    run_ranks(2, body)


def test_what_a_daemon_runs_is_seen_like_what_a_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        kernel = comm.compile(KERNELS, "mixed")
        kernel(1, 1, channels, 7, 5, 3)
        comm.synchronize()
        view = look(comm)
        assert view.channels[0].triggers == 15
        assert view.publication.pid == daemon.process.pid
        assert view.publication.description == Description.of_this_program(comm.rank, 2, comm.job)
        comm.barrier()
        if comm.rank == 0:
            port = re.search(r"metrics at http://127.0.0.1:(\d+)/metrics", daemon.log)
            assert port is not None
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=60) as answer:
                assert f'communicator="{comm.job}",rank="1",pid="{daemon.process.pid}"' in answer.read().decode()
        comm.barrier()

    path = tmp_path / "daemon.sock"
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(path))
    with running_daemon(path, "--metrics", "0") as daemon:
        run_ranks(2, body, proxy="daemon")
        assert publications.find() == []


def test_what_one_daemon_runs_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the chosen daemon's services are shown. Two other daemons, one of them without a job, and proxies in ranks'
    processes are left out.
    """
    chosen, other, idle = (tmp_path / f"{name}.sock" for name in ("chosen", "other", "idle"))

    def job(proxy: str, path: Path | None = None) -> Communicator:
        if path is not None:
            monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(path))
        comm = opened.enter_context(Communicator(ThreadBootstrap.create(1)[0], rank_runtime(0), proxy=proxy))
        assert comm.proxy.fifos  # starts the proxy
        return comm

    with (
        running_daemon(chosen) as daemon,
        running_daemon(other),
        running_daemon(idle) as without,
        contextlib.ExitStack() as opened,
    ):
        comm, another = job("daemon", chosen), job("daemon", other)
        job("thread")
        assert len(publications.find()) == 3
        assert publications.find(process=daemon.process.pid) == publications.find(comm.job)
        look_once = ("top", "--once", "--json", "--interval", "0.05")
        (service,) = json.loads(called(*look_once, "--daemon", str(chosen))[1])
        assert (service["job"], service["pid"]) == (comm.job, daemon.process.pid)
        (service,) = json.loads(called(*look_once, "--daemon")[1])
        assert service["job"] == another.job
        trace = ("trace", "-t", "0.05", "-o", str(tmp_path / "trace.json"))
        assert "of 1 proxies" in called(*trace, "--daemon", str(chosen))[1]
        for arguments in ((*look_once, "--daemon", str(idle)), (*trace, "--daemon", str(idle))):
            status, _, error = called(*arguments)
            assert status == 1
            assert f"this user runs no proxy in process {without.process.pid}" in error


@pytest.mark.parametrize("arguments", [("top",), ("trace", "-o", "trace.json")], ids=["top", "trace"])
def test_a_daemon_that_does_not_answer_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "nobody.sock"
    look = command(*arguments, "--daemon", str(path))
    _, error = look.communicate(timeout=120)
    assert look.returncode == 1
    assert f"no node daemon answers at {path}" in error
    assert f"proxyccl daemon --socket {path}" in error


def test_totals_count_each_flush_and_each_failure_once() -> None:
    def view(flushes: tuple[int, int, int], flush_ns: tuple[int, int, int], failures: int) -> ServiceView:
        return ServiceView(
            publication=a_publication(),
            time_ns=0,
            workers=(WorkerView(0, 0, 0, 0, 0, 0, 0, None, IdlePolicy().times),),
            rings=(RingView(0, worker=0, size=8, taken=0, full=0),),
            connections=(ConnectionView(0, 0, 1, "copy", completed=0, outstanding=5, errors=failures),),
            channels=tuple(
                ChannelView(
                    id=id,
                    ring=0,
                    worker=0,
                    connection=0,
                    triggers=9,
                    flushes=9,
                    flush_ns=flush_ns[id],
                    timed_flushes=flushes[id],
                    errors=2 * (id == 2),
                )
                for id in range(3)
            ),
        )

    rates = rates_between(view((1, 0, 0), (7000, 0, 0), 0), view((2, 9, 0), (9000, 36000, 0), 1))
    assert [channel.flush_us for channel in rates.channels] == [2, 4, None]
    assert (rates.errors, [channel.errors for channel in rates.channels]) == (3, [0, 0, 2])
    (total,) = (line.split() for line in table_of([rates]).splitlines() if " all " in line)
    assert total[8:11] == ["5", "3.8", "3"]
    assert " ".join(total[12:]) == "- longest sleep 1000 µs"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (12345, "12.3k"), (999_999, "1M"), (4.56e6, "4.56M")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


# -- metrics ---

SAMPLE = re.compile(r'proxyccl_[a-z_]+\{([a-z]+="[^"]*",?)+\} -?[0-9.e+-]+')


def test_metrics_have_what_a_look_finds() -> None:
    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        comm.compile(KERNELS, "mixed")(1, 1, channels, 7, 5, 3)
        comm.synchronize()
        comm.group.device_memory.publish()
        text = metrics_text([look(comm)], device_memory())
        lines = text.splitlines()
        assert all(line.startswith("# ") or SAMPLE.fullmatch(line) for line in lines)
        who = f'communicator="{comm.job}",rank="{comm.rank}",pid="{os.getpid()}"'
        way = f'channel="0",ring="0",peer="{1 - comm.rank}",transport="{channels[0].transport}"'
        assert f"proxyccl_channel_bytes_total{{{who},{way}}} 700" in lines
        assert f'proxyccl_ring_triggers_total{{{who},ring="0"}} 15' in lines
        used = comm.memory_usage()["channels"]
        own = f'communicator="{comm.job}",rank="{comm.rank}",purpose="channels"'
        assert f"proxyccl_device_memory_bytes{{{own}}} {used}" in lines
        types = [line.split()[2:] for line in lines if line.startswith("# TYPE")]
        kinds = dict(types)
        assert len(types) == len(kinds)
        assert kinds["proxyccl_channel_flush_seconds"] == "summary"
        for name in (line.partition("{")[0] for line in lines if not line.startswith("#")):
            family = re.sub("_(sum|count)$", "", name)
            assert kinds[family] == ("summary" if family != name else "counter" if name.endswith("_total") else "gauge")
        barrier(comm)

    run_ranks(2, body)


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    file = resources.files("proxyccl.proxy.observe") / "grafana_dashboard.json"
    dashboard = json.loads(file.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"proxyccl_\w+", query)}
    served = {line.split()[2] for line in metrics_text([], {}).splitlines() if line.startswith("# TYPE")}
    summary = "proxyccl_channel_flush_seconds"
    assert used <= served | {f"{summary}_sum", f"{summary}_count"}
    assert {"proxyccl_channel_bytes_total", "proxyccl_ring_full_slots", "proxyccl_up"} <= used
    labels = {"communicator", "rank", "peer", "ring"}
    shown = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {label for text in shown for label in re.findall(r"{{(\w+)}}", text)} == labels


@pytest.fixture
def url() -> Iterator[str]:
    """Starts a server, and yields the URL of its metrics."""
    with serve(0, device_memory) as where:
        yield where.removeprefix("metrics at ")


def test_metrics_are_served_on_the_loopback_interface(url: str) -> None:
    def body(comm: Communicator) -> None:
        channels_of(comm)
        if comm.rank == 0:
            assert len(snapshots()) == 2
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert answer.read().decode().count("proxyccl_up{") == 2
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url.removesuffix("metrics"), timeout=60)
        comm.barrier()

    run_ranks(2, body)


def test_metrics_say_why_there_are_none(url: str, directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(url, timeout=60)
    assert "chmod 700" in refused.value.read().decode()


def test_a_port_that_is_taken_or_none_is_refused(url: str) -> None:
    port = urllib.parse.urlsplit(url).port
    assert port is not None
    with pytest.raises(ResourceError, match=f"port {port}"), serve(port, dict):
        pass
    with pytest.raises(ArgumentError, match="port"), serve(1 << 16, dict):
        pass
