"""MPS over the stand-in daemon: found or started, limits per container, compute mode, clients that are
ended in order, and what is claimed when any of it is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from edgeagent.config.schema import MpsConfig
from edgeagent.errors import GpuError, IsolationError
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation import mps, mps_control
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, AxisLevel, Level
from edgeagent.isolation.mps import EXCLUSIVE, MEMORY_ENV, PIPE_DIR, PIPE_ENV, THREADS_ENV, MpsBackend
from tests.fakes.mps import SERVER_PID, Daemon, FakeMps

UUID = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
GPU = Gpu(
    UUID,
    0,
    GpuKind.DISCRETE,
    "nvml",
    "RTX A2000",
    6138,
    compute_capability=(8, 6),
    driver_version="615.71.09",
)
OLD_DRIVER = replace(GPU, driver_version="550.90.07")
MEMORY, COMPUTE = Axis.MEMORY, Axis.COMPUTE
BOTH = frozenset(Axis)
PID = 4100


@dataclass
class Modes:
    """Compute modes as a driver keeps them."""

    mode: str = "default"
    sets: list[str] = field(default_factory=list)
    error: str | None = None

    def get_compute_mode(self, uuid: str) -> str:
        return self.mode

    def set_compute_mode(self, uuid: str, mode: str) -> None:
        if self.error is not None:
            raise GpuError(self.error)
        self.sets.append(mode)
        self.mode = mode


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.fake = FakeMps(root)
        self.modes = Modes()
        self.clock = Clock()

    def backend(self, *, opted_in: bool = True, manage: bool = True, processes: bool = False) -> MpsBackend:
        """`processes`: the stand-in is run as the program it is."""
        runner = None if processes else self.fake.run
        return MpsBackend(
            MpsConfig(), HostRoot(self.root), self.modes,
            opted_in=opted_in, manage=manage, runner=runner, clock=self.clock,
        )  # fmt: skip

    @property
    def daemon(self) -> Daemon:
        return self.fake.daemon(UUID)

    def process(self, pid: int, env: dict[str, str] | None = None) -> int:
        proc = self.root / f"proc/{pid}"
        proc.mkdir(parents=True, exist_ok=True)
        text = b"".join(f"{k}={v}".encode() + b"\0" for k, v in (env or {}).items())
        (proc / "environ").write_bytes(text)
        return pid

    def later(self) -> None:
        """Nothing that was read before counts any more."""
        self.clock.now += 10


@pytest.fixture
def rig(short_dir: Path) -> Rig:
    return Rig(short_dir)


def share(number: int = 12, cores: int | None = 30, gpu: Gpu = GPU) -> ShareToEnforce:
    return ShareToEnforce(f"pod-{number}", "app", f"m{number:06}", gpu, 2000, cores)


def running(*gpu_pids: int, mps: bool = True, pids: tuple[int, ...] = (PID,)) -> RunningContainer:
    clients = frozenset(gpu_pids) if mps else frozenset()
    return RunningContainer("c" * 64, "/x", pids, gpu_pids, 100.0, clients)


def said(level: AxisLevel) -> tuple[Level, str | None]:
    return level.level, level.reason


# ---- probe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "opted_in", "problem"),
    [
        (GPU, False, "not asked for"),
        (replace(GPU, source="tegra", kind=GpuKind.INTEGRATED), True, "Jetson"),
        (replace(GPU, mig_enabled=True), True, "MIG"),
        (replace(GPU, compute_capability=(6, 1)), True, "Volta"),
    ],
    ids=["not opted in", "Jetson", "MIG", "Pascal"],
)
def test_where_it_cannot_be_nothing_is_started(rig: Rig, gpu: Gpu, opted_in: bool, problem: str) -> None:
    result = rig.backend(opted_in=opted_in).probe(gpu, MEMORY)
    assert result.level is Level.NONE
    assert problem in (result.problem or "")
    assert not (rig.root / "run/edgeagent").exists()


@pytest.mark.parametrize(
    ("gpu", "protocols", "protocol", "compute"),
    [
        pytest.param(GPU, (2, 3), 3, Level.HARD, id="new driver"),
        pytest.param(GPU, (2,), 2, Level.COOPERATIVE, id="new driver, old program"),
        pytest.param(OLD_DRIVER, (2, 3), 2, Level.COOPERATIVE, id="old driver"),
    ],
)
def test_a_daemon_is_started_for_the_gpu_with_the_newest_protocol(
    rig: Rig, gpu: Gpu, protocols: tuple[int, ...], protocol: int, compute: Level
) -> None:
    rig.fake = FakeMps(rig.root, protocols)
    backend = rig.backend()
    assert backend.probe(gpu, MEMORY).level is Level.COOPERATIVE
    result = backend.probe(gpu, COMPUTE)
    assert result.level is compute
    assert f"protocol {protocol}" in result.evidence
    state = rig.daemon.state
    assert (state["protocol"], state["devices"], state["multiuser"]) == (protocol, UUID, True)
    assert rig.modes.mode == "default", "a probe changes nothing"


def test_a_program_without_multi_user_servers_is_started_plainly(rig: Rig) -> None:
    rig.fake = FakeMps(rig.root, (2,), multiuser=False)
    assert rig.backend().probe(OLD_DRIVER, MEMORY).level is Level.COOPERATIVE
    assert rig.daemon.state["multiuser"] is False


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_daemon_that_runs_is_used_and_never_ended(rig: Rig, protocol: int) -> None:
    rig.fake.operators_daemon(UUID, protocol)
    backend = rig.backend(manage=False)
    assert f"found at /run/edgeagent/mps/{UUID}/pipe, protocol {protocol}" in (
        backend.probe(GPU, MEMORY).evidence
    )
    backend.close()
    assert rig.daemon.running


def test_one_that_was_only_tried_is_ended_again(rig: Rig) -> None:
    """`doctor` tries mechanisms too: it leaves nothing behind."""
    backend = rig.backend()
    backend.probe(GPU, MEMORY)
    assert rig.daemon.running
    backend.close()
    assert not rig.daemon.running


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("no program", "is not installed"),
        ("not managed", "the agent starts none here"),
        ("start fails", "no room"),
        ("foreign", "another MPS control daemon runs at /run/nvidia-mps"),
    ],
)
def test_no_daemon_and_why(rig: Rig, case: str, problem: str) -> None:
    if case == "no program":
        rig.fake.program.unlink()
    elif case == "start fails":
        rig.fake.start_fails("no room")
    elif case == "foreign":
        rig.fake.foreign_daemon()
    result = rig.backend(manage=case != "not managed").probe(GPU, MEMORY)
    assert result.level is Level.NONE
    assert problem in (result.problem or "")


def test_without_the_right_to_set_the_compute_mode_compute_is_cooperative(rig: Rig) -> None:
    rig.modes.error = "only root may"
    result = rig.backend().probe(GPU, COMPUTE)
    assert (result.level, "only root may" in result.evidence) == (Level.COOPERATIVE, True)


# ---- what containers get ---------------------------------------------------------------------------


@dataclass
class Ready:
    rig: Rig
    backend: MpsBackend

    def level(self, of: ShareToEnforce, seen: RunningContainer, axis: Axis) -> tuple[Level, str | None]:
        self.rig.later()
        return said(self.backend.evidence(of, seen, axis))


@pytest.fixture
def three(rig: Rig) -> Iterator[Ready]:
    backend = rig.backend()
    backend.probe(GPU, MEMORY)
    yield Ready(rig, backend)
    backend.close()


@pytest.fixture
def two(rig: Rig) -> Iterator[Ready]:
    backend = rig.backend()
    backend.probe(OLD_DRIVER, MEMORY)
    yield Ready(rig, backend)
    backend.close()


def test_protocol_3_gives_each_share_a_namespace_and_its_directory_alone(three: Ready) -> None:
    edits = three.backend.prepare(share(), BOTH)
    assert three.rig.daemon.namespaces() == {"m000012": ("2000M", "30")}
    assert edits.env == {PIPE_ENV: PIPE_DIR}, "a limit in the environment could void the namespace's"
    mounts = {m.container_path: m.host_path for m in edits.mounts}
    assert mounts == {
        PIPE_DIR: f"/run/edgeagent/mps/{UUID}/pipe/shares/m000012",
        "/dev/shm": "/dev/shm",
    }
    assert (three.rig.root / mounts[PIPE_DIR].lstrip("/") / "control").exists()
    assert three.rig.modes.mode == EXCLUSIVE
    assert three.rig.daemon.state["servers"]["shares"]["allowed"] == UUID


def test_protocol_2_gives_values_in_the_environment(two: Ready) -> None:
    edits = two.backend.prepare(share(gpu=OLD_DRIVER), BOTH)
    assert edits.env == {PIPE_ENV: PIPE_DIR, MEMORY_ENV: "0=2000M", THREADS_ENV: "30"}
    assert {m.container_path: m.host_path for m in edits.mounts}[PIPE_DIR].endswith(f"{UUID}/pipe")


@pytest.mark.parametrize(
    ("axes", "cores", "limits"),
    [
        (frozenset({MEMORY}), 30, ("2000M", "100")),
        (frozenset({COMPUTE}), 30, ("-", "30")),
        (BOTH, None, ("2000M", "100")),
    ],
    ids=["memory only", "compute only", "compute uncapped"],
)
def test_only_the_axes_it_is_in_charge_of(
    three: Ready, axes: frozenset[Axis], cores: int | None, limits: tuple[str, str]
) -> None:
    three.backend.prepare(share(cores=7), BOTH)
    three.backend.prepare(share(cores=cores), axes)
    assert three.rig.daemon.namespaces() == {"m000012": limits}, "nothing is left of the start before"


def test_release_takes_the_namespace_away_once(three: Ready) -> None:
    three.backend.prepare(share(1), BOTH)
    three.backend.prepare(share(2), BOTH)
    three.backend.release(share(1))
    three.backend.release(share(1))
    assert list(three.rig.daemon.namespaces()) == ["m000002"]


def test_early_binding_gives_the_namespace_first_and_the_cores_at_the_start(three: Ready) -> None:
    early = ShareToEnforce("", "", "m000012", GPU, 2000, None)
    edits = three.backend.prepare(early, BOTH)
    assert edits.env == {PIPE_ENV: PIPE_DIR}
    three.backend.prepare(share(), BOTH)
    assert three.rig.daemon.namespaces() == {"m000012": ("2000M", "30")}


def test_the_49th_container_waits(two: Ready) -> None:
    for number in range(mps.MAX_CLIENTS):
        two.backend.prepare(share(number, gpu=OLD_DRIVER), BOTH)
    with pytest.raises(IsolationError, match="48 containers share this GPU"):
        two.backend.prepare(share(99, gpu=OLD_DRIVER), BOTH)
    two.backend.prepare(share(5, gpu=OLD_DRIVER), BOTH)  # a restart of one of them
    two.backend.release(share(0, gpu=OLD_DRIVER))
    two.backend.prepare(share(99, gpu=OLD_DRIVER), BOTH)


@pytest.mark.parametrize("protocol", [2, 3])
def test_with_the_program_as_a_process(rig: Rig, protocol: int) -> None:
    """The whole way once more with nothing between the agent and the program."""
    gpu = GPU if protocol == 3 else OLD_DRIVER
    backend = rig.backend(processes=True)
    assert backend.probe(gpu, MEMORY).level is Level.COOPERATIVE
    one = share(gpu=gpu)
    pid = rig.process(PID, dict(backend.prepare(one, BOTH).env))
    rig.daemon.connect(pid)
    rig.later()
    assert backend.evidence(one, running(pid), MEMORY).level is Level.COOPERATIVE
    assert backend.terminate_client(pid)
    backend.release(one)
    backend.close()


def test_a_daemon_that_hangs_stops_the_start_in_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = rig.backend(processes=True)
    backend.probe(OLD_DRIVER, MEMORY)
    monkeypatch.setattr(mps_control, "ANSWER_S", 0.2)
    rig.daemon.serve()
    rig.daemon.hang("get_")
    rig.later()
    with pytest.raises(IsolationError, match="already running"):
        backend.prepare(share(gpu=OLD_DRIVER), BOTH)


def test_a_termination_that_hangs_is_given_up_in_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = rig.backend(processes=True)
    backend.probe(OLD_DRIVER, MEMORY)
    monkeypatch.setattr(mps_control, "TERMINATE_S", 0.3)
    rig.daemon.connect(PID)
    rig.daemon.hang("terminate_client")
    assert not backend.terminate_client(PID)
    assert rig.daemon.clients == {PID}


# ---- evidence ------------------------------------------------------------------------------------


def test_protocol_3_memory_cooperative_and_compute_hard_while_exclusive(three: Ready) -> None:
    one = share()
    three.backend.prepare(one, BOTH)
    pid = three.rig.process(PID)
    assert three.level(one, running(pid), MEMORY) == (Level.COOPERATIVE, None)
    assert three.level(one, running(pid), COMPUTE) == (Level.HARD, None)
    three.rig.modes.mode = "default"  # somebody runs nvidia-smi -c 0
    assert three.level(one, running(pid), COMPUTE) == (Level.COOPERATIVE, "compute_mode_changed")
    assert three.rig.modes.mode == EXCLUSIVE, "set again"
    assert three.level(one, running(pid), COMPUTE) == (Level.HARD, None)


def test_protocol_2_is_cooperative_and_says_why(two: Ready) -> None:
    one = share(gpu=OLD_DRIVER)
    pid = two.rig.process(PID, dict(two.backend.prepare(one, BOTH).env))
    assert two.level(one, running(pid), MEMORY) == (Level.COOPERATIVE, None)
    assert two.level(one, running(pid), COMPUTE) == (Level.COOPERATIVE, "limit_in_environment")


@pytest.mark.parametrize(
    "change",
    [{PIPE_ENV: "/nowhere"}, {MEMORY_ENV: "0=2000M,GPU-other=1M"}, {MEMORY_ENV: None}],
    ids=["another daemon", "another GPU named", "dropped"],
)
def test_protocol_2_without_the_values_is_opted_out(two: Ready, change: dict[str, str | None]) -> None:
    one = share(gpu=OLD_DRIVER)
    env = {k: v for k, v in {**two.backend.prepare(one, BOTH).env, **change}.items() if v is not None}
    pid = two.rig.process(PID, env)
    assert two.level(one, running(pid), MEMORY) == (Level.NONE, "opted_out")


def test_protocol_3_a_limit_in_the_environment_can_void_the_namespaces(three: Ready) -> None:
    one = share()
    three.backend.prepare(one, BOTH)
    pid = three.rig.process(PID, {MEMORY_ENV: "GPU-elsewhere=1G"})
    assert three.level(one, running(pid), MEMORY) == (Level.NONE, "opted_out")
    assert three.level(one, running(pid), COMPUTE) == (Level.HARD, None)


def test_a_limit_that_somebody_changes_is_set_again(three: Ready) -> None:
    one = share()
    three.backend.prepare(one, BOTH)
    pid = three.rig.process(PID)

    def raise_it(state: dict[str, object]) -> None:
        state["servers"]["shares"]["namespaces"]["m000012"]["pinned-memory-limit"] = "100G"  # type: ignore[index]

    three.rig.daemon.change(raise_it)
    assert three.level(one, running(pid), MEMORY) == (Level.NONE, "limit_changed")
    assert three.level(one, running(pid), MEMORY) == (Level.COOPERATIVE, None)
    assert three.rig.daemon.namespaces()["m000012"][0] == "2000M"


def test_a_process_beside_mps_and_several_clients_are_not_limited(three: Ready) -> None:
    one = share()
    three.backend.prepare(one, BOTH)
    pid, other = three.rig.process(PID), three.rig.process(PID + 1)
    assert three.level(one, running(pid, mps=False), MEMORY) == (Level.NONE, "not_mps_client")
    three.rig.daemon.connect(pid, "m000012")
    assert three.level(one, running(pid, mps=False), MEMORY) == (Level.COOPERATIVE, None), (
        "NVML does not list MPS clients everywhere: the daemon's word counts too"
    )
    assert three.level(one, running(pid, other), MEMORY) == (Level.NONE, "several_clients")
    assert three.level(one, running(pid, other), COMPUTE) == (Level.NONE, "several_clients")


def test_before_it_uses_the_gpu_the_limits_in_place_count_and_without_a_process_nothing(three: Ready) -> None:
    one = share()
    three.backend.prepare(one, BOTH)
    three.rig.process(PID)
    assert three.level(one, running(), MEMORY) == (Level.COOPERATIVE, None)
    assert three.level(one, running(pids=()), MEMORY) == (Level.NONE, "not_running")


# ---- the daemon's life -----------------------------------------------------------------------------


def test_a_dead_daemon_is_a_problem_and_is_started_again(three: Ready) -> None:
    """Containers of before lost their daemon with it: they are told apart from those after."""
    one = share()
    three.backend.prepare(one, BOTH)
    pid = three.rig.process(PID)
    three.rig.daemon.die()
    three.rig.fake.start_fails("no device")
    three.rig.later()
    three.backend.tend()
    assert "no device" in (three.backend.problem(UUID) or "")
    assert three.level(one, running(pid), MEMORY) == (Level.NONE, "mps_daemon")
    three.rig.fake.start_fails(None)
    three.rig.later()
    three.backend.tend()
    assert three.backend.problem(UUID) is None
    assert three.level(one, running(pid), MEMORY) == (Level.NONE, "mps_daemon_restarted")
    three.backend.prepare(one, BOTH)
    assert three.level(one, running(pid), MEMORY) == (Level.COOPERATIVE, None)


def test_one_that_dies_at_once_is_not_started_in_a_loop(three: Ready) -> None:
    three.backend.prepare(share(), BOTH)
    three.rig.daemon.die()
    three.rig.later()
    three.backend.tend()
    three.rig.daemon.die()
    three.rig.clock.now += 2
    three.backend.tend()
    assert "started again soon" in (three.backend.problem(UUID) or "")
    three.rig.later()
    three.backend.tend()
    assert three.backend.problem(UUID) is None


def test_a_daemon_nobody_depends_on_is_no_problem(three: Ready) -> None:
    three.rig.daemon.die()
    three.rig.later()
    three.backend.tend()
    assert three.backend.problem(UUID) is None


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_server_in_fault_is_a_problem_until_it_is_not(rig: Rig, protocol: int) -> None:
    rig.fake.operators_daemon(UUID, protocol)
    backend = rig.backend()
    backend.probe(GPU, MEMORY)
    backend.prepare(share(), BOTH)

    def status(text: str) -> None:
        if protocol == 2:
            rig.daemon.serve(text)
        else:
            rig.daemon.change(lambda s: s["servers"]["shares"].update(status=text))

    for text, bad in (("FAULT", True), ("ACTIVE", False)):
        status(text)
        rig.later()
        backend.tend()
        assert ("takes no new client" in (backend.problem(UUID) or "")) is bad
        if bad:
            with pytest.raises(IsolationError, match="FAULT"):
                backend.prepare(share(2), BOTH)


@pytest.mark.parametrize("protocol", [2, 3])
def test_after_a_restart_of_the_agent_everything_is_as_before(rig: Rig, protocol: int) -> None:
    gpu = GPU if protocol == 3 else OLD_DRIVER
    first = rig.backend()
    first.probe(gpu, MEMORY)
    one = share(gpu=gpu)
    pid = rig.process(PID, dict(first.prepare(one, BOTH).env))
    first.close()
    assert rig.daemon.running, "containers depend on it"
    second = rig.backend()
    second.adopt(one)
    second.probe(gpu, MEMORY)
    assert second.evidence(one, running(pid), MEMORY).level is Level.COOPERATIVE
    rig.daemon.die()
    rig.later()
    second.tend()
    assert second.problem(UUID) is None, "a daemon that running containers depend on is tended"
    assert rig.daemon.running
    second.release(one)
    second.close()


# ---- ending a client -------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_client_is_terminated_in_order(rig: Rig, protocol: int) -> None:
    backend = rig.backend()
    backend.probe(GPU if protocol == 3 else OLD_DRIVER, MEMORY)
    rig.daemon.connect(PID)
    rig.daemon.connect(PID + 1)
    assert backend.terminate_client(PID)
    assert rig.daemon.clients == {PID + 1}
    asked = f"terminate_client {SERVER_PID} {PID}" if protocol == 2 else f"client terminate {PID}"
    assert asked in rig.daemon.calls
    assert not backend.terminate_client(9), "no client of any daemon"


@pytest.mark.parametrize("trouble", ["refuse", "hang"])
def test_a_termination_that_does_not_succeed_is_none(two: Ready, trouble: str) -> None:
    two.rig.daemon.connect(PID)
    getattr(two.rig.daemon, trouble)("terminate_client")
    assert not two.backend.terminate_client(PID)
    assert two.rig.daemon.clients == {PID}


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("2000M", 2000),
        ("2G", 2048),
        ("1.5G", 1536),
        ("2097152K", 2048),
        ("2097152000", 2000),
        ("-", None),
        ("", None),
        ("x", None),
    ],
)
def test_sizes_as_a_daemon_may_print_them(text: str, mib: int | None) -> None:
    assert mps_control.size_mib(text) == mib
