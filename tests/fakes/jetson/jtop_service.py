"""A stand-in jtop.service: the protocol that jetson-stats' client speaks, with data from a JSON file.

Run as a process (`python -m tests.fakes.jetson.jtop_service SOCKET STATE`), so that it can be stopped
and killed. The state file: `version`, `interval`, `frozen` (data stands still though the service
answers), `hardware`, `data` (merged over the defaults). It is read again at every tick.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

TICK_S = 0.05

DEFAULT_HARDWARE = {
    "Model": "NVIDIA Jetson Orin Nano Developer Kit",
    "Module": "NVIDIA Jetson Orin Nano (8GB ram)",
    "P-Number": "p3767-0003",
    "SoC": "nvidia,tegra234",
    "L4T": "36.4.3",
    "Jetpack": "6.2",
    "Serial Number": "1421122334455",
}
DEFAULT_DATA: dict[str, Any] = {
    "cpu": {},
    "gpu": {"gpu": {"type": "integrated", "status": {"load": 12.5}, "freq": {"cur": 305000}}},
    "mem": {"RAM": {"tot": 7802880, "used": 1000}, "SWAP": {"tot": 0, "used": 0}},
    "engines": {},
    "temperature": {"gpu": {"temp": 48.5, "online": True}, "cv0": {"temp": -256, "online": False}},
    "power": {"rail": {}, "tot": {}},
    "fan": {},
    "processes": [],
    "jc": {"enable": True, "thread": "", "config": False, "boot": False},
    "nvp": {"status": [], "thread": False, "model": {"name": "MAXN_SUPER", "id": 2}},
}


class Service(BaseManager):
    pass


def serve(socket: str, state_file: Path) -> None:
    from jtop import __version__
    from jtop.core.common import get_key

    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    data: dict[str, Any] = {}
    fresh = threading.Event()

    def state() -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(state_file.read_text())
        return loaded

    def tick() -> None:
        while True:
            now = state()
            if not now.get("frozen"):
                data.update({**DEFAULT_DATA, **now.get("data", {}), "uptime": time.monotonic()})
                fresh.set()
            time.sleep(TICK_S)

    def answer() -> None:
        while True:
            control = messages.get()
            if "init" in control:
                messages.put(control)
                time.sleep(TICK_S)
            elif "interval" in control:
                now = state()
                init = {
                    "version": now.get("version", __version__),
                    "board": {"hardware": now.get("hardware", DEFAULT_HARDWARE)},
                    "interval": now.get("interval", control["interval"]),
                    "memory": "",
                    "fan": {},
                    "jc": True,
                    "nvpmodel": {"models": ["15W", "25W", "MAXN_SUPER"], "default": {"name": "15W", "id": 0}},
                }
                messages.put({"init": init})

    Service.register("get_queue", callable=lambda: messages)
    Service.register("sync_data", callable=lambda: data)
    Service.register("sync_event", callable=lambda: fresh)
    server = Service(address=socket, authkey=get_key().encode()).get_server()
    for work in (tick, answer):
        threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
