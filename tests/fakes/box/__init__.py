"""A machine of its own to install on: this one's file system under an overlay, in namespaces."""

from tests.fakes.box.box import Box, Changes, unsupported

__all__ = ["Box", "Changes", "unsupported"]
