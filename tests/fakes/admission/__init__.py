"""A stand-in for the API server's admission: evaluates our policies on objects, without a cluster.

CEL comes from cel-python; what Kubernetes adds to CEL (quantity(), list indexOf, JSONPatch) is added
here for as much as the policies use. Unlike the API server it does not type-check expressions.
"""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from typing import Any

import celpy
from celpy import celtypes

_SUFFIX = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "m": Decimal("0.001"),
}


class _Quantity(celtypes.IntType):
    """A Kubernetes quantity as an integer number of thousandths."""


class JSONPatch(celtypes.MessageType):
    """The CEL type of MutatingAdmissionPolicy."""


def _quantity(text: Any) -> _Quantity:
    m = re.fullmatch(r"([+-]?[0-9.]+)([kMG]|[KMG]i|m)?", str(text))
    if not m:
        raise ValueError(f"not a quantity: {text!r}")
    return _Quantity(int(Decimal(m.group(1)) * _SUFFIX[m.group(2) or ""] * 1000))


def _compare(a: Any, b: Any) -> celtypes.IntType:
    return celtypes.IntType((a > b) - (a < b))


def _as_integer(q: Any) -> celtypes.IntType:
    whole, rest = divmod(int(q), 1000)
    if rest:
        raise ValueError("cannot convert value to integer")
    return celtypes.IntType(whole)


_FUNCTIONS: dict[str, Any] = {
    "quantity": _quantity,
    "compareTo": _compare,
    "asInteger": _as_integer,
    "indexOf": lambda items, item: celtypes.IntType(list(items).index(item)),
    "JSONPatch": JSONPatch,
}


class Policy:
    """One policy document, compiled."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.spec = document["spec"]
        self._env = celpy.Environment()
        self._programs: dict[str, Any] = {}

    def _evaluate(self, expression: str, activation: dict[str, Any]) -> Any:
        if expression not in self._programs:
            self._programs[expression] = self._env.program(
                self._env.compile(expression), functions=_FUNCTIONS
            )
        result = self._programs[expression].evaluate(activation)
        return celtypes.ListType(result) if isinstance(result, list) else result

    def _activation(self, obj: dict[str, Any]) -> dict[str, Any]:
        activation: dict[str, Any] = {"object": celpy.json_to_cel(obj), "variables": celtypes.MapType()}
        for variable in self.spec.get("variables", []):
            value = self._evaluate(variable["expression"], activation)
            activation["variables"][celtypes.StringType(variable["name"])] = value
        return activation

    def refusals(self, obj: dict[str, Any]) -> list[str]:
        """Messages of the validations that `obj` fails."""
        activation = self._activation(obj)
        return [
            v["message"] for v in self.spec["validations"] if not self._evaluate(v["expression"], activation)
        ]

    def mutate(self, obj: dict[str, Any]) -> dict[str, Any]:
        """`obj` as it would be stored; each mutation sees what the one before it left."""
        obj = copy.deepcopy(obj)
        activation = self._activation(obj)
        if not all(self._evaluate(c["expression"], activation) for c in self.spec.get("matchConditions", [])):
            return obj
        for mutation in self.spec["mutations"]:
            for patch in self._evaluate(mutation["jsonPatch"]["expression"], self._activation(obj)):
                _apply(obj, {str(k): v for k, v in patch.items()})
        return obj


def _apply(obj: Any, patch: dict[str, Any]) -> None:
    """RFC 6902 add and remove."""
    *parents, last = [p.replace("~1", "/").replace("~0", "~") for p in str(patch["path"]).split("/")[1:]]
    for step in parents:
        obj = obj[int(step)] if isinstance(obj, list) else obj[step]
    if patch["op"] == "add":
        obj[last] = str(patch["value"])
    elif patch["op"] == "remove":
        del obj[last]
    else:
        raise ValueError(f"operation {patch['op']} is not expected here")
