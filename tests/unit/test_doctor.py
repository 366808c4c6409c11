"""The doctor's checks on hosts where something is wrong: each says what, and the next step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeagent.cli.main import main
from edgeagent.config import Config, load_text
from edgeagent.doctor import gpu_checks, host_checks, kubelet_checks, uplink_checks
from edgeagent.doctor.checks import CHECKS, READY, examine, wait_ready
from edgeagent.doctor.examination import Examination
from edgeagent.doctor.findings import Finding, Outcome, worst
from edgeagent.fleet import certs
from edgeagent.node.clock import Moment


def config(root: Path, text: str = "") -> Config:
    base = f"hostRoot: {root}\ngpus: {{source: simulated}}\nkubernetes: {{enabled: false}}\n"
    return load_text(base + text, "agent.yaml")


def look(check: Callable[[Examination], Iterable[Finding]], c: Config) -> list[Finding]:
    x = Examination(c)
    try:
        return list(check(x))
    finally:
        x.close()


def write(root: Path, path: str, text: str = "") -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def spec(kind: str, device: str = "0", **edits: object) -> str:
    return json.dumps(
        {"cdiVersion": "0.6.0", "kind": kind, "devices": [{"name": device, "containerEdits": edits}]}
    )


# --- order and form ---


def test_order_is_from_driver_to_broker() -> None:
    names = list(CHECKS)
    assert names.index("driver") < names.index("container-runtime") < names.index("registration")
    assert names.index("registration") < names.index("isolation") < names.index("broker")
    assert set(READY) <= set(names)


def test_every_check_answers_on_an_empty_host(tmp_path: Path) -> None:
    """Nothing there at all: each check has something to say, and none ends in a traceback."""
    x = Examination(config(tmp_path))
    results = list(examine(x))
    x.close()
    assert [r.name for r in results] == list(CHECKS)
    assert all(r.findings for r in results if r.name != "certificates")
    bad = [f for r in results for f in r.findings if f.outcome is Outcome.FAIL]
    assert bad
    assert all(f.fix for f in bad), "each failure names the next step"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], Outcome.SKIP),
        ([Outcome.SKIP, Outcome.PASS], Outcome.PASS),
        ([Outcome.PASS, Outcome.WARN, Outcome.SKIP], Outcome.WARN),
        ([Outcome.WARN, Outcome.FAIL, Outcome.PASS], Outcome.FAIL),
    ],
    ids=str,
)
def test_worst(outcomes: list[Outcome], expected: Outcome) -> None:
    assert worst(outcomes) is expected


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "agent.yaml", f"hostRoot: {tmp_path}\ngpus: {{source: simulated}}\n")
    status = main(["doctor", "-c", str(path), "--json", "--check", "driver", "--check", "agent"])
    document = json.loads(capsys.readouterr().out)
    assert status == 1
    assert document["outcome"] == "fail"
    assert [c["name"] for c in document["checks"]] == ["driver", "agent"]
    assert {f["outcome"] for f in document["checks"][0]["findings"]} == {"pass"}


def test_bad_configuration_does_not_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "agent.yaml", "gpuz: 1\nmetrics: {listen: nowhere}\n")
    assert main(["doctor", "-c", str(path), "--check", "agent"]) == 1
    out = capsys.readouterr().out
    assert "gpuz: unknown key" in out
    assert "metrics.listen" in out
    assert "edgeagent check-config" in out


def test_ready_says_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "agent.yaml", f"hostRoot: {tmp_path}\n")
    assert main(["doctor", "ready", "-c", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "no agent answers" in out
    assert "systemctl start edgeagent" in out


def test_ready_without_waiting(tmp_path: Path) -> None:
    well, sentence = wait_ready(lambda: Examination(config(tmp_path)), 0.0)
    assert not well
    assert sentence


# --- GPUs and runtime ---


def test_no_gpu_names_the_reason(tmp_path: Path) -> None:
    c = load_text(f"hostRoot: {tmp_path}\ngpus: {{source: tegra}}\n", "agent.yaml")
    (finding,) = look(gpu_checks.driver, c)
    assert finding.outcome is Outcome.FAIL
    assert finding.fix


def test_unknown_simulated_profile(tmp_path: Path) -> None:
    c = load_text(f"hostRoot: {tmp_path}\ngpus: {{source: simulated, simulated: {{profile: nope}}}}\n", "x")
    (finding,) = look(gpu_checks.driver, c)
    assert finding.outcome is Outcome.FAIL
    assert "nope" in finding.what


def test_containerd_1_needs_the_runtime_class(tmp_path: Path) -> None:
    write(tmp_path, "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 2\n")
    said = look(gpu_checks.container_runtime, config(tmp_path))
    assert any(
        "pods need runtimeClassName: nvidia" in f.what and "containerd 2" in (f.fix or "") for f in said
    )
    assert any(f.outcome is Outcome.FAIL and "is not installed" in f.what for f in said)


def test_containerd_2_needs_nothing(tmp_path: Path) -> None:
    write(tmp_path, "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n")
    said = look(gpu_checks.container_runtime, config(tmp_path))
    assert {f.outcome for f in said} == {Outcome.PASS}
    assert any("no runtime class" in f.what for f in said)


CONTAINERD = "/var/lib/rancher/k3s/agent/etc/containerd"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param({}, "has not rendered a containerd configuration", id="K3s never ran"),
        pytest.param(
            {f"{CONTAINERD}/config.toml": "version = 2\n", f"{CONTAINERD}/config-v3.toml.tmpl": "x"},
            "config-v3.toml.tmpl has no effect: containerd 1 is here",
            id="template of the other containerd",
        ),
        pytest.param(
            {f"{CONTAINERD}/config.toml": "version = 3\n", f"{CONTAINERD}/config-v3.toml.tmpl": "x"},
            "does not include K3s's own template",
            id="copied template",
        ),
        pytest.param(
            {f"{CONTAINERD}/config.toml": "version = 3\n", "/etc/containerd/config.toml": "nvidia"},
            "never reads it",
            id="the other containerd's file edited",
        ),
    ],
)
def test_containerd_config(tmp_path: Path, files: dict[str, str], said: str) -> None:
    write(tmp_path, "/var/lib/rancher/k3s/agent/x")
    for path, text in files.items():
        write(tmp_path, path, text)
    found = look(gpu_checks.containerd_config, config(tmp_path))
    assert any(said in f.what and f.fix for f in found if f.outcome is Outcome.WARN)


@pytest.mark.parametrize(
    ("name", "text", "outcome", "said"),
    [
        ("a.json", spec("a/gpu"), Outcome.FAIL, "makes containerd 2 panic"),
        ("b.json", spec("vendor.com/g"), Outcome.FAIL, "makes containerd 2 panic"),
        ("c.json", "{", Outcome.WARN, "is no CDI spec"),
        ("d.yaml", "kind: [", Outcome.WARN, "is no CDI spec"),
        (
            "nvidia.json",
            spec("nvidia.com/gpu", deviceNodes=[{"path": "/dev/nvidia7"}]),
            Outcome.WARN,
            "names /dev/nvidia7, which does not exist",
        ),
    ],
    ids=["one-letter vendor", "one-letter class", "half a file", "bad YAML", "driver upgraded"],
)
def test_foreign_cdi_specs(tmp_path: Path, name: str, text: str, outcome: Outcome, said: str) -> None:
    path = write(tmp_path, f"/var/run/cdi/{name}", text)
    found = look(gpu_checks.cdi_directories, config(tmp_path))
    hit = next(f for f in found if said in f.what)
    assert hit.outcome is outcome
    assert hit.fix
    assert path.read_text() == text, "never touched"


def test_cdi_name_defined_twice(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write(tmp_path, f"/etc/cdi/{name}", spec("nvidia.com/gpu"))
    found = look(gpu_checks.cdi_directories, config(tmp_path))
    assert any("both define nvidia.com/gpu=0" in f.what for f in found)


def test_own_cdi_specs_are_fine(tmp_path: Path) -> None:
    write(tmp_path, "/var/run/cdi/edgeagent.io-share-m000001.json", spec("edgeagent.io/share", "m000001"))
    (finding,) = look(gpu_checks.cdi_directories, config(tmp_path))
    assert finding.outcome is Outcome.PASS


# --- kubelet ---


def test_kubelet_sockets(tmp_path: Path) -> None:
    """There and answering, a left-over file, one that refuses, none."""
    c = config(tmp_path)
    (missing,) = look(kubelet_checks.kubelet_sockets, c)
    assert "no kubelet has run" in missing.what

    plugins = tmp_path / "var/lib/kubelet/device-plugins"
    plugins.mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(plugins / "kubelet.sock"))
    write(tmp_path, "/var/lib/kubelet/pod-resources/kubelet.sock")
    with listener:
        listener.listen()
        answers, no_socket = look(kubelet_checks.kubelet_sockets, c)
        assert answers.outcome is Outcome.PASS
        assert "is no socket" in no_socket.what
    refuses, _ = look(kubelet_checks.kubelet_sockets, c)
    assert "does not answer" in refuses.what


@pytest.mark.parametrize(
    ("text", "version", "outcome", "said"),
    [
        ("", "v1.35.0", Outcome.PASS, "units of 1 MiB suit Kubernetes v1.35.0"),
        ("", "v1.36.0", Outcome.WARN, "set memoryUnitMiB to 64"),
        ("sharing: {memoryUnitMiB: 64, clusterVersion: v1.36.0}", None, Outcome.SKIP, "is offered as"),
        ("sharing: {memoryUnitMiB: 32768}", "v1.35.0", Outcome.FAIL, "no GPU has that much"),
        ("", None, Outcome.WARN, "set sharing.clusterVersion"),
    ],
    ids=["fine", "too fine for 1.36", "coarse", "too coarse", "unknown cluster"],
)
def test_memory_unit(tmp_path: Path, text: str, version: str | None, outcome: Outcome, said: str) -> None:
    if version is not None:
        text = text or f"sharing: {{clusterVersion: {version}}}"
        if "clusterVersion" not in text:
            text = text.replace("}", f", clusterVersion: {version}}}")
    found = look(kubelet_checks.memory_unit, config(tmp_path, text))
    assert any(f.outcome is outcome and said in f"{f.what} {f.fix}" for f in found), found


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16126340Ki", 15748),
        ("8Gi", 8192),
        ("500Mi", 500),
        ("1048576", 1),
        ("", None),
        (None, None),
        ("x", None),
    ],
)
def test_memory_mib(text: str | None, mib: int | None) -> None:
    assert kubelet_checks.memory_mib(text) == mib


@pytest.mark.parametrize(("text", "count"), [("100", 100), ("24k", 24000), ("2Ki", 2048), ("x", 0)])
def test_quantity(text: str, count: int) -> None:
    assert kubelet_checks.quantity(text) == count


# --- uplink ---


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    certs.make_ca(directory)
    certs.make_device(directory, "box-1", days=365)
    certs.make_device(directory, "box-2", days=10)
    return directory


def tls_config(pki: Path, device: str = "box-1", key: str | None = None) -> Config:
    tls = f"{{caFile: {pki}/ca.crt, certFile: {pki}/{device}.crt, keyFile: {pki}/{key or device}.key}}"
    return config(Path("/"), f"fleet: {{enabled: true, brokers: ['mqtts://127.0.0.1:1'], tls: {tls}}}")


def test_certificates(pki: Path) -> None:
    found = look(uplink_checks.certificates, tls_config(pki))
    assert {f.outcome for f in found} == {Outcome.PASS}
    (soon,) = [
        f for f in look(uplink_checks.certificates, tls_config(pki, "box-2")) if f.outcome is Outcome.WARN
    ]
    assert "box-2.crt ends on" in soon.what
    mixed = look(uplink_checks.certificates, tls_config(pki, "box-1", key="box-2"))
    assert any(f.outcome is Outcome.FAIL and "does not go with" in f.what for f in mixed)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("", "no certificate in it"), ("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----", "not a certificate")],
    ids=["missing", "empty", "junk"],
)  # fmt: skip
def test_bad_certificate_file(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    c = config(Path("/"), f"fleet: {{enabled: true, brokers: ['mqtts://x'], tls: {{caFile: {path}}}}}")
    (finding,) = look(uplink_checks.certificates, c)
    assert finding.outcome is Outcome.FAIL
    assert said in finding.what


def test_broker_reach(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    c = config(tmp_path, f"fleet: {{enabled: true, brokers: ['mqtt://127.0.0.1:{port}']}}")
    with listener:
        (up,) = look(uplink_checks.broker, c)
        assert up.outcome is Outcome.PASS
    (down,) = look(uplink_checks.broker, c)
    assert down.outcome is Outcome.FAIL
    assert f"port {port}" in (down.fix or "")
    nowhere = replace(c.fleet, brokers=("mqtt://nowhere.invalid",))
    (unknown,) = look(uplink_checks.broker, replace(c, fleet=nowhere))
    assert "cannot be resolved" in unknown.what


NOW_MS = 1_780_000_000_000  # 2026


@pytest.mark.parametrize(
    ("wall_ms", "synced", "outcome", "said"),
    [
        (NOW_MS, True, Outcome.PASS, "kept right"),
        (NOW_MS, False, Outcome.WARN, "nothing keeps it right"),
        (1000, False, Outcome.FAIL, "1970-01-01"),
    ],
    ids=["synchronised", "not synchronised", "booted in 1970"],
)
def test_clock(wall_ms: int, synced: bool, outcome: Outcome, said: str) -> None:
    finding = uplink_checks.judge_clock(Moment(wall_ms, 1000, "boot", synced))
    assert finding.outcome is outcome
    assert said in finding.what


# --- host ---


@pytest.mark.parametrize(
    ("files", "outcome"),
    [
        (["/sys/fs/cgroup/cgroup.controllers"], Outcome.PASS),
        (["/sys/fs/cgroup/memory/tasks"], Outcome.WARN),
        ([], Outcome.FAIL),
    ],
    ids=["v2", "v1", "none"],
)
def test_cgroups(tmp_path: Path, files: list[str], outcome: Outcome) -> None:
    for path in files:
        write(tmp_path, path)
    (finding,) = look(host_checks.cgroups, config(tmp_path))
    assert finding.outcome is outcome


def test_view_from_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.43.0.1")
    (no_mount,) = look(host_checks.view, replace(config(tmp_path), host_root="/"))
    assert "hostRoot is /" in no_mount.what
    write(tmp_path, "/proc/1/comm", "systemd-of-the-host\n")
    (other_pids,) = look(host_checks.view, config(tmp_path))
    assert "without hostPID" in other_pids.what


def test_disk(tmp_path: Path) -> None:
    (tmp_path / "var/lib/edgeagent").mkdir(parents=True)
    found = look(host_checks.disk, config(tmp_path))
    assert [f.outcome for f in found].count(Outcome.SKIP) == 2
    assert "MiB free" in found[0].what


def test_doctor_imports_little() -> None:
    """It must work where grpc or paho are damaged."""
    code = (
        "import sys; from edgeagent.cli import doctor; "
        "print([m for m in ('grpc', 'paho', 'pynvml', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "[]"
