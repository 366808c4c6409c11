"""Jetson boards as file trees, made from compact descriptions, with values that can be changed live."""

from __future__ import annotations

from tests.fakes.jetson.boards import BOARDS, Board
from tests.fakes.jetson.tree import JetsonTree

__all__ = ["BOARDS", "Board", "JetsonTree"]
