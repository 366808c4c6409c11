"""The limiter's back end on generated host trees: what it prepares, what counts as evidence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgeagent.config.schema import LimiterConfig
from edgeagent.errors import IsolationError
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, Level
from edgeagent.isolation.limiter import files
from edgeagent.isolation.limiter_backend import CanaryResult, LimiterBackend, judge_canary

CARD = Gpu("GPU-1", 0, GpuKind.DISCRETE, "nvml", "Test", 8192)
JETSON = Gpu("GPU-2", 0, GpuKind.INTEGRATED, "tegra", "Orin", 8192)
MEMORY, COMPUTE = frozenset({Axis.MEMORY}), frozenset({Axis.COMPUTE})
BOTH = MEMORY | COMPUTE
STARTED = 4242


def share(**changes: object) -> ShareToEnforce:
    values: dict[str, object] = {
        "pod_uid": "uid-1", "container": "main", "share": "m000001", "gpu": CARD, "memory_mib": 2000,
        "cores_pct": 30,
    }  # fmt: skip
    return ShareToEnforce(**{**values, **changes})  # type: ignore[arg-type]  # a table's values


class Host:
    """A host tree with the agent's directories and the processes that a test puts into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = HostRoot(root)

    def backend(
        self,
        *,
        overhead_mib: int = 0,
        content: bytes = b"\x7fELF library",
        canary: CanaryResult | None = None,
    ) -> LimiterBackend:
        built = self.root / "built.so"
        built.write_bytes(content)
        self.canaries = 0

        def run(library: Path, driver: str) -> CanaryResult:
            self.canaries += 1
            assert library.is_file()
            return canary or CanaryResult(driver="libcuda.so.1")

        config = LimiterConfig(overhead_mib=overhead_mib)
        return LimiterBackend(config, self.host, "/run/edgeagent", built=built, canary=run)

    def ready(self, **options: object) -> LimiterBackend:
        backend = self.backend(**options)  # type: ignore[arg-type]  # passed through
        assert backend.probe(CARD, Axis.MEMORY).level is Level.COOPERATIVE
        return backend

    def write(self, path: str, content: str | bytes) -> None:
        where = self.host.path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(content.encode() if isinstance(content, str) else content)

    def library(self) -> Path:
        (library,) = self.host.path(LimiterConfig().library_dir).iterdir()
        return library

    def process(
        self, pid: int, *, mapped: int | None, preload: str | None = f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}\n",
        libc: str = "/usr/lib/libc.so.6", musl: bool = False, namespaces: tuple[int, ...] = (7,),
        library: bytes = b"\x7fELF library",
    ) -> None:  # fmt: skip
        """`mapped`: the inode under which the library is in its maps; None: it is not."""
        maps = f"7f00-7f10 r-xp 00000000 08:01 99 {libc}\n7f20-7f30 rw-p 00000000 00:00 0 \n"
        if mapped is not None:
            maps += f"7f40-7f50 r-xp 00000000 08:01 {mapped} {files.CONTAINER_DIR}/{files.LIBRARY_NAME}\n"
        self.write(f"/proc/{pid}/maps", maps)
        self.write(
            f"/proc/{pid}/status", f"Name:\tx\nNSpid:\t{pid}\t" + "\t".join(map(str, namespaces)) + "\n"
        )
        self.write(f"/proc/{pid}/stat", f"{pid} (a) b)) S " + " ".join(["0"] * 18) + f" {STARTED} 0 0\n")
        if preload is not None:
            self.write(f"/proc/{pid}/root/etc/ld.so.preload", preload)
        self.write(f"/proc/{pid}/root{files.CONTAINER_DIR}/{files.LIBRARY_NAME}", library)
        if musl:
            self.write(f"/proc/{pid}/root/lib/ld-musl-x86_64.so.1", b"\x7fELF")

    def account(self, pid: int, mib: int = 100, started: int = STARTED) -> None:
        """Puts a process into the share's state file."""
        path = self.host.path("/run/edgeagent/limiter/m000001/state")
        data = bytearray(path.read_bytes())
        high = int.from_bytes(data[20:24], "little")
        data[20:24] = (high + 1).to_bytes(4, "little")
        data[24:32] = (int.from_bytes(data[24:32], "little") + mib * files.MIB).to_bytes(8, "little")
        at = 12288 + 64 * high
        data[at : at + 24] = (
            pid.to_bytes(4, "little") + bytes(4) + started.to_bytes(8, "little")
            + (mib * files.MIB).to_bytes(8, "little")
        )  # fmt: skip
        path.write_bytes(data)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def running(*pids: int, gpu: tuple[int, ...] | None = None) -> RunningContainer:
    return RunningContainer("c", None, pids, pids if gpu is None else gpu)


