"""The wall around jetson-stats: its real client against a stand-in service, fault by fault."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeagent.gpus.jtop import SOCKET, JetsonStats, SecondReading
from edgeagent.gpus.tegra import TegraBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.jetson import BOARDS, JetsonTree

pytest.importorskip("jtop", reason="jetson-stats (AGPL) is not installed")

WAIT_S = 20.0


class StandIn:
    """The stand-in service as a process of its own, below a host root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / SOCKET.lstrip("/")
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.state_file = root / "jtop-state.json"
        self.state: dict[str, Any] = {}
        self.set()
        self.process: subprocess.Popen[str] | None = None

    def set(self, **state: Any) -> None:
        self.state.update(state)
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text(json.dumps(self.state))
        fresh.replace(self.state_file)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.jetson.jtop_service", str(self.socket), str(self.state_file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


class Running:
    """A JetsonStats in its thread."""

    def __init__(self, root: Path) -> None:
        self.source = JetsonStats(HostRoot(root), interval_s=0.2, connect_timeout_s=1.0, retry_s=0.1)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.source.run, args=(self.stop,), name="jtop under test")
        self.thread.start()

    def until(self, what: Callable[[], Any]) -> Any:
        """Waits for something to become true, and returns it."""
        waiting = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):
            if found := what():
                return found
            waiting.wait(0.02)
        raise AssertionError(f"did not happen; problem={self.source.problem}")

    def end(self) -> None:
        self.stop.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path)
    yield stand_in
    stand_in.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[], Running]]:
    started: list[Running] = []

    def _run() -> Running:
        started.append(Running(tmp_path))
        return started[-1]

    yield _run
    for running in started:
        running.end()


def test_facts_and_samples_come_through(service: StandIn, run: Callable[[], Running]) -> None:
    service.start()
    running = run()
    assert running.until(running.source.sample) == SecondReading(12.5, 48.5, "MAXN_SUPER", True)
    # The client learns the board in a thread of its own: later than its first sample on a busy machine.
    facts = running.until(lambda: "jetpack" in (f := running.source.facts()) and f)
    assert (facts["jetpack"], facts["l4t"], facts["soc"]) == ("6.2", "36.4.3", "tegra234")
    assert "Serial Number" not in facts
    service.set(data={"gpu": {"gpu": {"status": {"load": 99.0}}}})
    running.until(lambda: (s := running.source.sample()) and s.util_pct == 99.0)


