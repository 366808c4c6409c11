"""An uplink in a process of its own, to be killed: emits numbered events and notes which it recorded.

    python -m tests.fakes.fleet.driver URL STATE_DIR LOG_FILE FIRST_NUMBER [KEEPALIVE_S]

A number is in LOG_FILE when the event with it was handed over at least one interval ago: if the
process dies then, the event must still arrive. SIGTERM ends it cleanly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from edgeagent.fleet.publisher import Uplink
from edgeagent.node.clock import SystemClock
from tests.fakes.fleet.harness import config
from tests.fakes.fleet.snapshots import NODE, SITE, snapshot

INTERVAL_S = 0.02
KINDS = ("xid", "oom", "alloc", "overlimit", "thermal")


def main() -> None:
    url, state_dir, log_file, first = sys.argv[1:5]
    keepalive_s = int(sys.argv[5]) if len(sys.argv) > 5 else 5
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    uplink = Uplink(
        config(url, events_per_minute=1000, keepalive_seconds=keepalive_s, telemetry_seconds=0.5),
        node=NODE, site=SITE, state_dir=Path(state_dir), clock=SystemClock(), snapshot=snapshot,
        backoff_s=(0.02, 0.2), ack_timeout_s=2.0,
    )  # fmt: skip
    thread = threading.Thread(target=uplink.run, args=(stop,), name="uplink")
    thread.start()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = int(first)
    while not stop.is_set():
        uplink.event(KINDS[number % len(KINDS)], "Numbered", f"event {number}", facts={"n": number})
        stop.wait(INTERVAL_S)
        os.write(log, f"{number}\n".encode())
        number += 1
    uplink.wake()
    thread.join(10)
    # A thread that hangs must not keep the process: the test looks at the exit status.
    os._exit(0 if not thread.is_alive() else 3)


if __name__ == "__main__":
    main()
