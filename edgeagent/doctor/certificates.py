"""When an X.509 certificate is valid, from its file: Python's ssl tells that of CAs only."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _EXPLICIT_0, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


@dataclass(frozen=True, slots=True)
class Validity:
    not_before: datetime
    not_after: datetime


def validities(pem: str) -> list[Validity]:
    """Of every certificate in a PEM text, in their order. ValueError for what is no certificate."""
    found = [_validity(ssl.PEM_cert_to_DER_cert(m.group(0))) for m in _PEM.finditer(pem)]
    if not found:
        raise ValueError("no certificate in it")
    return found


def _validity(der: bytes) -> Validity:
    # Certificate { TBSCertificate { [0] version, serial, algorithm, issuer, Validity { Time, Time }, …
    try:
        tbs = _inside(_inside(der, _SEQUENCE), _SEQUENCE)
        if tbs[0] == _EXPLICIT_0:
            tbs = _after(tbs)
        for _ in range(3):
            tbs = _after(tbs)
        times = _inside(tbs, _SEQUENCE)
        return Validity(_time(times), _time(_after(times)))
    except IndexError as e:
        raise ValueError("not a certificate") from e


def _element(data: bytes) -> tuple[int, int, int]:
    """Tag, start and end of the content of the DER element that `data` begins with."""
    length, start = data[1], 2
    if length & 0x80:
        size = length & 0x7F
        if not 1 <= size <= 4:
            raise ValueError("not a certificate")
        length, start = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
    if start + length > len(data):
        raise ValueError("not a certificate")
    return data[0], start, start + length


def _inside(data: bytes, tag: int) -> bytes:
    found, start, end = _element(data)
    if found != tag:
        raise ValueError("not a certificate")
    return data[start:end]


def _after(data: bytes) -> bytes:
    return data[_element(data)[2] :]


def _time(data: bytes) -> datetime:
    tag, start, end = _element(data)
    text = data[start:end].decode("ascii", "replace")
    if tag == _UTC_TIME:
        # RFC 5280: years 50 to 99 are of the last century.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("not a certificate")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