# ---- probe ----------------------------------------------------------------------------------------


def test_without_a_built_library_it_says_so(host: Host) -> None:
    backend = LimiterBackend(LimiterConfig(), host.host, "/run/edgeagent", built=host.root / "none.so")
    result = backend.probe(CARD, Axis.MEMORY)
    assert result.level is Level.NONE
    assert (result.problem or "").startswith("not_built: ")


def test_a_file_that_is_no_library_counts_as_not_built(host: Host) -> None:
    result = host.backend(content=b"").probe(CARD, Axis.MEMORY)
    assert result.level is Level.NONE
    assert (result.problem or "").startswith("not_built: ")


@pytest.mark.parametrize(
    ("canary", "level", "words"),
    [
        (CanaryResult(driver="libcuda.so.1"), Level.COOPERATIVE, "refused memory above its limit"),
        (
            CanaryResult(untried="no libcuda.so.1 on this host"),
            Level.COOPERATIVE,
            "not tried against a driver",
        ),
        (CanaryResult(problem="over the limit, dlsym: 0 instead of 2"), Level.NONE, "0 instead of 2"),
    ],
    ids=["proved", "untried", "failed"],
)
def test_the_canary_decides(host: Host, canary: CanaryResult, level: Level, words: str) -> None:
    result = host.backend(canary=canary).probe(CARD, Axis.MEMORY)
    assert result.level is level
    assert words in (result.evidence or result.problem or "")


def test_one_canary_serves_all_gpus_and_axes(host: Host) -> None:
    backend = host.backend()
    results = {backend.probe(gpu, axis) for gpu in (CARD, JETSON) for axis in Axis}
    assert len(results) == 1
    assert host.canaries == 1


def test_the_library_is_installed_for_everybody_and_a_newer_one_beside_it(host: Host) -> None:
    host.ready()
    first = host.library()
    assert first.stat().st_mode & 0o777 == 0o755
    assert first.read_bytes() == b"\x7fELF library"
    inode = first.stat().st_ino
    host.ready()
    assert first.stat().st_ino == inode  # running containers have this one
    host.ready(content=b"\x7fELF another")
    assert len(list(first.parent.iterdir())) == 2


def test_a_directory_that_cannot_be_written_is_the_probes_problem(host: Host) -> None:
    host.write(LimiterConfig().library_dir, "a file where a directory must be")
    result = host.backend().probe(CARD, Axis.MEMORY)
    assert result.level is Level.NONE
    assert "cannot write" in (result.problem or "")


@pytest.mark.parametrize(
    ("status", "out", "err", "expected"),
    [
        (0, {"stage": "done", "wrong": [], "why": None, "driver": "d"}, "", CanaryResult(driver="d")),
        (0, {"stage": "files", "wrong": [], "why": "none"}, "", CanaryResult(untried="none")),
        (0, {"stage": "driver", "wrong": ["a", "b"], "why": "x"}, "", CanaryResult(problem="a; b")),
        (0, {"stage": "done", "wrong": [], "why": None}, "ERROR: ld.so: ignored.\nx", CanaryResult(problem="ERROR: ld.so: ignored.")),
        (-11, None, "", CanaryResult(problem="the canary was ended by SIGSEGV")),
        (-9, None, "", CanaryResult(untried="the canary was killed: the control group may lack memory for a driver")),
        (1, None, "Traceback", CanaryResult(problem="the canary said nothing to be understood: 'Traceback'")),
        (0, [1], "", CanaryResult(problem="the canary said nothing to be understood: b'[1]'")),
    ],
    ids=["done", "no driver", "wrong", "noise", "crash", "out of memory", "traceback", "not ours"],
)  # fmt: skip
def test_what_a_canarys_end_means(status: int, out: object, err: str, expected: CanaryResult) -> None:
    text = b"" if out is None else json.dumps(out).encode()
    assert judge_canary(status, text, err.encode()) == expected


# ---- prepare --------------------------------------------------------------------------------------


