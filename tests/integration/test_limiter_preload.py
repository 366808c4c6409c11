"""The limiter as a container gets it: mounted by what the back end prepared, through ld.so.preload."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.config.schema import LimiterConfig
from edgeagent.gpus.model import Gpu, GpuKind
from edgeagent.hostroot import HostRoot
from edgeagent.isolation.backend import RunningContainer, ShareToEnforce
from edgeagent.isolation.levels import Axis, Level
from edgeagent.isolation.limiter import build, files
from edgeagent.isolation.limiter_backend import LimiterBackend, run_canary
from edgeagent.node.cdi import Mount
from tests.fakes.cuda import Tools, compiler, finish, read_until, tools
from tests.fakes.cuda.box import Line

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

GPU = Gpu("GPU-1", 0, GpuKind.DISCRETE, "nvml", "Test", 8192)
SHARE = ShareToEnforce("uid-1", "main", "m000001", GPU, memory_mib=1024, cores_pct=None)
BOTH = frozenset({Axis.MEMORY, Axis.COMPUTE})


def may_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs root and mount namespaces")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as it is shipped, built by the system's compiler."""
    found = build.find_compiler(build.native_arch(), "cc")
    assert found is not None
    return build.build(tmp_path_factory.mktemp("library"), build.native_arch(), found)


@pytest.fixture
def backend(tmp_path: Path, library: Path) -> LimiterBackend:
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)  # processes of other users come by
    config = LimiterConfig(overhead_mib=24, library_dir=str(tmp_path / "lib"))
    return LimiterBackend(config, HostRoot(), str(tmp_path / "run"), built=library)


class Container:
    """A mount namespace in which a share's mounts are made as a runtime makes them."""

    def __init__(self, mounts: tuple[Mount, ...], built: Tools) -> None:
        self._mounts = mounts
        self._tools = built

    def command(self, *words: str) -> list[str]:
        script = ["set -e", "mount -t tmpfs none /usr/local/lib", f"mkdir -p {files.CONTAINER_DIR}"]
        # /etc is covered by a copy, since ld.so.preload may not exist to be mounted on.
        script += ["cp -a /etc /usr/local/lib/etc", "mount --bind /usr/local/lib/etc /etc"]
        for mount in self._mounts:
            script.append(f": > {mount.container_path}")
            script.append(f"mount --bind {mount.host_path} {mount.container_path}")
            options = ",".join(o for o in mount.options if o in ("ro", "rw", "nosuid", "nodev", "noexec"))
            script.append(f"mount -o remount,bind,{options} {mount.container_path}")
        script.append('exec "$@"')
        return ["unshare", "-m", "--propagation", "private", "sh", "-c", "\n".join(script), "sh", *words]

    def drive(self, *commands: str) -> list[str]:
        return [
            "env",
            "-i",
            f"LD_LIBRARY_PATH={self._tools.directory}",
            str(self._tools.drive),
            "dlsym",
            *commands,
        ]


@pytest.fixture
def container(backend: LimiterBackend) -> Iterator[Container]:
    assert backend.probe(GPU, Axis.MEMORY).level is Level.COOPERATIVE
    yield Container(backend.prepare(SHARE, BOTH).mounts, tools())
    backend.release(SHARE)


@needs_mounts
def test_a_container_is_kept_within_its_share(container: Container) -> None:
    """With an empty environment, and as root and another user alike."""
    for user in ((), ("user:1001",)):
        command = container.command(*container.drive(*user, "init", "ctx", "alloc:900", "alloc:200", "info"))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answers = [Line.parse(line) for line in done.stdout.splitlines()[len(user) :]]
        assert [line.rc for line in answers] == [0, 0, 0, 2, 0]
        assert answers[-1].values == (100.0, 1024.0)
        assert done.stderr == ""


