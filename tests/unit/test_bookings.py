"""Saved bookings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.hostroot import HostRoot
from edgeagent.kubelet.bookings import BookingFile, SavedBooking
from edgeagent.sharing.ledger import ContainerKey
from edgeagent.sharing.tokens import Demand


def booking_file(root: Path, boot: str = "boot-1") -> BookingFile:
    path = root / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(boot + "\n")
    return BookingFile(root / "state", HostRoot(root))


SAVED = [
    SavedBooking(ContainerKey("uid-1", "app"), Demand(0b1011, 0b11, 0b1), "GPU-1", 1_700_000_000_000),
    SavedBooking(ContainerKey("uid-2", "init"), Demand(memory=1 << 163_839), None, 0),
]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    booking_file(tmp_path).save(SAVED)
    assert booking_file(tmp_path).load() == SAVED
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["bookings.json"]


def test_after_a_reboot_nothing_is_loaded(tmp_path: Path) -> None:
    booking_file(tmp_path).save(SAVED)
    assert booking_file(tmp_path, "boot-2").load() == []


@pytest.mark.parametrize("content", ["", "{", "[]", "5", '{"format": 99}', "[" * 100_000])
def test_a_spoilt_file_counts_as_none(tmp_path: Path, content: str) -> None:
    file = booking_file(tmp_path)
    file.save(SAVED)
    (tmp_path / "state/bookings.json").write_text(content)
    assert file.load() == []
    file.save(SAVED)
    assert file.load() == SAVED


@pytest.mark.parametrize(
    "spoil",
    [
        {"podUid": ""}, {"podUid": 5}, {"container": None}, {"memory": "x", "cores": None, "shares": []},
        {"memory": [[5, 3], [-1, 2], [0, 10**9], [1], ["a", "b"], [True, 2]], "cores": [], "shares": []},
    ],
)  # fmt: skip
def test_a_spoilt_booking_costs_only_itself(tmp_path: Path, spoil: dict[str, Any]) -> None:
    file = booking_file(tmp_path)
    file.save(SAVED)
    path = tmp_path / "state/bookings.json"
    document = json.loads(path.read_text())
    document["bookings"][0].update(spoil)
    path.write_text(json.dumps(document))
    assert file.load() == SAVED[1:]


def test_a_directory_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    file = booking_file(tmp_path)
    file.save(SAVED)
    file.save(SAVED)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    (tmp_path / "state").unlink()
    file.save(SAVED)
    assert file.load() == SAVED


@settings(max_examples=15)
@given(st.integers(0, 1 << 300), st.integers(0, 1 << 100), st.integers(1, 1 << 16))
def test_every_set_of_tokens_survives(tmp_path_factory: Any, memory: int, cores: int, shares: int) -> None:
    root = tmp_path_factory.mktemp("b")
    saved = [SavedBooking(ContainerKey("u", "c"), Demand(memory, cores, shares), "G", 5)]
    booking_file(root).save(saved)
    assert booking_file(root).load() == saved
