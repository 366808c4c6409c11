"""Paths below a host root: symbolic links stay inside the tree, reads never block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeagent.hostroot import HostRoot


@pytest.mark.parametrize(
    ("links", "asked", "expected"),
    [
        pytest.param({}, "/etc/a", "/etc/a", id="plain"),
        pytest.param({"etc/a": "/etc/b/c"}, "/etc/a", "/etc/b/c", id="absolute link stays inside"),
        pytest.param({"etc/a": "b"}, "/etc/a", "/etc/b", id="relative link"),
        pytest.param({"etc/a": "../../../x"}, "/etc/a", "/x", id="cannot climb out"),
        pytest.param({"etc/a": "/etc/d", "etc/d": "/opt/e"}, "/etc/a/f", "/opt/e/f", id="chain"),
        pytest.param({"etc/a": "/etc/a"}, "/etc/a", "/etc/a", id="loop ends"),
    ],
)
def test_resolve_follows_links_inside_the_tree(
    tmp_path: Path, links: dict[str, str], asked: str, expected: str
) -> None:
    for where, target in links.items():
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, tmp_path / where)
    assert HostRoot(tmp_path).resolve(asked) == expected


def test_reads_of_odd_files_answer_none_and_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    writer = os.open(tmp_path / "fifo", os.O_RDWR)  # with a writer and no data a read gives EAGAIN
    (tmp_path / "dir").mkdir()
    os.symlink("loop", tmp_path / "loop")
    try:
        host = HostRoot(tmp_path)
        assert [host.read_bytes(p) for p in ("/fifo", "/dir", "/loop", "/absent", "/a\0b")] == [None] * 5
    finally:
        os.close(writer)
