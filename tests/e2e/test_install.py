"""install.sh on a machine of its own: fresh, again, interrupted, upgraded, uninstalled, on odd systems.

Field case I1. Every box has no network unless it says so: whatever is installed comes from the bundle.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.fakes.box import Box, Changes, unsupported
from tests.fakes.box.bundle import ARCH, PYTHON, bundle
from tests.fakes.kubelet import StandInApiServer, StandInKubelet

CHECKOUT = Path(__file__).resolve().parents[2]
REASON = unsupported()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

PREFIX, CONFIG = "/opt/edgeagent", "/etc/edgeagent/agent.yaml"
SIMULATED = "gpus: {source: simulated}\nmetrics: {enabled: false}\n"
NOT_YET = 3

BoxMaker = Callable[..., Box]


# --- what is installed from --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def share() -> Path:
    """What boxes see as /mnt: the bundle for this Python, unpacked and packed."""
    return bundle()


def variant(bundle: Path, target: Path, version: str, edit: dict[str, tuple[str, str]]) -> Path:
    """The bundle of another version: in the agent's wheel, each file of `edit` has one text replaced."""
    shutil.copytree(bundle, target)
    (wheel,) = (target / "wheels").glob("edgeagent-*.whl")
    changed = wheel.with_name("new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename in edit:
                before, after = edit[item.filename]
                assert before in content.decode()
                content = content.decode().replace(before, after, 1).encode()
            new.writestr(item, content)
    changed.rename(wheel)
    facts = (target / "BUNDLE").read_text().splitlines()
    (target / "BUNDLE").write_text("\n".join([f"version={version}", *facts[1:]]) + "\n")
    return sealed(target)


def sealed(bundle: Path) -> Path:
    (bundle / "SHA256SUMS").unlink()
    paths = sorted(p for p in bundle.rglob("*") if p.is_file())
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  ./{p.relative_to(bundle)}" for p in paths]
    (bundle / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return bundle


# --- boxes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kubelet() -> Iterator[StandInKubelet]:
    with StandInKubelet() as k:
        yield k


@pytest.fixture
def make_box(tmp_path: Path, share: Path, kubelet: StandInKubelet) -> Iterator[BoxMaker]:
    """Makes boxes: `box = make_box(); …; with box: …`."""
    made: list[Box] = []

    def make(name: str = "box", **options: object) -> Box:
        options.setdefault("share", share)
        options.setdefault("kubelet", kubelet.root / "var/lib/kubelet")
        box = Box(tmp_path / name, **options)  # type: ignore[arg-type]
        made.append(box)
        return box

    yield make
    for box in made:
        box.__exit__()


@dataclass(frozen=True)
class Fresh:
    """A fresh installation and a second run right after it. Boxes start from copies of `upper`."""

    upper: Path
    first: subprocess.CompletedProcess[str]
    again: subprocess.CompletedProcess[str]
    before: Changes
    after: Changes
    calls: list[str]
    calls_again: list[str]
    allocatable: dict[str, int]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, share: Path, kubelet: StandInKubelet) -> Fresh:
    """From the packed bundle, on a K3s server whose API server answers."""
    directory = tmp_path_factory.mktemp("fresh")
    name = kubelet.cluster.node.name
    box = Box(directory / "box", share, kubelet=kubelet.root / "var/lib/kubelet", network=True)
    box.k3s("v1.33.5+k3s1")
    box.write("/root/simulated.yaml", SIMULATED + f"kubernetes: {{nodeName: {name}}}\n")
    with StandInApiServer(kubelet) as api:
        api.write_kubeconfig(directory / "kubeconfig")
        box.write("/etc/rancher/k3s/k3s.yaml", (directory / "kubeconfig").read_text(), 0o600)
        with box:
            options = ["--offline", "/mnt/bundle.tar.gz", "--config", "/root/simulated.yaml"]
            first = install(box, *options)
            assert first.returncode == 0, first.stdout
            allocatable = dict(kubelet.cluster.node.allocatable)
            before, calls = box.changes(times=True), box.systemctl_calls
            again = install(box, "--offline", "/mnt/bundle.tar.gz")
            after, calls_again = box.changes(times=True), box.systemctl_calls[len(calls) :]
            assert box.run("systemctl", "stop", "edgeagent").returncode == 0
    return Fresh(box.upper, first, again, before, after, calls, calls_again, allocatable)


@pytest.fixture
def make_installed(make_box: BoxMaker, fresh: Fresh) -> BoxMaker:
    """Boxes on which edgeagent is installed and nothing runs, as after a boot."""

    def make(name: str = "box", **options: object) -> Box:
        box = make_box(name, **options)
        subprocess.run(["cp", "-a", f"{fresh.upper}/.", str(box.upper)], check=True)
        return box

    return make


def install(box: Box, *options: str, bundle: str = "/mnt/bundle") -> subprocess.CompletedProcess[str]:
    return box.run(f"{bundle}/install.sh", *options)


# --- it works ------------------------------------------------------------------------------------------


def test_fresh(fresh: Fresh) -> None:
    """From the packed bundle: a bare K3s server ends with the node showing the resources."""
    assert "edgeagent 0.1.0 is ready" in fresh.first.stdout
    assert fresh.allocatable["volcano.sh/vgpu-cores"] == 200
    assert (fresh.upper / CONFIG.lstrip("/")).read_text().startswith(SIMULATED)
    policies = fresh.upper / "var/lib/rancher/k3s/server/manifests/edgeagent-admission.yaml"
    assert "ValidatingAdmissionPolicy" in policies.read_text()
    assert list(fresh.upper.rglob("site-packages/edgeagent/__pycache__/agent.*.pyc"))
    reloads = [c for c in fresh.calls if "daemon-reload" in c or c.startswith("enable")]
    assert not reloads, "reloading systemd would take devices from running GPU containers"


def test_again(fresh: Fresh) -> None:
    """A second run changes not one byte or date, and touches no service."""
    assert fresh.again.returncode == 0, fresh.again.stdout
    assert fresh.after == fresh.before
    assert {c.split()[0] for c in fresh.calls_again} <= {"is-enabled", "is-active", "show"}


def test_first_configuration(make_installed: BoxMaker) -> None:
    """The memory unit follows the cluster's version, the uplink the options; what is missing is said."""
    box = make_installed()
    box.k3s("v1.36.2+k3s1")
    box.write("/etc/edgeagent/ca.pem", "x")
    (box.upper / CONFIG.lstrip("/")).unlink()
    with box:
        done = install(
            box, "--wait", "0", "--broker", "mqtts://broker.example.com:8883", "--site=plant-1"
        )  # fmt: skip
        config = yaml.safe_load(box.read(CONFIG))
        policies = box.read("/var/lib/rancher/k3s/server/manifests/edgeagent-admission.yaml")
    # There is no GPU here, and it says so instead of success.
    assert done.returncode == NOT_YET, done.stdout
    assert "does not share its GPUs yet: no GPU" in done.stdout
    assert config["sharing"]["memoryUnitMiB"] == 64
    assert config["node"]["site"] == "plant-1"
    assert config["fleet"] == {
        "enabled": True,
        "brokers": ["mqtts://broker.example.com:8883"],
        "tls": {"caFile": "/etc/edgeagent/ca.pem"},
    }
    assert "MutatingAdmissionPolicy" in policies
    assert "vgpu-memory-64mi" in policies


def test_interrupted_at_every_step(make_box: BoxMaker, fresh: Fresh) -> None:
    """Killed at each step in turn, and run again each time: the end is that of one undisturbed run."""
    box = make_box()
    box.k3s("v1.33.5+k3s1")
    for path in ("/root/simulated.yaml", "/etc/rancher/k3s/k3s.yaml"):
        box.write(path, (fresh.upper / path.lstrip("/")).read_text(), 0o600)
    command = ["/mnt/bundle/install.sh", "--config", "/root/simulated.yaml", "--wait", "0"]
    steps = ["checking this host", "program", "making /opt", "configuration", "K3s", "service", "waiting"]
    with box:
        for step in steps:
            process = box.start(*command)
            assert process.stdout is not None
            for line in process.stdout:
                if step in line:
                    break
            os.killpg(process.pid, signal.SIGKILL)
            box.sh("pkill -KILL -f '[i]nstall.sh' || true")  # the box's process numbers are its own
            process.stdout.close()
            process.wait(10)
        done = box.run(*command, "--wait", "30")
        assert done.returncode == 0, done.stdout
        box.run("systemctl", "stop", "edgeagent")
        interrupted = box.changes()
    undisturbed = make_box("other")
    undisturbed.upper = fresh.upper
    assert _comparable(interrupted.files) == _comparable(undisturbed.changes().files)


_DIFFERS_BY_ITSELF = (
    "__pycache__",  # has dates in it
    "/direct_url.json",  # where the wheel lay
    "/RECORD",  # has the one before in it
    "/var/lib/edgeagent/",
    "/root/",
)


def _comparable(files: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    return {p: c for p, c in files.items() if not any(part in p for part in _DIFFERS_BY_ITSELF)}


def test_new_flags_later(make_installed: BoxMaker) -> None:
    """A configuration that nobody edited takes a new option; an edited one is never touched."""
    box = make_installed()
    (box.upper / CONFIG.lstrip("/")).unlink()
    with box:
        first = install(box, "--wait", "0", "--site", "plant-1")
        assert first.returncode == NOT_YET, first.stdout
        asked = install(box, "--wait", "0", "--broker", "mqtt://10.0.0.5:1883")
        assert asked.returncode == NOT_YET, asked.stdout
        config = yaml.safe_load(box.read(CONFIG))
        assert config["fleet"]["brokers"] == ["mqtt://10.0.0.5:1883"]
        assert config["node"]["site"] == "plant-1", "what was asked for earlier stays"

        box.sh(f"sed -i 's/^isolation: auto/isolation: none/' {CONFIG}")
        edited = box.read(CONFIG)
        refused = install(box, "--wait", "0", "--broker", "mqtts://other:8883")
        assert "was edited by hand and stays as it is" in refused.stdout
        assert 'brokers: ["mqtts://other:8883"]' in refused.stdout
        assert box.read(CONFIG) == edited


def test_upgrade_and_back(make_installed: BoxMaker, share: Path, tmp_path: Path) -> None:
    """Another version waits for --upgrade and reports new keys. One that does not take the configuration
    is not put in place; one that does not become ready makes way for the earlier one."""
    schema = "edgeagent/config/schema.py"
    new_key = ("    placement: str = key(", "    shiny: int = key(7)\n    placement: str = key(")
    strict = ("wait_seconds: float = key(0.0, low=0,", "wait_seconds: float = key(0.0, low=0, high=9,")
    dead = (
        "def run(args: argparse.Namespace) -> int:\n",
        "def run(args: argparse.Namespace) -> int:\n    return 1\n",
    )
    shared = tmp_path / "share"
    variant(share / "bundle", shared / "next", "0.2.0", {schema: new_key})
    variant(share / "bundle", shared / "broken", "0.3.0", {schema: strict, "edgeagent/cli/run.py": dead})
    box = make_installed(share=shared)
    with box:
        box.run("systemctl", "start", "edgeagent")
        config = box.read(CONFIG)
        waits = install(box, "--wait", "0", bundle="/mnt/next")
        assert "edgeagent 0.1.0 stays; what is here (0.2.0) is not the same: --upgrade" in waits.stdout

        done = install(box, "--upgrade", bundle="/mnt/next")
        assert done.returncode == 0, done.stdout
        assert "sharing.shiny" in done.stdout
        assert "edgeagent 0.2.0 is ready" in done.stdout
        assert "venv-0.2.0-" in box.sh("cat /proc/$(cat /run/standin-systemd/edgeagent.service.pid)/cmdline")
        assert box.read(CONFIG) == config

        box.sh(f"echo 'sharing: {{waitSeconds: 60}}' >>{CONFIG}")
        refused = install(box, "--upgrade", bundle="/mnt/broken")
        assert refused.returncode == 1
        assert "waitSeconds: 60 is out of range" in refused.stdout
        assert "venv-0.2.0-" in box.sh(f"readlink {PREFIX}/venv")

        box.sh(f"sed -i /waitSeconds/d {CONFIG}")
        failed = install(box, "--upgrade", "--wait", "2", bundle="/mnt/broken")
        assert failed.returncode == 1, failed.stdout
        assert "0.3.0 did not become ready" in failed.stdout
        assert "the earlier version is back in place" in failed.stdout
        assert box.run(f"{PREFIX}/venv/bin/edgeagent", "status", "--json").returncode in (0, 2)
        assert box.read(f"{PREFIX}/installed").splitlines()[-1] == "version=0.2.0"


def test_uninstall_and_purge(make_installed: BoxMaker) -> None:
    """What was installed goes; configuration and state go with --purge only; the cluster's policies too."""
    box = make_installed()
    with box:
        box.run("systemctl", "start", "edgeagent")
        box.sh(
            "mkdir -p /run/cdi; echo '{}' >/run/cdi/edgeagent.io-share-m000001.json; echo '{}' >/run/cdi/nvidia.json"
        )
        tried = install(box, "--uninstall", "--dry-run")
        assert box.exists(f"{PREFIX}/venv"), tried.stdout

        done = install(box, "--uninstall")
        assert done.returncode == 0, done.stdout
        assert box.run("systemctl", "is-active", "edgeagent").returncode == 3
        left = [p for p in box.changes().paths() if "edgeagent" in p and not p.startswith("/root/")]
        assert left, "configuration and state stay"
        assert all(p.startswith(("/etc/edgeagent/", "/var/lib/edgeagent/")) for p in left)
        assert (
            "delete --ignore-not-found -f /var/lib/rancher/k3s/server/manifests/edgeagent-admission.yaml"
            in box.read("/run/k3s-calls")
        )
        assert box.sh("ls /run/cdi").split() == ["nvidia.json"]

        assert install(box, "--uninstall", "--purge").returncode == 0
        assert not [p for p in box.changes().paths() if "edgeagent" in p and not p.startswith("/root/")]


def test_dry_run_changes_nothing(make_box: BoxMaker) -> None:
    """Every step is said; nothing is written."""
    box = make_box()
    box.k3s()
    with box:
        before = box.changes(times=True)
        done = install(box, "--dry-run")
        assert done.returncode == 0, done.stdout
        assert box.changes(times=True) == before
        assert not [c for c in box.systemctl_calls if c.split()[0] not in ("is-enabled", "is-active", "show")]
    for said in (
        "-m venv --without-pip",
        CONFIG,
        "edgeagent-admission.yaml",
        "edgeagent.service",
        "would run: systemctl restart",
    ):
        assert said in done.stdout


# --- odd systems ---------------------------------------------------------------------------------------


def test_bare_python_and_read_only_usr(make_box: BoxMaker) -> None:
    """PEP 668, no venv module, no ensurepip, no pip, /usr read-only: nothing of that is needed or touched."""
    box = make_box(read_only=["/usr"])
    library = os.path.dirname(os.path.realpath(os.__file__))
    box.write("/root/simulated.yaml", SIMULATED)
    with box:
        box.sh(
            f"rm -rf {library}/venv {library}/ensurepip {library}/site-packages; touch {library}/EXTERNALLY-MANAGED"
        )
        box.sh("mkdir -p /var/lib/rancher/k3s/agent")
        system = box.changes().paths(library)
        done = install(box, "--config", "/root/simulated.yaml")
        assert done.returncode == 0, done.stdout
        assert "/usr/local/bin/edgeagent cannot be made (read-only)" in done.stdout
        assert [p for p in box.changes().paths(library) if "__pycache__" not in p] == system


def test_checkout_without_compiler_or_trace(make_box: BoxMaker, share: Path, tmp_path: Path) -> None:
    """From a read-only checkout: the wheel is built elsewhere, no compiler is called, nothing stays behind."""
    shared = tmp_path / "share"
    (shared / "checkout").mkdir(parents=True)
    parts = [
        "edgeagent",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "install.sh",
        "configs",
        "systemd",
    ]
    subprocess.run(["cp", "-a", *(str(CHECKOUT / p) for p in parts), str(shared / "checkout")], check=True)
    for library in (shared / "checkout").rglob("*.so"):
        library.unlink()
    wheels = tmp_path / "share/wheels"
    shutil.copytree(share / "bundle/wheels", wheels)
    cached = share / "setuptools"
    if not cached.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cached), "setuptools>=77"],
            check=True,
        )
    shutil.copy(next(cached.iterdir()), wheels)
    box = make_box(share=shared)
    for compiler in ("cc", "gcc", "clang", "g++", "c++"):
        box.write(f"/usr/local/sbin/{compiler}", "#!/bin/sh\necho called >>/run/compiler\nexit 1\n", 0o755)
    box.env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt/wheels"}
    tree = {p: p.stat().st_mtime_ns for p in (shared / "checkout").rglob("*")}
    with box:
        done = install(box, "--no-start", bundle="/mnt/checkout")
        assert done.returncode == 0, done.stdout
        assert "is installed and starts at boot" in done.stdout
        assert not box.exists("/run/compiler")
        assert {p: p.stat().st_mtime_ns for p in (shared / "checkout").rglob("*")} == tree
        assert "start" not in [c.split()[0] for c in box.systemctl_calls]