@needs_mounts
def test_everything_else_in_the_container_runs_as_before(container: Container) -> None:
    script = "ls / >/dev/null && echo 1 | sort && expr 2 + 1"
    done = subprocess.run(container.command("sh", "-c", script), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n3\n", "")


@needs_mounts
def test_the_container_cannot_change_what_it_was_given(container: Container) -> None:
    script = (
        f"for f in limits {files.LIBRARY_NAME}; do (: >> {files.CONTAINER_DIR}/$f) 2>/dev/null && echo wrote $f; done; "
        "(: >> /etc/ld.so.preload) 2>/dev/null && echo wrote preload; "
        f"rm {files.CONTAINER_DIR}/state 2>/dev/null && echo removed state; echo end"
    )
    done = subprocess.run(container.command("sh", "-c", script), capture_output=True, text=True, check=True)
    assert done.stdout == "end\n"


@needs_mounts
def test_evidence_is_what_is_seen_from_outside(backend: LimiterBackend, container: Container) -> None:
    """The library by its inode in the process's maps, and the process in the state file."""
    command = container.command(*container.drive("init", "ctx", "alloc:100", "wait"))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    read_until(process, "ready")
    idle = RunningContainer("c", None, (process.pid,))
    at_work = RunningContainer("c", None, (process.pid,), (process.pid,))
    level = backend.evidence(SHARE, idle, Axis.MEMORY)
    assert (level.level, level.reason) == (Level.COOPERATIVE, None)
    level = backend.evidence(SHARE, at_work, Axis.MEMORY)
    assert (level.level, level.reason) == (Level.COOPERATIVE, None)
    assert "124 MiB charged" in level.evidence
    backend.prepare(SHARE, BOTH)  # another container of that name: this one is not in its account
    assert backend.evidence(SHARE, at_work, Axis.MEMORY).reason == "state_denied"
    finish(process)


@needs_mounts
def test_a_process_that_slipped_past_is_found(backend: LimiterBackend, container: Container) -> None:
    """Started without the mounts, as in a pod that mounts its own ld.so.preload over ours."""
    built = tools()
    process = subprocess.Popen(
        [str(built.drive), "dlsym", "init", "ctx", "alloc:5000", "wait"],
        env={"LD_LIBRARY_PATH": str(built.directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    read_until(process, "ready")
    running = RunningContainer("c", None, (process.pid,), (process.pid,))
    level = backend.evidence(SHARE, running, Axis.COMPUTE)
    assert (level.level, level.reason) == (Level.NONE, "opted_out")
    finish(process)


def test_the_canary_proves_the_library_on_a_driver(library: Path) -> None:
    driver = str(tools().directory / "libcuda.so.1")
    result = run_canary(library, driver)
    assert (result.problem, result.untried, result.driver) == (None, None, driver)
    assert [p.name for p in library.parent.iterdir()] == [library.name]


def test_the_canary_says_when_there_is_no_driver(library: Path) -> None:
    result = run_canary(library, "libcuda-that-is-not-there.so.1")
    assert (result.problem, result.untried) == (None, "no libcuda-that-is-not-there.so.1 on this host")


def test_the_canary_finds_a_library_that_does_nothing(tmp_path: Path) -> None:
    """Zero bytes, and one that the loader complains of and goes on without."""
    for content in (b"", files.CONTAINER_DIR.encode()):
        useless = tmp_path / "useless.so"
        useless.write_bytes(content)
        assert run_canary(useless, "libcuda.so.1").problem is not None


def test_the_canary_finds_a_library_that_does_not_understand_its_limits(
    tmp_path: Path, library: Path
) -> None:
    """It refuses also what fits, as one of another version would."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(library.read_bytes().replace(b"overhead_bytes\0", b"overhead_bytez\0"))
    result = run_canary(broken, str(tools().directory / "libcuda.so.1"))
    assert "cuDeviceTotalMem: 2 instead of 0" in (result.problem or "")


def test_a_canary_that_hangs_is_left_behind(library: Path) -> None:
    result = run_canary(library, "libcuda.so.1", deadline_s=0.0)
    assert result.problem == "the canary did not end within 0 s"


def test_the_shipped_library_runs_on_old_systems(tmp_path: Path) -> None:
    """Built by ziglang, as the wheel's: nothing newer than glibc 2.17, for both architectures."""
    for arch in build.ARCHES:
        found = build.find_compiler(arch, "zig")
        if found is None:
            pytest.skip("ziglang is not installed")
        path = build.build(tmp_path, arch, found)
        said = subprocess.run(["readelf", "-VhdW", path], capture_output=True, text=True, check=True).stdout
        versions = {
            tuple(map(int, word[6:].split("."))) for word in said.split() if word.startswith("GLIBC_2.")
        }
        assert versions
        assert max(versions) <= (2, 17)
        assert {"x86_64": "X86-64", "aarch64": "AArch64"}[arch] in said
        needed = [line.split("[")[1].rstrip("]") for line in said.splitlines() if "(NEEDED)" in line]
        # The loader itself is there before any library is.
        assert {n for n in needed if not n.startswith("ld-linux")} <= {"libc.so.6", "libdl.so.2"}


def test_a_wheel_carries_the_library_and_one_without_compilers_works(tmp_path: Path) -> None:
    """Both from a copy of the sources: setup.py must never fail for want of a compiler."""
    root = Path(build.__file__).parents[3]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    shutil.copytree(
        root / "edgeagent", source / "edgeagent", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    script = (
        # Without ziglang, whose builds take their time: the test above does those.
        "import importlib.util as u, os, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'ziglang' else find(name, *a); "
        "import setuptools.build_meta as b; os.makedirs(sys.argv[1]); b.build_wheel(sys.argv.pop(1))"
    )
    for path, expected in ((os.defpath, True), (str(tmp_path / "nothing"), False)):
        wheels = tmp_path / f"wheels-{expected}"
        subprocess.run(
            [sys.executable, "-c", script, str(wheels)],
            cwd=source,
            env={**os.environ, "PATH": path, "CC": ""},
            capture_output=True,
            check=True,
        )
        (wheel,) = wheels.glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert "edgeagent/isolation/limiter/limiter.h" in names
        name = f"edgeagent/isolation/limiter/{build.library_name(build.native_arch())}"
        assert (name in names) is expected
        shutil.rmtree(source / "build", ignore_errors=True)
