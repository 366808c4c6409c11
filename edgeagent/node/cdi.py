"""CDI: what a container is given, and the spec files that say so to the container runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount: host path, path in the container, options ("ro", "nosuid", "nodev", "bind", …)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")


@dataclass(frozen=True, slots=True)
class Hook:
    """An OCI hook as CDI names it."""

    hook_name: str  # "createContainer", "createRuntime", …
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container gets. Paths are the host's."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def merged(self, other: ContainerEdits) -> ContainerEdits:
        """Both together; `other` wins where an env key or a container path is in both."""
        mounts = {m.container_path: m for m in (*self.mounts, *other.mounts)}
        return ContainerEdits(
            env={**self.env, **other.env},
            mounts=tuple(mounts.values()),
            device_nodes=tuple(dict.fromkeys((*self.device_nodes, *other.device_nodes))),
            hooks=tuple(dict.fromkeys((*self.hooks, *other.hooks))),
        )