def test_missing_wheel(make_box: BoxMaker, share: Path, tmp_path: Path) -> None:
    """What has no ready-made wheel ends it in seconds, by name: it is never compiled."""
    shared = tmp_path / "share"
    shutil.copytree(share / "bundle", shared / "bundle")
    for wheel in (shared / "bundle/wheels").glob("grpcio-*"):
        wheel.unlink()
    sealed(shared / "bundle")
    box = make_box(share=shared)
    with box:
        done = install(box)
        assert not box.exists(f"{PREFIX}/venv")
    assert done.returncode == 1
    assert "there is no ready-made wheel of grpcio" in done.stdout


OLD = '#!/bin/sh\ncase "$*" in *version_info*) echo {} ;; *) exit 1 ;; esac\n'


@pytest.mark.parametrize("version", ["3.6", "3.8", "3.9", "2.7"])
def test_python_too_old(make_box: BoxMaker, version: str) -> None:
    """One clear line, and nothing changed."""
    box = make_box()
    box.write("/root/old/python3", OLD.format(version), 0o755)
    with box:
        before = box.changes(times=True)
        done = install(box, "--python", "/root/old/python3")
        assert box.changes(times=True) == before
    assert done.returncode == 1
    complaint = [line for line in done.stdout.splitlines() if not line.startswith("==>")]
    assert len(complaint) == 1
    assert f"Python 3.10 or newer is needed (/root/old/python3 is {version})" in complaint[0]


