"""What the fleet page costs, with the page server as its own process, a real mosquitto and a real browser:
JSON.

    python -m tests.bench.fleet_page [--quick]

1,000 nodes with a sample every 10 s: RSS and CPU of the page server with one browser open, time to filter
in the browser. 10,000 nodes with one every 60 s: time of the retained load, messages lost between broker and
page server, RSS and CPU; then, with mosquitto's default queue limit, whether the page tells that the broker
truncates.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from edgeagent.dashboard import simulation
from edgeagent.fleet.client import Broker
from tests.fakes.mosquitto import Mosquitto
from tests.fakes.mosquitto.broker import free_port

CHECKOUT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-for-the-bench"
SMALL, LARGE = 1000, 10_000
MEASURE_S = 30.0
QUEUE = "max_queued_messages 50000"  # as configs/mosquitto/ has it
DEFAULT_QUEUE = "max_queued_messages 1000"
QUERIES = ("b", "bo", "box-004", "plant-7", "orin", "vision label", "rtx 4000", "nothing like it", "")


# (what, path in the figures, target, unit)
ROWS = [
    ("fleet page, 1,000 nodes: RSS", ("fleet_page", "small", "rss_mib"), 200, "MiB"),
    ("fleet page, 1,000 nodes at 100 samples/s: CPU", ("fleet_page", "small", "cpu_pct"), 30, "% of a core"),
    ("fleet page, 1,000 nodes: filter, median", ("fleet_page", "small", "filter_ms", "median"), 100, "ms"),
    ("fleet page, 1,000 nodes: filter to frame, median", ("fleet_page", "small", "filter_to_frame_ms", "median"), None, "ms"),
    ("fleet page, 10,000 nodes: retained load", ("fleet_page", "large", "load_ms"), 10_000, "ms"),
    ("fleet page, 10,000 nodes: samples lost", ("fleet_page", "large", "samples_lost"), 0, ""),
    ("fleet page, 10,000 nodes: RSS", ("fleet_page", "large", "rss_mib"), 200, "MiB"),
    ("fleet page, 10,000 nodes: CPU", ("fleet_page", "large", "cpu_pct"), None, "% of a core"),
    ("fleet page, 10,000 nodes: filter, median", ("fleet_page", "large", "filter_ms", "median"), 100, "ms"),
    ("fleet page: truncation told after", ("fleet_page", "large", "default_queue", "told_after_s"), None, "s"),
]  # fmt: skip


class Page:
    """`edgeagent fleet` as a process."""

    def __init__(self, directory: Path, broker_url: str, *arguments: str) -> None:
        token = directory / "token"
        token.write_text(TOKEN)
        self.url = f"http://127.0.0.1:{free_port()}"
        listen = self.url.removeprefix("http://")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgeagent", "fleet", "--broker", broker_url, "--listen", listen,
             "--token-file", str(token), *arguments],
            cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._ps = psutil.Process(self._process.pid)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(15)

    def figures(self) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/api/figures", headers={"authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            value: dict[str, Any] = json.load(answer)
            return value

    def wait(self, condition: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                figures = self.figures()
                if condition(figures):
                    return figures
            except OSError:
                pass  # it is not up yet
            if time.monotonic() > deadline:
                raise RuntimeError("the page server did not get so far")
            time.sleep(0.1)

    def wait_loaded(self, nodes: int = 0) -> dict[str, Any]:
        def loaded(figures: dict[str, Any]) -> bool:
            link = figures["link"]
            return link["connected"] and not link["loading"] and figures["bar"]["nodes"] >= nodes

        return self.wait(loaded)

    @contextmanager
    def measured(self, out: dict[str, Any]) -> Iterator[None]:
        before, began = sum(self._ps.cpu_times()[:2]), time.monotonic()
        yield
        cpu = (sum(self._ps.cpu_times()[:2]) - before) / (time.monotonic() - began)
        out["cpu_pct"] = round(100 * cpu, 1)
        out["rss_mib"] = round(self._ps.memory_info().rss / 2**20, 1)


@contextmanager
def player(broker: Mosquitto, nodes: int, rate: float) -> Iterator[simulation.Player]:
    fleet = simulation.make_fleet(
        nodes, sites=max(10, nodes // 100), trouble=0.01, seed=1, now_ms=time.time_ns() // 10**6
    )
    settings = simulation.BrokerSettings(Broker.parse(broker.url))
    playing = simulation.Player(fleet, settings, rate=rate, connections=2)
    try:
        playing.birth(threading.Event())
        yield playing
    finally:
        playing.close()


def browse(page: Page, out: dict[str, Any], nodes: int, then: threading.Event) -> None:
    """Opens the page, types into its filter, and stays until `then`."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        out["filter"] = "no browser"
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=chromium,
            args=["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                  "--disable-background-networking", "--disable-component-update", "--disable-sync"],
        )  # fmt: skip
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.goto(f"{page.url}/#token={TOKEN}")
        began = time.monotonic()
        tab.get_by_text(f"{nodes:,} nodes", exact=True).wait_for()
        out["shown_ms"] = round(1000 * (time.monotonic() - began))
        filters, frames = [], []
        for _ in range(3):
            for query in QUERIES:
                filter_ms, frame_ms = tab.evaluate(
                    """query => new Promise(done => {
                      const input = document.getElementById("query"), began = performance.now();
                      input.value = query;
                      input.dispatchEvent(new Event("input"));
                      const filter = performance.getEntriesByName("filter").at(-1).duration;
                      requestAnimationFrame(() => setTimeout(() => done([filter, performance.now() - began])));
                    })""",
                    query,
                )
                filters.append(filter_ms)
                frames.append(frame_ms)
        out["filter_ms"] = {"median": round(statistics.median(filters), 1), "max": round(max(filters), 1)}
        out["filter_to_frame_ms"] = {
            "median": round(statistics.median(frames), 1),
            "max": round(max(frames), 1),
        }
        while not then.is_set():
            tab.wait_for_timeout(200)
        browser.close()


