"""Kubernetes quantities, as far as resources of devices, CPU and memory need them."""

from __future__ import annotations

from decimal import Decimal

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


def parse(quantity: str | int) -> int:
    """The whole number that a quantity means, rounded up: "8k" is 8000, "1Ki" is 1024, "500m" is 1."""
    text = str(quantity)
    for suffix, bits in _BINARY.items():
        if text.endswith(suffix):
            return _up(Decimal(text[: -len(suffix)]) * 2**bits)
    suffix = text[-1] if text[-1] in _DECIMAL else ""
    return _up(Decimal(text[: len(text) - len(suffix)]) * Decimal(10) ** _DECIMAL[suffix])


def _up(number: Decimal) -> int:
    whole = int(number)
    return whole if whole == number else whole + 1


def canonical(number: int) -> str:
    """How the API server writes a count back: 8000 becomes "8k"."""
    for suffix in ("P", "T", "G", "M", "k"):
        unit = 10 ** _DECIMAL[suffix]
        if number and number % unit == 0:
            return f"{number // unit}{suffix}"
    return str(number)