def test_importing_puts_the_start_method_back_and_starts_nothing(
    service: StandIn, run: Callable[[], Running]
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    service.start()
    running = run()
    running.until(running.source.sample)
    assert multiprocessing.get_start_method(allow_none=True) == before
    # The one child is the stand-in itself: no nvcc, no dpkg, no resource tracker.
    assert service.process is not None
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists():
        assert {int(pid) for pid in children.read_text().split()} <= {service.process.pid}
    assert not [t for t in threading.enumerate() if "librar" in t.name.lower()]


def test_data_of_a_killed_service_is_not_kept(
    service: StandIn, run: Callable[[], Running], caplog: pytest.LogCaptureFixture
) -> None:
    service.start()
    running = run()
    running.until(running.source.sample)
    service.kill()
    running.until(lambda: running.source.sample() is None)
    running.until(lambda: running.source.problem)


def test_a_restarted_service_is_used_again_in_the_same_process(
    service: StandIn, run: Callable[[], Running]
) -> None:
    """Twice: jetson-stats' own client fails with BrokenPipeError here."""
    service.start()
    running = run()
    for _ in range(2):
        running.until(running.source.sample)
        service.kill()
        running.until(lambda: running.source.sample() is None and running.source.problem)
        service.start()
    running.until(running.source.sample)
    running.until(lambda: running.source.problem is None)


def test_a_service_whose_data_stands_still_counts_as_nothing(
    service: StandIn, run: Callable[[], Running]
) -> None:
    """The client's own `ok()` stays true here, its properties keep the old values."""
    service.start()
    running = run()
    running.until(running.source.sample)
    service.set(frozen=True)
    running.until(lambda: running.source.sample() is None)
    service.set(frozen=False)
    running.until(running.source.sample)


def test_a_hung_service_costs_one_thread_and_comes_back(service: StandIn, run: Callable[[], Running]) -> None:
    service.start()
    running = run()
    running.until(running.source.sample)
    service.signal(signal.SIGSTOP)
    try:
        running.until(lambda: running.source.sample() is None and running.source.problem)
        threads = threading.active_count()
        waited = threading.Event()
        waited.wait(1.0)  # ten retries
        assert threading.active_count() <= threads
    finally:
        service.signal(signal.SIGCONT)
    running.until(running.source.sample)


def test_a_service_that_hangs_before_the_first_answer(service: StandIn, run: Callable[[], Running]) -> None:
    service.start()
    service.signal(signal.SIGSTOP)
    running = run()
    try:
        running.until(lambda: "does not answer" in (running.source.problem or ""))
        assert sum(t.name == "jtop-connect" for t in threading.enumerate()) == 1
    finally:
        service.signal(signal.SIGCONT)
    running.until(running.source.sample)


LEAVES = """
import gc, sys, threading
from edgeagent.gpus.jtop import JetsonStats
from edgeagent.hostroot import HostRoot

source, stop = JetsonStats(HostRoot(sys.argv[1]), interval_s=0.2, retry_s=0.1), threading.Event()
thread = threading.Thread(target=source.run, args=(stop,))
thread.start()
while source.sample() is None:
    stop.wait(0.02)
print("connected", flush=True)
sys.stdin.readline()
stop.set()
thread.join()
del source
gc.collect()
print("collected", flush=True)
"""


def test_a_hung_service_does_not_keep_the_process_from_ending(service: StandIn) -> None:
    """Dropping jetson-stats' client, or leaving with one, calls the service and waits for its answer."""
    service.start()
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(service.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        service.signal(signal.SIGSTOP)
        assert process.communicate("leave\n", timeout=WAIT_S)[0] == "collected\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
        service.signal(signal.SIGCONT)


def test_another_version_is_said_once(
    service: StandIn, run: Callable[[], Running], caplog: pytest.LogCaptureFixture
) -> None:
    service.set(version="4.2.12")
    service.start()
    running = run()
    running.until(lambda: "Mismatch version" in (running.source.problem or ""))
    threading.Event().wait(1.0)  # several retries
    warnings = [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "jetson-stats" in r.getMessage()
    ]
    assert len(warnings) == 1
    assert "4.2.12" in warnings[0]
    assert running.source.sample() is None


def test_no_service_is_said_in_words(run: Callable[[], Running]) -> None:
    running = run()
    running.until(lambda: "is jtop.service running?" in (running.source.problem or ""))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another owner")
def test_a_socket_of_another_user_is_not_talked_to(service: StandIn, run: Callable[[], Running]) -> None:
    service.start()
    os.chown(service.socket, 12345, 12345)
    running = run()
    running.until(lambda: "belongs to user 12345" in (running.source.problem or ""))


def test_a_slower_pace_set_by_another_client_is_not_staleness(
    service: StandIn, run: Callable[[], Running]
) -> None:
    service.set(interval=5.0)
    service.start()
    running = run()
    running.until(running.source.sample)
    service.set(frozen=True)
    threading.Event().wait(1.5)  # beyond our own interval's patience (0.8 s), within theirs
    assert running.source.sample() is not None


@pytest.mark.parametrize(
    "data",
    [
        {"gpu": {}},
        {"gpu": {"gpu": {"status": {"load": "high"}}}},
        {"gpu": {"gpu": None}},
        {"temperature": None},
        {"temperature": {"gpu": {"temp": -256}}},
        {"nvp": {"status": [], "thread": False, "model": None}},
        {"gpu": {"gpu": {"status": {"load": 900}}}},
    ],
    ids=lambda d: next(iter(d)),
)
def test_odd_data_costs_its_value_only(
    service: StandIn, run: Callable[[], Running], data: dict[str, Any]
) -> None:
    service.set(data=data)
    service.start()
    running = run()
    sample = running.until(running.source.sample)
    assert sample.jetson_clocks is True
    assert None in (sample.util_pct, sample.temperature_c, sample.power_mode)


def test_data_that_ends_the_client_ends_nothing_else(service: StandIn, run: Callable[[], Running]) -> None:
    service.set(data={"jc": None})
    service.start()
    running = run()
    running.until(lambda: running.source.problem)
    service.set(data={})
    running.until(running.source.sample)


def test_the_board_gets_what_only_jetson_stats_knows(service: StandIn, run: Callable[[], Running]) -> None:
    JetsonTree(service.root, BOARDS["orin-nano-jp6"], "container")
    service.start()
    running = run()
    running.until(lambda: "jetpack" in running.source.facts())
    backend = TegraBackend(HostRoot(service.root), second=running.source)
    (gpu,) = backend.inventory().gpus
    assert (gpu.facts["jetpack"], gpu.facts["l4t"]) == ("6.2", "36.4.3")
    assert gpu.facts["module"] == "Jetson Orin Nano 8GB Developer Kit"  # ours is not overwritten
    reading = backend.read(gpu.uuid)
    assert (reading.power_mode, reading.util_pct) == ("MAXN_SUPER", 43.7)
    backend.close()


def test_without_jetson_stats_it_says_so_and_waits_for_the_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jtop.jtop", None)  # what an absent package looks like to import
    running = Running(tmp_path)
    running.until(lambda: running.source.problem)
    running.end()
    assert "edgeagent[jetson]" in caplog.text


def test_it_is_not_imported_unless_asked_for() -> None:
    code = "import sys, edgeagent.gpus.tegra; sys.exit('jtop' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