def small(directory: Path, measure_s: float) -> dict[str, Any]:
    out: dict[str, Any] = {"nodes": SMALL, "samples_a_second": SMALL / 10}
    stop, seen = threading.Event(), threading.Event()
    with (
        Mosquitto(directory / "mq", log=False) as broker,
        player(broker, SMALL, SMALL / 10) as playing,
        Page(directory, broker.url) as page,
    ):
        out["load_ms"] = page.wait_loaded(SMALL)["counts"]["loadMs"]
        play = threading.Thread(target=playing.play, args=(stop, None), kwargs={"changes": True})
        play.start()
        view = threading.Thread(target=browse, args=(page, out, SMALL, seen))
        view.start()
        time.sleep(8)  # the browser comes up and has filtered
        with page.measured(out):
            time.sleep(measure_s)
        seen.set()
        view.join()
        stop.set()
        play.join()
    return out


def large(directory: Path, measure_s: float) -> dict[str, Any]:
    rate = LARGE / 60
    out: dict[str, Any] = {"nodes": LARGE, "samples_a_second": round(rate, 1)}
    stop, seen = threading.Event(), threading.Event()
    keep = f"{QUEUE}\npersistence true\npersistence_location {directory / 'mq'}/"
    with Mosquitto(directory / "mq", keep, log=False) as broker, player(broker, LARGE, rate) as playing:
        out["retained_messages"] = playing.figures.sent
        with Page(directory, broker.url, "--telemetry", "all") as page:
            loaded = page.wait_loaded(LARGE)
            out["load_ms"] = loaded["counts"]["loadMs"]
            out["incomplete_after_load"] = loaded["link"]["incomplete"]
            view = threading.Thread(target=browse, args=(page, out, LARGE, seen))
            view.start()
            before = page.figures()["counts"]["samples"]
            with page.measured(out):
                playing.play(stop, measure_s, changes=False)
            sent = playing.figures.samples
            try:
                page.wait(lambda f: f["counts"]["samples"] - before >= sent, 10)
            except RuntimeError:
                pass  # some are lost: the figures say how many
            counts = page.figures()["counts"]
            seen.set()
            view.join()
            out["samples_sent"] = sent
            out["samples_lost"] = sent - (counts["samples"] - before)
            out["rejected"] = counts["rejected"]
        broker.config_file.write_text(broker.config_file.read_text().replace(QUEUE, DEFAULT_QUEUE))
        playing.close()
        broker.restart(hard=False)  # it keeps what is retained
        with Page(directory, broker.url) as page:
            began = time.monotonic()
            nodes = page.wait_loaded()["bar"]["nodes"]
            told = page.wait(lambda f: f["link"]["shortfalls"], 40)
            out["default_queue"] = {
                "nodes_at_first": nodes,
                "told_after_s": round(time.monotonic() - began, 1),
                "told": told["link"]["shortfalls"],
            }
    return out


def main(measure_s: float = MEASURE_S) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        out = {"small": small(Path(work) / "a", measure_s), "large": large(Path(work) / "b", measure_s)}
    return {"fleet_page": {**out, "cpus": os.cpu_count(), "seconds": round(time.monotonic() - began)}}


if __name__ == "__main__":
    print(json.dumps(main(10.0 if "--quick" in sys.argv else MEASURE_S), indent=1))
