"""Which XIDs make a GPU unhealthy, and what an operator should do about each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from edgeagent.config.plain import load_plain
from edgeagent.errors import ConfigError

_NONE: Mapping[str, str] = {}
SHIPPED = Path(__file__).with_name("xids.yaml")


class XidClass(str, Enum):
    APP = "app"  # never takes shares away
    DEGRADED = "degraded"  # a warning; shares stay
    FATAL = "fatal"
    UNKNOWN = "unknown"  # not known to be harmless: as fatal

    @property
    def makes_unhealthy(self) -> bool:
        return self in (XidClass.FATAL, XidClass.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Xid:
    number: int
    name: str
    xid_class: XidClass
    advice: str


class XidCatalogue:
    """Looks XIDs up; a number that is not listed is class unknown."""

    def __init__(
        self, xids: Iterable[Xid], unlisted_advice: str, overrides: Mapping[str, str] = _NONE
    ) -> None:
        self._xids = {x.number: x for x in xids}
        self._unlisted_advice = unlisted_advice
        self._overrides = {int(number): XidClass(name) for number, name in overrides.items()}

    def __getitem__(self, number: int) -> Xid:
        xid = self._xids.get(number) or Xid(
            number, "Not in the catalogue", XidClass.UNKNOWN, self._unlisted_advice
        )
        override = self._overrides.get(number)
        return xid if override is None else replace(xid, xid_class=override)

    def __iter__(self) -> Iterator[Xid]:
        return (self[number] for number in sorted(self._xids))

    def __len__(self) -> int:
        return len(self._xids)

    def with_overrides(self, overrides: Mapping[str, str]) -> XidCatalogue:
        """The same catalogue under another configuration (health.xidClasses)."""
        return XidCatalogue(self._xids.values(), self._unlisted_advice, overrides)


def load_catalogue(overrides: Mapping[str, str] = _NONE, path: Path = SHIPPED) -> XidCatalogue:
    """The shipped catalogue. Raises ConfigError when the file is damaged."""
    document = load_plain(path)
    try:
        advice: dict[str, str] = document["advice"]
        xids = [
            Xid(int(e["number"]), str(e["name"]), XidClass(e["class"]), e.get("advice") or advice[e["class"]])
            for e in document["xids"]
        ]
        return XidCatalogue(xids, advice["unknown"], overrides)
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"cannot use {path}: not an XID catalogue ({e})") from e
