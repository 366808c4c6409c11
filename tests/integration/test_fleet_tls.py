"""TLS, certificates, passwords, WebSockets, several brokers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeagent.config.schema import TlsConfig
from edgeagent.errors import FleetError
from edgeagent.fleet import certs
from tests.fakes.fleet.harness import FakeClock, RunningUplink, config, wait_until
from tests.fakes.fleet.snapshots import NODE
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, available
from tests.fakes.mosquitto.broker import free_port

pytestmark = pytest.mark.skipif(
    available() is None or shutil.which("openssl") is None, reason="mosquitto and openssl are needed"
)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    certs.make_broker(directory, ["localhost"])
    certs.make_device(directory, NODE)
    return directory


@pytest.fixture
def tls_broker(tmp_path: Path, pki: Path) -> Iterator[tuple[Mosquitto, int]]:
    """Plain MQTT on .port, mutual TLS on the second port."""
    port = free_port()
    extra = (
        f"listener {port} 127.0.0.1\ncafile {pki}/ca.crt\ncertfile {pki}/broker.crt\n"
        f"keyfile {pki}/broker.key\nrequire_certificate true\n"
    )
    with Mosquitto(tmp_path / "broker", extra) as broker:
        yield broker, port


def tls(pki: Path, name: str = NODE) -> TlsConfig:
    return TlsConfig(str(pki / "ca.crt"), str(pki / f"{name}.crt"), str(pki / f"{name}.key"))


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_mutual_tls(tls_broker: tuple[Mosquitto, int], pki: Path, tmp_path: Path, protocol: str) -> None:
    broker, port = tls_broker
    with Observer(broker.port) as observer:
        fleet = config(f"mqtts://localhost:{port}", tls=tls(pki), protocol=protocol)
        with RunningUplink(fleet, tmp_path / "s") as up:
            observer.wait_payload("/status")
            observer.wait_payload("/tele/m")
            up.stop()
        observer.wait_payload("/status", lambda p: p["state"] == "offline")


def test_a_host_name_that_does_not_match_is_refused(
    tls_broker: tuple[Mosquitto, int], pki: Path, tmp_path: Path
) -> None:
    with RunningUplink(config(f"mqtts://127.0.0.1:{tls_broker[1]}", tls=tls(pki)), tmp_path / "s") as up:
        problem = wait_until(lambda: up.uplink.state().problem)
        assert "certificate is not accepted" in problem
        assert not up.uplink.state().connected


def test_an_unknown_ca_is_refused(tls_broker: tuple[Mosquitto, int], pki: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    certs.make_ca(other)
    mixed = TlsConfig(str(other / "ca.crt"), str(pki / f"{NODE}.crt"), str(pki / f"{NODE}.key"))
    with RunningUplink(config(f"mqtts://localhost:{tls_broker[1]}", tls=mixed), tmp_path / "s") as up:
        assert "certificate is not accepted" in wait_until(lambda: up.uplink.state().problem)


def test_rotated_client_certificates_count_from_the_next_connection_on(
    tls_broker: tuple[Mosquitto, int], pki: Path, tmp_path: Path
) -> None:
    """The file is bad at first (mosquitto closes the handshake, or it cannot be read), then right."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "box.crt").write_text("")
    shutil.copy(pki / f"{NODE}.key", own / "box.key")
    settings = TlsConfig(str(pki / "ca.crt"), str(own / "box.crt"), str(own / "box.key"))
    with RunningUplink(config(f"mqtts://localhost:{tls_broker[1]}", tls=settings), tmp_path / "s") as up:
        assert "client certificate" in wait_until(lambda: up.uplink.state().problem)
        shutil.copy(pki / f"{NODE}.crt", own / "box.crt")
        up.wait_connected()
        assert up.uplink.state().problem is None