def test_a_container_gets_its_files_and_cannot_write_but_one(host: Host) -> None:
    umask = os.umask(0o077)
    try:
        edits = host.ready(overhead_mib=250).prepare(share(), BOTH)
    finally:
        os.umask(umask)
    assert edits.env == {}
    mounts = {m.container_path: m for m in edits.mounts}
    assert set(mounts) == {
        f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}", f"{files.CONTAINER_DIR}/limits",
        f"{files.CONTAINER_DIR}/state", "/etc/ld.so.preload",
    }  # fmt: skip
    assert {p for p, m in mounts.items() if "rw" in m.options} == {f"{files.CONTAINER_DIR}/state"}
    assert all("ro" in m.options for p, m in mounts.items() if not p.endswith("/state"))
    modes = {p: host.host.path(m.host_path).stat().st_mode & 0o777 for p, m in mounts.items()}
    assert modes == {
        f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}": 0o755,
        f"{files.CONTAINER_DIR}/limits": 0o444,
        f"{files.CONTAINER_DIR}/state": 0o666,
        "/etc/ld.so.preload": 0o444,
    }
    text = host.host.path(mounts[f"{files.CONTAINER_DIR}/limits"].host_path).read_text()
    assert text == (
        "edgeagent-limits 1\nmemory_bytes 2097152000\ncores_pct 30\noverhead_bytes 262144000\nunified 0\n"
        "share m000001\ngpu GPU-1\nend\n"
    )
    assert host.host.path(mounts["/etc/ld.so.preload"].host_path).read_text() == (
        f"{files.CONTAINER_DIR}/{files.LIBRARY_NAME}\n"
    )


@pytest.mark.parametrize(
    ("axes", "cores", "gpu", "expected"),
    [
        (BOTH, 30, CARD, (2000 * files.MIB, 30, False)),
        (BOTH, None, CARD, (2000 * files.MIB, 100, False)),
        (MEMORY, 30, CARD, (2000 * files.MIB, 100, False)),
        (COMPUTE, 30, CARD, (files.MAX_MEMORY_BYTES, 30, False)),
        (BOTH, 30, JETSON, (2000 * files.MIB, 30, True)),
    ],
    ids=["both", "no cores", "memory only", "compute only", "integrated"],
)
def test_limits_are_those_of_the_axes_in_charge(
    host: Host, axes: frozenset[Axis], cores: int | None, gpu: Gpu, expected: tuple[int, int, bool]
) -> None:
    limits = host.ready().limits_for(share(cores_pct=cores, gpu=gpu), axes)
    assert (limits.memory_bytes, limits.cores_pct, limits.unified) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_mib": 250}, "holds no process"),
        ({"memory_mib": 0}, "holds no process"),
        ({"memory_mib": 2**40}, "memory_bytes"),
        ({"cores_pct": 101}, "cores_pct"),
        ({"cores_pct": -5}, "cores_pct"),
        ({"share": "../../etc"}, "cannot be a directory's"),
        ({"share": ""}, "cannot be a directory's"),
    ],
    ids=["no more than the overhead", "nothing", "huge", "too many cores", "negative", "path", "empty"],
)
def test_a_share_that_cannot_be_kept_is_refused(host: Host, changes: dict[str, object], words: str) -> None:
    backend = host.ready(overhead_mib=250)
    with pytest.raises(IsolationError, match=words):
        backend.prepare(share(**changes), BOTH)


def test_nothing_is_prepared_before_a_probe_succeeded(host: Host) -> None:
    with pytest.raises(IsolationError, match="not in place"):
        host.backend().prepare(share(), BOTH)


def test_every_start_begins_with_an_empty_account(host: Host) -> None:
    backend = host.ready()
    assert backend.prepare(share(), BOTH) == backend.prepare(share(), BOTH)
    host.account(7)
    assert backend.state(share()) != files.parse_state(files.new_state().ljust(files.STATE_BYTES, b"\0"))
    backend.prepare(share(), BOTH)
    state = backend.state(share())
    assert state is not None
    assert (state.total_bytes, list(state.slots)) == (0, [])


def test_a_library_that_was_tidied_away_is_put_back(host: Host) -> None:
    backend = host.ready()
    host.library().unlink()
    backend.prepare(share(), BOTH)
    assert host.library().is_file()


def test_release_removes_the_files_and_may_come_twice(host: Host) -> None:
    backend = host.ready()
    backend.prepare(share(), BOTH)
    backend.release(share())
    backend.release(share())
    assert list(host.host.path("/run/edgeagent/limiter").iterdir()) == []
    assert backend.state(share()) is None


def test_no_room_for_the_files_is_said(host: Host) -> None:
    backend = host.ready()
    host.write("/run/edgeagent/limiter", "a file where a directory must be")
    with pytest.raises(IsolationError, match="cannot write /run/edgeagent/limiter/m000001"):
        backend.prepare(share(), BOTH)


# ---- evidence (E1: four ways in which a configured limit is not in force) -----------------------------


@pytest.fixture
def prepared(host: Host) -> LimiterBackend:
    backend = host.ready()
    backend.prepare(share(), BOTH)
    return backend