@pytest.mark.parametrize(
    ("directory", "said"),
    [("/opt", "/opt/edgeagent"), ("/etc", "/etc/edgeagent"), ("/var", "/var/lib/edgeagent")],
)
def test_read_only_places(make_box: BoxMaker, directory: str, said: str) -> None:
    """A place that cannot be written stops it before anything has changed."""
    box = make_box(read_only=[directory])
    with box:
        before = box.changes()
        done = install(box)
        assert box.changes() == before
    assert done.returncode == 1
    assert f"cannot write to {said}: read-only file system?" in done.stdout


def test_noexec_opt(make_box: BoxMaker) -> None:
    box = make_box()
    with box:
        box.sh("mount -t tmpfs -o noexec tmpfs /opt")
        done = install(box)
    assert done.returncode == 1
    assert "/opt is mounted noexec: nothing was changed" in done.stdout


def _truncated(bundle: Path, target: Path) -> None:
    (target / "bundle.tar.gz").write_bytes((bundle.parent / "bundle.tar.gz").read_bytes()[:-4000])


def _damaged(bundle: Path, target: Path) -> None:
    shutil.copytree(bundle, target / "bundle.tar.gz")
    (target / "bundle.tar.gz/systemd/edgeagent.service").write_text("x")


def _other_arch(bundle: Path, target: Path) -> None:
    shutil.copytree(bundle, target / "bundle.tar.gz")
    facts = (target / "bundle.tar.gz/BUNDLE").read_text().replace(ARCH, "riscv64")
    (target / "bundle.tar.gz/BUNDLE").write_text(facts)
    sealed(target / "bundle.tar.gz")


