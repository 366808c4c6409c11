"""Tokens: the IDs of shares, and sets of them.

A token is a letter and six digits: `m000123` is a unit of memory, `c000045` a per cent of compute,
`n000007` a share. Tokens are numbers of the node, not parts of a GPU, so that they are the same after
every restart and renumbering. A set of tokens of one letter is an int used as a bit mask (bit i: token
i); no string per token is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgeagent.errors import AllocationError

MEMORY = "m"
CORES = "c"
NUMBER = "n"
LETTERS = (MEMORY, CORES, NUMBER)

DIGITS = 6
ID_BYTES = 1 + DIGITS
MAX_TOKENS = 1_000_000  # of one letter: more cannot be named


class Amounts(NamedTuple):
    """How many of each letter: units of memory, per cent of compute, shares."""

    memory: int = 0
    cores: int = 0
    shares: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(self.memory + other.memory, self.cores + other.cores, self.shares + other.shares)

    def minus(self, other: Amounts) -> Amounts:
        """The difference, never below 0."""
        return Amounts(
            max(0, self.memory - other.memory),
            max(0, self.cores - other.cores),
            max(0, self.shares - other.shares),
        )

    def at_least(self, other: Amounts) -> Amounts:
        """The larger of both, letter by letter."""
        return Amounts(
            max(self.memory, other.memory), max(self.cores, other.cores), max(self.shares, other.shares)
        )


@dataclass(frozen=True, slots=True, repr=False)
class Demand:
    """Token sets of the three letters as bit masks: what a container was given by the kubelet."""

    memory: int = 0
    cores: int = 0
    shares: int = 0

    def __repr__(self) -> str:
        # Not the masks in decimal: Python refuses to print ints of more than 4,300 digits.
        letters = ((MEMORY, self.memory), (CORES, self.cores), (NUMBER, self.shares))
        return f"Demand({' '.join(describe(letter, mask) for letter, mask in letters if mask)})"

    def __bool__(self) -> bool:
        return bool(self.memory or self.cores or self.shares)

    def __or__(self, other: Demand) -> Demand:
        return Demand(self.memory | other.memory, self.cores | other.cores, self.shares | other.shares)

    def __and__(self, other: Demand) -> Demand:
        return Demand(self.memory & other.memory, self.cores & other.cores, self.shares & other.shares)

    def __sub__(self, other: Demand) -> Demand:
        return Demand(self.memory & ~other.memory, self.cores & ~other.cores, self.shares & ~other.shares)

    def overlaps(self, other: Demand) -> bool:
        return bool(self.memory & other.memory or self.cores & other.cores or self.shares & other.shares)

    @property
    def amounts(self) -> Amounts:
        return Amounts(self.memory.bit_count(), self.cores.bit_count(), self.shares.bit_count())

    @property
    def span(self) -> Amounts:
        """One more than the highest token number of each letter: what must be offered to contain it."""
        return Amounts(self.memory.bit_length(), self.cores.bit_length(), self.shares.bit_length())

    def of(self, letter: str) -> int:
        """The mask of one letter."""
        return {MEMORY: self.memory, CORES: self.cores, NUMBER: self.shares}[letter]

    @property
    def share_name(self) -> str | None:
        """The CDI device name of the share: its lowest memory token, else its lowest share token
        (a container that asks for a number only), else its lowest core token; None when empty."""
        for letter, mask in ((MEMORY, self.memory), (NUMBER, self.shares), (CORES, self.cores)):
            if mask:
                return token_id(letter, lowest(mask))
        return None


def demand_of(letter: str, mask: int) -> Demand:
    """A demand of one letter only."""
    return Demand(
        memory=mask if letter == MEMORY else 0,
        cores=mask if letter == CORES else 0,
        shares=mask if letter == NUMBER else 0,
    )


def token_id(letter: str, number: int) -> str:
    return f"{letter}{number:0{DIGITS}d}"


def full(count: int) -> int:
    """The set of tokens 0 … count-1."""
    return (1 << count) - 1


def parse_ids(letter: str, ids: Sequence[str], offered: int) -> int:
    """The mask of `ids`, which must be tokens 0 … offered-1 of `letter`, each once.

    Raises AllocationError: INVALID_ARGUMENT when there are none or one is not a token of this letter,
    NOT_FOUND when one was never offered, ALREADY_EXISTS when one comes twice.
    """
    if not ids:
        raise AllocationError(
            "cannot grant nothing: the request names no device ID", code="INVALID_ARGUMENT", permanent=True
        )
    found = _numbers_in(letter, ids)
    if found is None:
        foreign = next(i for i in ids if _numbers_in(letter, [i]) is None)
        raise AllocationError(
            f"cannot grant {foreign[:64]!r}: not an ID of this resource (those are {letter} and 6 digits)",
            code="INVALID_ARGUMENT",
            permanent=True,
        )
    bits = bytearray(b"0") * offered  # characters of a base-2 number: int() reads them in linear time
    try:
        for number in found:
            bits[~number] = 0x31
    except IndexError:
        unknown = next(t for t in ids if int(t[1:]) >= offered)
        raise AllocationError(
            f"cannot grant {unknown}: this node never offered it ({offered} offered)",
            code="NOT_FOUND",
            permanent=True,
        ) from None
    mask = int(bits, 2)
    if mask.bit_count() != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise AllocationError(
            f"cannot grant {twice} twice in one request", code="ALREADY_EXISTS", permanent=True
        )
    return mask


def read_ids(letter: str, ids: Sequence[str]) -> int:
    """The mask of those of `ids` that are tokens of `letter`; anything else is left out. For IDs that
    others recorded (the kubelet's checkpoint), where junk is not ours to refuse."""
    found = _numbers_in(letter, ids)
    if found is None:
        found = [n for i in ids for n in _numbers_in(letter, [i]) or ()]
    if not found:
        return 0
    bits = bytearray(b"0") * (max(found) + 1)
    for number in found:
        bits[~number] = 0x31
    return int(bits, 2)


def _numbers_in(letter: str, ids: Sequence[str]) -> list[int] | None:
    """The numbers in `ids`; None when one of them is no token of the letter.

    One pass in C over all of them, for 8,000 IDs a millisecond or two: letters and blanks in their
    columns and digits everywhere else mean that every ID is a letter and six digits."""
    row = " ".join(ids)
    digits = row.replace(letter, "")
    bare = digits.replace(" ", "")
    if (
        len(row) != len(ids) * (ID_BYTES + 1) - 1
        or row[:: ID_BYTES + 1] != letter * len(ids)
        or row[ID_BYTES :: ID_BYTES + 1] != " " * (len(ids) - 1)
        or len(bare) != len(ids) * DIGITS
        or not bare.isascii()
        or not bare.isdigit()
    ):
        return None
    return list(map(int, digits.split(" ")))


def ids_of(letter: str, mask: int) -> list[str]:
    """The IDs in `mask`, ascending."""
    # One format call for all: half the time of one a token.
    wanted = tuple(numbers(mask))
    return (f"{letter}%0{DIGITS}d " * len(wanted) % wanted).split()


def numbers(mask: int) -> Iterator[int]:
    """The token numbers in `mask`, ascending."""
    for start, stop in ranges(mask):
        yield from range(start, stop)


def ranges(mask: int) -> Iterator[tuple[int, int]]:
    """The runs of consecutive tokens in `mask` as (first, one past the last), ascending."""
    bits = f"{mask:b}"[::-1]
    start = bits.find("1")
    while start >= 0:
        stop = bits.find("0", start)
        if stop < 0:
            stop = len(bits)
        yield start, stop
        start = bits.find("1", stop)


def describe(letter: str, mask: int, at_most: int = 4) -> str:
    """ "m0-7,9" for people; "…" after `at_most` runs."""
    texts: list[str] = []
    for start, stop in ranges(mask):
        if len(texts) == at_most:
            texts.append("…")
            break
        texts.append(f"{start}-{stop - 1}" if stop - start > 1 else f"{start}")
    return letter + ",".join(texts)


def lowest(mask: int) -> int:
    """The lowest token number in `mask`; ValueError when it is empty."""
    if not mask:
        raise ValueError("an empty set has no lowest token")
    return (mask & -mask).bit_length() - 1


def lowest_n(mask: int, count: int) -> int:
    """The `count` lowest tokens of `mask` (all of it when it has no more)."""
    if count <= 0:
        return 0
    if mask.bit_count() <= count:
        return mask
    below, above = 0, mask.bit_length()  # the cut lies in (below, above]
    while above - below > 1:
        middle = (below + above) // 2
        if (mask & full(middle)).bit_count() < count:
            below = middle
        else:
            above = middle
    return mask & full(above)


def highest_n(mask: int, count: int) -> int:
    """The `count` highest tokens of `mask` (all of it when it has no more)."""
    return mask & ~lowest_n(mask, mask.bit_count() - max(0, count))


def lowest_run(mask: int, count: int) -> int:
    """The lowest `count` consecutive tokens of `mask`; 0 when it has no such run."""
    if count <= 0:
        return 0
    # Bit i of `starts` says: tokens i … i+length-1 are all in the mask. Doubling needs log2(count) steps.
    starts, length = mask, 1
    while length < count and starts:
        step = min(length, count - length)
        starts &= starts >> step
        length += step
    return full(count) << lowest(starts) if starts else 0


def preferred(available: int, must_include: int, count: int) -> int:
    """`count` tokens of `available` that the kubelet should take: all of `must_include`, then the lowest
    consecutive ones, or simply the lowest where no run is long enough."""
    if must_include.bit_count() >= count:
        return lowest_n(must_include, count)
    missing = count - must_include.bit_count()
    free = available & ~must_include
    return must_include | (lowest_run(free, missing) or lowest_n(free, missing))
