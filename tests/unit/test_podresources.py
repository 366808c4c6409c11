"""Lists never while one of our Allocates is in flight."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgeagent.errors import KubeletError
from edgeagent.kubelet.podresources import AllocateGuard, PodResources


def test_nothing_is_listed_while_an_allocate_is_in_flight() -> None:
    guard = AllocateGuard()
    with guard.allocating():
        assert guard.busy
        with guard.listing() as free:
            assert not free
        with guard.allocating(), guard.listing() as free:
            assert not free
        assert guard.busy
    assert not guard.busy
    with guard.listing() as free:
        assert free


def test_an_allocate_waits_for_a_list_that_has_begun() -> None:
    guard = AllocateGuard()
    order: list[str] = []
    listed = threading.Event()

    def allocate() -> None:
        listed.wait(10)
        with guard.allocating():
            order.append("allocate")

    thread = threading.Thread(target=allocate)
    thread.start()
    with guard.listing() as free:
        assert free
        listed.set()
        with guard.listing() as second:
            assert not second  # one at a time
        thread.join(0.05)
        order.append("listed")
    thread.join(10)
    assert order == ["listed", "allocate"]


def test_a_socket_that_is_not_there_is_a_kubelet_error(tmp_path: Path) -> None:
    guard = AllocateGuard()
    client = PodResources(tmp_path / "kubelet.sock", guard)
    with pytest.raises(KubeletError, match="cannot ask podresources"):
        client.list()
    with pytest.raises(KubeletError, match="cannot ask podresources"):
        client.get("default", "a")
    with guard.allocating():
        assert client.list() is None
        assert client.get("default", "a") is None