def _other_python(bundle: Path, target: Path) -> None:
    shutil.copytree(bundle, target / "bundle.tar.gz")
    facts = (target / "bundle.tar.gz/BUNDLE").read_text().replace(f"pythons={PYTHON}", "pythons=3.99")
    (target / "bundle.tar.gz/BUNDLE").write_text(facts)
    sealed(target / "bundle.tar.gz")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_truncated, "damaged or not a bundle"),
        (_damaged, "its checksums do not match"),
        (_other_arch, "this bundle is for riscv64"),
        (_other_python, f"is {PYTHON}, not in this bundle"),
        (lambda bundle, target: None, "cannot read it"),
    ],
    ids=["truncated", "damaged", "other architecture", "other Python", "missing"],
)
def test_bad_bundle(
    make_box: BoxMaker, share: Path, tmp_path: Path, spoil: Callable[[Path, Path], None], said: str
) -> None:
    """A bundle that cannot be used is refused in one line, before anything has changed."""
    shared = tmp_path / "share"
    shared.mkdir()
    (shared / "install.sh").write_bytes((share / "bundle/install.sh").read_bytes())
    (shared / "install.sh").chmod(0o755)
    spoil(share / "bundle", shared)
    box = make_box(share=shared)
    with box:
        done = install(box, "--offline", "/mnt/bundle.tar.gz", bundle="/mnt")
        assert not box.exists(PREFIX)
    assert done.returncode == 1
    assert said in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bogus"], "unknown option --bogus"),
        (["--broker"], "--broker needs a value"),
        (["--broker", "broker:1883"], "not mqtt://"),
        (["--broker", 'mqtt://x"\nfoo: bar'], "not a URL"),
        (["--site", "Plant 1"], "must be of [a-z0-9-]"),
        (["--purge"], "goes with --uninstall"),
        (["--config", "/nowhere"], "cannot read it"),
        (["--wait", "long"], "not a number"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_options(options: list[str], said: str) -> None:
    """Each in one sentence, as whoever calls it."""
    done = subprocess.run([CHECKOUT / "install.sh", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_two_at_once(make_installed: BoxMaker) -> None:
    """The second installer does not start."""
    box = make_installed()
    with box:
        box.sh(
            "flock /run/edgeagent-install.lock sleep 60 >/dev/null 2>&1 & while flock -n /run/edgeagent-install.lock true; do :; done"
        )
        done = install(box)
    assert done.returncode == 1
    assert "another install.sh is running" in done.stdout


# --- K3s (field case I2) ---------------------------------------------------------------------------------

OLD_CONTAINERD = (
    'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  enable_selinux = false\n'
    '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
    '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]\n  SystemdCgroup = true\n'
)
CONTAINERD_DIR = "/var/lib/rancher/k3s/agent/etc/containerd"


@pytest.mark.parametrize("template", [None, "mine\n"], ids=["no template", "operator's template"])
def test_runtime_where_k3s_does_not_look(make_installed: BoxMaker, template: str | None) -> None:
    """Only when asked: a template with the base include, under the name this containerd reads, never over
    an existing one; the rendered file and /etc/containerd stay; K3s is not restarted by itself."""
    box = make_installed()
    box.k3s("v1.30.4+k3s1", containerd=OLD_CONTAINERD)
    box.write("/usr/local/bin/nvidia-container-runtime", "#!/bin/sh\n", 0o755)
    box.write("/etc/containerd/config.toml", "version = 2\n")
    if template is not None:
        box.write(f"{CONTAINERD_DIR}/config.toml.tmpl", template)
    with box:
        quiet = install(box, "--wait", "0")
        assert "is where K3s does not look: install.sh --configure-k3s" in quiet.stdout
        assert box.exists(f"{CONTAINERD_DIR}/config.toml.tmpl") == (template is not None)

        asked = install(box, "--wait", "0", "--configure-k3s")
        written = box.read(f"{CONTAINERD_DIR}/config.toml.tmpl")
        if template is None:
            assert written.startswith('{{ template "base" . }}\n')
            assert '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]' in written
            assert 'BinaryName = "/usr/local/bin/nvidia-container-runtime"' in written
        else:
            assert written == template
            assert "is yours and stays as it is" in asked.stdout
            assert 'BinaryName = "/usr/local/bin/nvidia-container-runtime"' in asked.stdout
        assert "systemctl restart k3s, or --restart-k3s" in asked.stdout
        assert box.read(f"{CONTAINERD_DIR}/config.toml") == OLD_CONTAINERD
        assert box.read("/etc/containerd/config.toml") == "version = 2\n"
        assert not box.exists(f"{CONTAINERD_DIR}/config-v3.toml.tmpl")
        assert "restart k3s" not in box.systemctl_calls

        install(box, "--wait", "0", "--configure-k3s", "--restart-k3s")
        assert "restart k3s" in box.systemctl_calls


def test_runtime_that_k3s_has_not_seen(make_installed: BoxMaker) -> None:
    """Installed after K3s had started: a restart is all it needs, and it is said, not done."""
    box = make_installed()
    box.k3s("v1.30.4+k3s1", containerd=OLD_CONTAINERD)
    box.write("/usr/bin/nvidia-container-runtime", "#!/bin/sh\n", 0o755)
    with box:
        done = install(box, "--wait", "0", "--configure-k3s")
        assert "K3s has not seen it" in done.stdout
        assert "systemctl restart k3s, or --restart-k3s" in done.stdout
        assert not box.exists(f"{CONTAINERD_DIR}/config.toml.tmpl")
        assert "restart k3s" not in box.systemctl_calls


def test_agent_node(make_installed: BoxMaker) -> None:
    """Policies are a server's business."""
    box = make_installed()
    shutil.rmtree(box.upper / "var/lib/rancher/k3s/server")
    with box:
        done = install(box)
        assert done.returncode == 0, done.stdout
        assert "admission policies belong on a server" in done.stdout
        assert not box.exists("/var/lib/rancher/k3s/server")


def test_data_dir_and_old_cluster(make_installed: BoxMaker) -> None:
    """K3s's data elsewhere is found; policies that the cluster does not know are left out."""
    box = make_installed()
    shutil.rmtree(box.upper / "var/lib/rancher")
    box.k3s("v1.29.3+k3s1", data="/srv/k3s")
    box.write("/etc/rancher/k3s/config.yaml", "data-dir: /srv/k3s\n")
    with box:
        done = install(box, "--wait", "0")
        assert "admission policies need Kubernetes 1.30, this is v1.29.3+k3s1: left out" in done.stdout
        assert box.sh("ls /srv/k3s/server/manifests") == ""


def test_changed_unit_is_loaded(make_installed: BoxMaker) -> None:
    """A changed unit needs daemon-reload, and the service a restart: done once."""
    box = make_installed()
    with box:
        box.run("systemctl", "start", "edgeagent")
        box.sh("sed -i s/RestartSec=2/RestartSec=9/ /etc/systemd/system/edgeagent.service")
        box.run("systemctl", "daemon-reload")
        calls = len(box.systemctl_calls)
        done = install(box)
        assert done.returncode == 0, done.stdout
        assert "RestartSec=2" in box.read("/etc/systemd/system/edgeagent.service")
        assert {"daemon-reload", "restart edgeagent.service"} <= set(box.systemctl_calls[calls:])