def test_certificate_dates_before_the_clock_is_right_are_explained(
    tls_broker: tuple[Mosquitto, int], pki: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "expired"
    directory.mkdir()
    for name in ("ca.crt", "ca.key"):
        shutil.copy(pki / name, directory / name)
    certs.make_broker(directory, ["localhost"], days=-1)
    port = free_port()
    extra = f"listener {port} 127.0.0.1\ncafile {pki}/ca.crt\ncertfile {directory}/broker.crt\nkeyfile {directory}/broker.key\n"
    with Mosquitto(tmp_path / "b2", extra):
        fleet = config(f"mqtts://localhost:{port}", tls=TlsConfig(str(pki / "ca.crt")))
        with RunningUplink(fleet, tmp_path / "s", clock=FakeClock(synced=False)) as up:
            problem = wait_until(lambda: up.uplink.state().problem)
            assert "expired" in problem
            assert "clock is not synchronised" in problem


def test_password_file(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    # "box-1:secret", as mosquitto_passwd -U would hash it from this plain file
    passwords.write_text("box-1:secret\n")
    binary = shutil.which("mosquitto_passwd")
    if binary is None:
        pytest.skip("mosquitto_passwd is not installed")

    subprocess.run([binary, "-U", str(passwords)], check=True)
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    with Mosquitto(tmp_path / "b", f"password_file {passwords}", anonymous=False) as broker:
        fleet = config(broker.url, username="box-1", password_file=str(secret))
        with RunningUplink(fleet, tmp_path / "s") as up:
            assert "Not authorized" in wait_until(lambda: up.uplink.state().problem)
            secret.write_text("secret\n")
            up.wait_connected()
    assert "secret" not in str(up.uplink.state())


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_websockets(tmp_path: Path, pki: Path, secure: bool, protocol: str) -> None:
    port = free_port()
    extra = f"listener {port} 127.0.0.1\nprotocol websockets\n"
    if secure:
        extra += f"certfile {pki}/broker.crt\nkeyfile {pki}/broker.key\n"
    with Mosquitto(tmp_path / "b", extra) as broker, Observer(broker.port) as observer:
        url = f"{'wss' if secure else 'ws'}://localhost:{port}/mqtt"
        fleet = config(url, protocol=protocol, tls=TlsConfig(str(pki / "ca.crt")))
        with RunningUplink(fleet, tmp_path / "s") as up:
            observer.wait_payload("/status")
            for n in range(30):
                up.uplink.event("alloc", "T", f"{n} " + "x" * 400)
            observer.wait(lambda seen: sum(s.topic.endswith("/evt/alloc") for s in seen) >= 10)


def test_brokers_are_tried_in_order_and_the_first_is_preferred(tmp_path: Path) -> None:
    with (
        Mosquitto(tmp_path / "b1") as first,
        Mosquitto(tmp_path / "b2") as second,
        FlakyProxy(first.port) as proxy,
    ):
        proxy.refuse(True)
        with RunningUplink(config(proxy.url, second.url), tmp_path / "s") as up:
            up.wait_connected()
            assert up.uplink.state().broker == second.url
            proxy.refuse(False)
            second.restart()
            wait_until(lambda: up.uplink.state().broker == proxy.url)


def test_a_proxy_without_pysocks_is_said_not_ignored(tmp_path: Path) -> None:
    """paho would go out directly."""
    try:
        import socks  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("PySocks is installed")
    with Mosquitto(tmp_path / "b") as broker:
        fleet = config(broker.url, proxy="socks5://127.0.0.1:1080")
        with RunningUplink(fleet, tmp_path / "s") as up:
            assert "PySocks" in wait_until(lambda: up.uplink.state().problem)
            assert not up.uplink.state().connected


@pytest.mark.parametrize("name", ["", "A", "a/b", "a b", "x\ny"])
def test_certificates_are_for_node_names_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(FleetError):
        certs.make_device(tmp_path, name)
    with pytest.raises(FleetError):
        certs.make_broker(tmp_path, ["a\n[ext]"])


def test_made_keys_are_private_and_the_ca_is_kept(pki: Path) -> None:
    before = (pki / "ca.crt").read_bytes()
    pair = certs.make_device(pki, "box-9")
    assert (pki / "ca.crt").read_bytes() == before
    assert pair.key_file.stat().st_mode & 0o777 == 0o600
