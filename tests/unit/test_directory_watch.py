"""Watching the kubelet's directory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from edgeagent.kubelet.watch import POLL_S, DirectoryWatch


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    directory = tmp_path / "plugins"
    directory.mkdir()
    return directory


def test_a_name_that_appears_is_reported_at_once(watched: Path) -> None:
    watch = DirectoryWatch(watched)
    watch.arm()
    (watched / "kubelet.sock").touch()
    assert "kubelet.sock" in watch.wait(30)
    (watched / "other").touch()
    os.rename(watched / "other", watched / "moved")
    assert {"other", "moved"} <= watch.wait(30)
    watch.close()


def test_a_name_that_vanishes_ends_the_wait(watched: Path) -> None:
    (watched / "own.sock").touch()
    watch = DirectoryWatch(watched)
    watch.arm()
    (watched / "own.sock").unlink()
    assert watch.wait(30) == frozenset()
    watch.close()


def test_wake_ends_the_wait_from_another_thread_and_after_the_end_does_nothing(watched: Path) -> None:
    watch = DirectoryWatch(watched)
    thread = threading.Timer(0.05, watch.wake)
    thread.start()
    assert watch.wait(30) == frozenset()
    thread.join()
    watch.close()
    watch.wake()
    watch.close()


def test_the_directory_may_come_later_go_and_come_again(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    watch = DirectoryWatch(directory)
    assert watch.wait(0) == frozenset()
    assert not watch.active
    for _ in range(3):
        directory.mkdir()
        watch.arm()
        assert watch.active
        (directory / "x").touch()
        assert "x" in watch.wait(30)
        (directory / "x").unlink()
        directory.rmdir()
        while watch.active:  # every event of its end is read
            watch.wait(30)
    watch.close()


def test_without_inotify_it_waits_out_the_poll(watched: Path) -> None:
    watch = DirectoryWatch(watched, use_inotify=False)
    watch.arm()
    assert not watch.active
    (watched / "x").touch()
    assert watch.wait(0.01) == frozenset()
    assert POLL_S <= 1.0
    watch.close()


def test_no_descriptor_is_left(watched: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        watch = DirectoryWatch(watched)
        watch.wait(0)
        watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
