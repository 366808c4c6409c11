"""sd_notify(3): telling systemd that the agent is ready, alive or stopping. Silent elsewhere."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends states to $NOTIFY_SOCKET; does nothing where systemd did not start us."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET")

    @property
    def watchdog_s(self) -> float | None:
        """Interval after which systemd gives up on us, or None where no watchdog is set."""
        usec = os.environ.get("WATCHDOG_USEC", "")
        pid = os.environ.get("WATCHDOG_PID", "")
        if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
            return None
        return int(usec) / 1e6

    def send(self, *states: str) -> None:
        """For example send("READY=1", "STATUS=2 GPUs offered")."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.connect(address)
                sock.sendall("\n".join(states).encode())
        except OSError:
            pass  # systemd went away: nobody to tell
