"""A test CA and certificates for brokers and devices, made with the `openssl` binary.

openssl rather than the `cryptography` package: it is on every machine that runs a broker, the device
itself never makes certificates, and a 12 MB wheel for a tool of the workbench would not pay. The CA
is for tests and small sites; a fleet has its own PKI.

A device certificate's common name is the node's name: mosquitto (use_identity_as_username) makes it
the user name that the ACL's %u stands for.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeagent.errors import FleetError
from edgeagent.fleet.topics import is_name

CA_DAYS = 3650
OPENSSL_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert_file: Path
    key_file: Path


def make_ca(directory: Path, name: str = "edgeagent test CA") -> Pair:
    """`ca.crt` and `ca.key` in `directory`; existing ones are kept. FleetError when openssl fails."""
    pair = Pair(directory / "ca.crt", directory / "ca.key")
    if pair.cert_file.exists() and pair.key_file.exists():
        return pair
    _prepare(directory)
    _key(pair.key_file)
    config = (
        "[req]\nprompt=no\ndistinguished_name=dn\nx509_extensions=ext\n"
        f"[dn]\nCN={_plain(name)}\n"
        "[ext]\nbasicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\n"
        "subjectKeyIdentifier=hash\n"
    )
    with _config(config) as path:
        _openssl(
            "req", "-x509", "-new", "-sha256", "-days", str(CA_DAYS), "-key", str(pair.key_file),
            "-out", str(pair.cert_file), "-config", path,
        )  # fmt: skip
    return pair


def make_device(directory: Path, node: str, days: int = 365) -> Pair:
    """`{node}.crt` and `{node}.key`, signed by the CA in `directory`, for a client."""
    if not is_name(node):
        raise FleetError(f"cannot make a certificate for {node!r}: [a-z0-9-], 1 to 63 long")
    return _signed(directory, node, days, "clientAuth", ())


def make_broker(directory: Path, names: Sequence[str], days: int = 365) -> Pair:
    """`broker.crt` and `broker.key` for host names and addresses, signed by the CA in `directory`."""
    if not names:
        raise FleetError("cannot make a broker's certificate without a host name")
    return _signed(directory, "broker", days, "serverAuth", names)


def _signed(directory: Path, name: str, days: int, usage: str, alternatives: Sequence[str]) -> Pair:
    ca = make_ca(directory)
    pair = Pair(directory / f"{name}.crt", directory / f"{name}.key")
    _key(pair.key_file)
    sans = ",".join(f"{'IP' if _is_address(n) else 'DNS'}:{_plain(n)}" for n in alternatives)
    config = (
        f"[req]\nprompt=no\ndistinguished_name=dn\n[dn]\nCN={name}\n"
        f"[ext]\nbasicConstraints=critical,CA:FALSE\nextendedKeyUsage={usage}\n"
        "keyUsage=critical,digitalSignature\nauthorityKeyIdentifier=keyid\n"
        + (f"subjectAltName={sans}\n" if sans else "")
    )
    request = directory / f".{name}.csr"
    serial = f"0x{os.urandom(16).hex()}"
    try:
        with _config(config) as path:
            _openssl("req", "-new", "-key", str(pair.key_file), "-out", str(request), "-config", path)
            _openssl(
                "x509", "-req", "-sha256", "-days", str(days), "-in", str(request),
                "-CA", str(ca.cert_file), "-CAkey", str(ca.key_file), "-set_serial", serial,
                "-extfile", path, "-extensions", "ext", "-out", str(pair.cert_file),
            )  # fmt: skip
    finally:
        request.unlink(missing_ok=True)
    return pair


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise FleetError(f"cannot make {directory}: {e}") from e


def _key(path: Path) -> None:
    _prepare(path.parent)
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    # P-256: small handshakes, and every TLS library has it.
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))


@contextmanager
def _config(text: str) -> Iterator[str]:
    """The path of a file with `text`, inside `with`."""
    with tempfile.NamedTemporaryFile("w", suffix=".cnf") as f:
        f.write(text)
        f.flush()
        yield f.name


def _openssl(*arguments: str) -> None:
    binary = shutil.which("openssl")
    if binary is None:
        raise FleetError("cannot make certificates: openssl is not installed")
    try:
        done = subprocess.run(
            [binary, *arguments], capture_output=True, text=True, timeout=OPENSSL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise FleetError(f"cannot make certificates: {e}") from e
    if done.returncode != 0:
        raise FleetError(f"cannot make certificates: openssl {arguments[0]}: {done.stderr.strip()[-300:]}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _plain(text: str) -> str:
    """Text for an openssl configuration value. FleetError for what could change its meaning."""
    if not text or any(c in "\n\r\\$#;,[]=\"'" or not c.isprintable() for c in text):
        raise FleetError(f"cannot use {text!r} in a certificate")
    return text
