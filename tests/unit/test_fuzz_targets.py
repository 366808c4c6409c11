"""What reads foreign bytes raises only what it says: the seeds, cut and mixed; `make fuzz` goes on from there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    target = TARGETS[name]
    pieces = st.sampled_from(
        [*target.seeds, *(s[: len(s) // 2] for s in target.seeds), b"\0", b"\n", b"-1", b"9" * 30]
    )

    @settings(max_examples=60, deadline=None)
    @given(st.binary(max_size=200) | st.lists(pieces | st.binary(max_size=8), max_size=5).map(b"".join))
    def fed(data: bytes) -> None:
        target.feed(data)

    for seed in target.seeds:
        target.read(seed)
    fed()
