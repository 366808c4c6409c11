"""A stand-in for libcuda.so.1 in C, programs that drive it, and boxes to run them in under limits."""

from tests.fakes.cuda.box import Box, Line, finish, go_on, read_until
from tests.fakes.cuda.tools import Tools, compiler, tools

__all__ = ["Box", "Line", "Tools", "compiler", "finish", "go_on", "read_until", "tools"]
