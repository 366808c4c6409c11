"""The topic tree of one node, and what a valid name in it is.

`gpufleet/v1/{site}/{node}/…`, at most seven slashes in all (AWS IoT disconnects a client that uses
more), every level made of [a-z0-9-].
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from edgeagent.errors import FleetError

ROOT = "gpufleet/v1"
MAX_SLASHES = 7
MAX_TOPIC_BYTES = 256
EVENT_KINDS = ("xid", "thermal", "oom", "overlimit", "alloc", "agent")

_LEVEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_UNSAFE = re.compile(r"[^a-z0-9]+")


def is_name(text: str) -> bool:
    """Whether `text` may stand as one level: 1 to 63 of [a-z0-9-], not starting or ending in '-'."""
    return bool(_LEVEL.match(text))


def slug(text: str) -> str:
    """`text` as one valid level. Names that are valid already stay as they are; others get a hash of
    the original appended, so that two different ids never share a topic."""
    if is_name(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    stem = _UNSAFE.sub("-", text.lower()).strip("-")[:54].strip("-")
    return f"{stem}-{digest}" if stem else digest


def check_topic(topic: str) -> str:
    """`topic` if it can be published to; FleetError naming what is wrong with it otherwise."""
    if topic.count("/") > MAX_SLASHES:
        raise FleetError(f"cannot publish to {topic[:80]!r}: more than {MAX_SLASHES} slashes")
    if len(topic.encode("utf-8", "replace")) > MAX_TOPIC_BYTES:
        raise FleetError(f"cannot publish to {topic[:80]!r}…: longer than {MAX_TOPIC_BYTES} bytes")
    for level in topic.split("/"):
        if not is_name(level):
            raise FleetError(f"cannot publish to {topic[:80]!r}: level {level[:40]!r} is not [a-z0-9-]")
    return topic


@dataclass(frozen=True, slots=True)
class Topics:
    """Every topic of one node. Raises FleetError where site or node is no valid level."""

    site: str
    node: str

    def __post_init__(self) -> None:
        for what, name in (("site", self.site), ("node", self.node)):
            if not is_name(name):
                raise FleetError(f"cannot use {name!r} as the {what} in topics: [a-z0-9-], 1 to 63 long")

    @property
    def base(self) -> str:
        return f"{ROOT}/{self.site}/{self.node}"

    @property
    def status(self) -> str:
        return f"{self.base}/status"

    @property
    def inventory(self) -> str:
        return f"{self.base}/inv"

    @property
    def allocation(self) -> str:
        return f"{self.base}/alloc"

    @property
    def telemetry(self) -> str:
        return f"{self.base}/tele/m"

    @property
    def telemetry_deflated(self) -> str:
        return f"{self.base}/tele/z"

    @property
    def desired(self) -> str:
        return f"{self.base}/cfg/desired"

    @property
    def alerts(self) -> str:
        """Filter of all own alerts."""
        return f"{self.base}/alert/+"

    @property
    def commands(self) -> str:
        """Filter of all own commands."""
        return f"{self.base}/cmd/+"

    def alert(self, condition_id: str) -> str:
        return f"{self.base}/alert/{slug(condition_id)}"

    def event(self, kind: str) -> str:
        if kind not in EVENT_KINDS:
            raise FleetError(f"cannot publish event kind {kind!r}: it is none of {', '.join(EVENT_KINDS)}")
        return f"{self.base}/evt/{kind}"

    def response(self, requester: str) -> str:
        return check_topic(f"{self.base}/res/{requester}")

    def is_own_response(self, topic: str) -> bool:
        """Whether a response topic asked for by somebody else lies below our own `res/`."""
        prefix = f"{self.base}/res/"
        return topic.startswith(prefix) and is_name(topic[len(prefix) :])

    def verb(self, topic: str) -> str | None:
        """The verb of a command topic, None for any other topic."""
        prefix = f"{self.base}/cmd/"
        verb = topic[len(prefix) :] if topic.startswith(prefix) else ""
        return verb if is_name(verb) else None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A topic taken apart by a consumer: `tail` is what follows the node."""

    site: str
    node: str
    tail: tuple[str, ...]


def parse(topic: str) -> Parsed | None:
    """Takes apart a topic of any node; None for what is not of this tree."""
    levels = topic.split("/")
    if len(levels) < 5 or len(levels) > MAX_SLASHES + 1 or "/".join(levels[:2]) != ROOT:
        return None
    if not all(is_name(level) for level in levels[2:]):
        return None
    return Parsed(levels[2], levels[3], tuple(levels[4:]))