@pytest.mark.parametrize("axis", list(Axis))
def test_mapped_and_accounted_is_cooperative(host: Host, prepared: LimiterBackend, axis: Axis) -> None:
    inode = host.library().stat().st_ino
    for pid, inner in ((500, 7), (501, 8)):
        host.process(pid, mapped=inode, namespaces=(inner,))
        host.account(inner)
    level = prepared.evidence(share(), running(500, 501), axis)
    assert (level.level, level.mechanism, level.reason) == (Level.COOPERATIVE, "limiter", None)
    assert level.evidence == "mapped and accounted in 2 of 2 GPU processes, 200 MiB charged"


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        ({"mapped": None}, "not_preloaded"),
        ({"mapped": 12345}, "not_preloaded"),
        ({"mapped": None, "musl": True, "libc": "/lib/ld-musl-x86_64.so.1"}, "musl_image"),
        ({"mapped": None, "musl": True, "libc": "/bin/static"}, "musl_image"),
        ({"mapped": None, "library": b""}, "empty_library"),
        ({"mapped": None, "preload": None}, "opted_out"),
        ({"mapped": None, "preload": "/mine.so\n"}, "opted_out"),
        ({"mapped": None, "preload": None, "namespaces": (20, 3)}, "nested"),
    ],
    ids=["not mapped", "another file of that name", "musl", "static on musl", "zero bytes", "no ld.so.preload",
         "another ld.so.preload", "container in the container"],
)  # fmt: skip
def test_what_is_missing_has_a_name(
    host: Host, prepared: LimiterBackend, process: dict[str, object], reason: str
) -> None:
    host.process(500, **process)  # type: ignore[arg-type]  # a table's values
    for seen in (running(500), running(500, gpu=())):
        level = prepared.evidence(share(), seen, Axis.MEMORY)
        assert (level.level, level.reason) == (Level.NONE, reason)
        assert "500" in level.evidence


@pytest.mark.parametrize(
    "inside", [None, (8, STARTED), (7, STARTED + 1)], ids=["not there", "another PID", "an earlier process"]
)
def test_a_process_that_is_not_in_the_account(
    host: Host, prepared: LimiterBackend, inside: tuple[int, int] | None
) -> None:
    """As with a state file that the process's user could not open."""
    host.process(500, mapped=host.library().stat().st_ino)
    if inside is not None:
        host.account(inside[0], started=inside[1])
    level = prepared.evidence(share(), running(500), Axis.MEMORY)
    assert (level.level, level.reason) == (Level.NONE, "state_denied")


@pytest.mark.parametrize("content", [b"", b"x" * files.STATE_BYTES], ids=["empty", "nonsense"])
def test_a_damaged_account_proves_nothing(host: Host, prepared: LimiterBackend, content: bytes) -> None:
    host.process(500, mapped=host.library().stat().st_ino)
    host.write("/run/edgeagent/limiter/m000001/state", content)
    assert prepared.evidence(share(), running(500), Axis.MEMORY).reason == "state_denied"


def test_one_process_that_slipped_past_spoils_the_container(host: Host, prepared: LimiterBackend) -> None:
    host.process(500, mapped=host.library().stat().st_ino)
    host.account(7)
    host.process(501, mapped=None)
    assert prepared.evidence(share(), running(500, 501), Axis.MEMORY).reason == "not_preloaded"


def test_before_any_process_uses_the_gpu(host: Host, prepared: LimiterBackend) -> None:
    assert prepared.evidence(share(), running(), Axis.MEMORY).reason == "no_gpu_use_yet"
    host.process(500, mapped=host.library().stat().st_ino)
    level = prepared.evidence(share(), running(500, gpu=()), Axis.MEMORY)
    assert level.level is Level.COOPERATIVE
    assert level.evidence == "mapped in 1 of 1 processes, 0 of them accounted; the driver lists none"
    host.account(7)
    level = prepared.evidence(share(), running(500, gpu=()), Axis.MEMORY)
    assert level.evidence == "mapped in 1 of 1 processes, 1 of them accounted; the driver lists none"


def test_a_process_that_ended_meanwhile_is_not_held_against_it(host: Host, prepared: LimiterBackend) -> None:
    host.process(500, mapped=host.library().stat().st_ino)
    host.account(7)
    assert prepared.evidence(share(), running(500, 999), Axis.MEMORY).level is Level.COOPERATIVE


def test_a_container_keeps_the_library_of_the_agent_that_started_it(
    host: Host, prepared: LimiterBackend
) -> None:
    inode = host.library().stat().st_ino
    host.process(500, mapped=inode)
    host.account(7)
    newer = host.ready(content=b"\x7fELF newer")
    assert newer.evidence(share(), running(500), Axis.MEMORY).level is Level.COOPERATIVE
