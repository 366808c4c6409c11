"""Whole nodes for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.whole import WholeNode

Start = Callable[..., WholeNode]


@pytest.fixture
def start(short_dir: Path) -> Iterator[Start]:
    """Makes a WholeNode and starts it; at the end its log must hold no exception."""
    with ExitStack() as stack:

        def _start(
            *cards: str, prepare: Callable[[WholeNode], object] | None = None, **options: Any
        ) -> WholeNode:
            node = WholeNode(short_dir, *cards, **options)
            if prepare is not None:
                prepare(node)
            stack.enter_context(node)
            stack.callback(node.assert_clean_log)
            return node

        yield _start
