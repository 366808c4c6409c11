"""The agent's own error tree. Adapters translate third-party errors into these with `raise … from e`."""

from __future__ import annotations


class AgentError(Exception):
    """Base of every error that the agent raises on purpose; its text says what could not be done."""


class ConfigError(AgentError):
    """The configuration cannot be used. `problems` holds every problem found, one sentence each."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class GpuError(AgentError):
    """A GPU or its library cannot be read. `fault` (see gpus.model.GpuFault) says in which way."""

    def __init__(self, message: str, fault: str = "failed") -> None:
        self.fault = fault
        super().__init__(message)


class KubeletError(AgentError):
    """The kubelet, its checkpoint file or podresources cannot be reached or understood."""


class AllocationError(AgentError):
    """A demand cannot be granted or bound. `code` is the gRPC status code's name (for example
    RESOURCE_EXHAUSTED); `permanent` is true when waiting on this node cannot help."""

    def __init__(self, message: str, *, code: str = "FAILED_PRECONDITION", permanent: bool = False) -> None:
        self.code = code
        self.permanent = permanent
        super().__init__(message)


class IsolationError(AgentError):
    """A limit cannot be put in place or read back."""


class NodeError(AgentError):
    """The host (cgroups, CDI directory, API server) cannot be read or written."""


class FleetError(AgentError):
    """The MQTT side cannot do what was asked."""


class ControlError(AgentError):
    """The running agent cannot be asked over its local socket."""
