"""The fleet page in a real browser: what an operator sees, does, and is protected from."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeagent.dashboard import simulation
from edgeagent.fleet import messages
from edgeagent.fleet.topics import Topics
from tests.fakes.agent import AgentProcess
from tests.fakes.fleet.snapshots import container, gpu_state, snapshot
from tests.fakes.mosquitto import FlakyProxy, Mosquitto, Observer, available
from tests.fakes.page import PageServer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SCREENSHOTS = "EDGEAGENT_SCREENSHOTS"  # set: the pictures of the README are made anew

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(available() is None, reason="mosquitto is not installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Fleet:
    """A broker with a fleet of simulated nodes at it, and the page server."""

    def __init__(self, broker: Mosquitto, observer: Observer, server: PageServer) -> None:
        self.broker = broker
        self.observer = observer
        self.server = server
        self.nodes = simulation.make_fleet(12, sites=3, trouble=0.0, seed=3, now_ms=now_ms())
        for node in self.nodes:
            self.say(*node.retained(now_ms()))
        server.wait_loaded(len(self.nodes))

    def say(self, *what: tuple[str, bytes, bool]) -> None:
        for topic, data, retain in what:
            self.observer.publish(topic, data, retain=retain)

    def fall_ill(self, node: simulation.SimulatedNode) -> None:
        node.ill_since_ms = now_ms() - 5 * 60_000
        self.say(node.xid_event(now_ms()), *node.retained(now_ms()))

    def recover(self, node: simulation.SimulatedNode) -> None:
        node.ill_since_ms = None
        self.say(node.cleared_alert(), *node.retained(now_ms()))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with (
        Mosquitto(tmp_path_factory.mktemp("mq")) as broker,
        Observer(broker.port, "nothing") as observer,
        PageServer(broker.url) as server,
    ):
        yield Fleet(broker, observer, server)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def key(node: simulation.SimulatedNode) -> str:
    return f"{node.topics.site}/{node.topics.node}"


OPEN = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, fleet: Fleet) -> Iterator[OPEN]:
    """Opens the page logged in. At the end: no error in any console, nothing the CSP had to stop."""
    contexts, troubles = [], []

    def open_page(server: PageServer = fleet.server, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda e: troubles.append(f"error: {e}"))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " e => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI))"
        )
        page.goto(server.login_url)
        expect(page.locator(".cell").first).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [t for t in troubles if "Failed to load resource" not in t] == []


def cell(page: Any, node: simulation.SimulatedNode) -> Any:
    return page.locator(f'.cell[href="#/{key(node)}"]')


def first_cell(page: Any) -> Any:
    return page.locator('[role=listitem][aria-posinset="1"] .cell')


def no_sideways_scrolling(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


# -- what an operator sees ---------------------------------------------------------------------------


def test_a_node_falls_ill_recovers_and_is_lost(opened: OPEN, fleet: Fleet) -> None:
    page = opened()
    node = next(n for n in fleet.nodes if len(n.pods) >= 2)
    expect(cell(page, node)).to_contain_text("Ready")
    fleet.fall_ill(node)
    expect(first_cell(page)).to_have_attribute("href", f"#/{key(node)}")
    expect(cell(page, node)).to_contain_text("Sick 5 min")
    expect(cell(page, node)).to_contain_text("fallen off the bus")
    expect(page.locator("#live")).to_contain_text(f"{key(node)} is sick")
    expect(page).to_have_title("(1) Fleet")
    cell(page, node).click()
    view = page.locator("#node")
    expect(view.get_by_role("heading", name=re.compile(node.topics.node))).to_be_visible()
    expect(view.locator(".alert")).to_contain_text(node.pods[0][1])
    expect(view.locator(".alert")).to_contain_text("for 5 min")
    expect(view.locator(".part-events")).to_contain_text("XID 79")
    expect(view.locator(".waiting")).to_contain_text("nightly-tune")
    fleet.say(node.telemetry(now_ms()))
    expect(view.locator("figure", has_text="Temperature").first).to_contain_text("°C")
    fleet.recover(node)
    expect(view.locator(".pill")).to_have_text("Ready")
    expect(view.locator(".alert")).to_have_count(0)
    fleet.say(node.will(now_ms()))
    expect(cell(page, node)).to_contain_text("Lost")
    expect(view.locator(".stale")).to_contain_text("The broker lost contact with the node")
    fleet.say(node.status(now_ms()))
    expect(view.locator(".pill")).to_have_text("Ready")


def test_shares_are_drawn_to_scale_and_isolation_gives_its_evidence(opened: OPEN, fleet: Fleet) -> None:
    node = next(n for n in fleet.nodes if n.model.gpus == 1 and len(n.pods) >= 2)
    fleet.say(node.telemetry(now_ms()))
    page = opened()
    page.goto(f"{fleet.server.url}/#/{key(node)}")
    gpu = page.locator(".gpu").first
    expect(gpu.locator(".seg.pod")).to_have_count(len(node.pods))
    widths = gpu.locator(".seg.pod").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    bar = gpu.locator(".membar").bounding_box()["width"]
    limits = sorted((p[3] for p in node.pods), reverse=True)
    assert widths == pytest.approx([bar * mib / node.model.total_mib for mib in limits], abs=1.5)
    fills = gpu.locator(".seg.pod").evaluate_all("all => all.map(e => parseFloat(e.firstChild.style.width))")
    assert all(0 < fill < 100 for fill in fills)
    level = node.model.levels.memory
    expect(gpu.locator(".isolation")).to_contain_text(f"{level.level.value} by {level.mechanism}")
    expect(gpu.locator(".isolation")).to_contain_text(f"Evidence: {level.evidence}")


def test_filters_by_text_site_and_condition(opened: OPEN, fleet: Fleet) -> None:
    page = opened()
    total = len(fleet.nodes)
    count = page.locator("#count")
    node = next(n for n in fleet.nodes if n.pods)
    page.get_by_role("searchbox").fill(node.pods[0][1].upper())
    expect(count).to_have_text(f"1 of {total} nodes")
    expect(page.locator(".cell")).to_have_attribute("href", f"#/{key(node)}")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Site").select_option("plant-2")
    expect(count).to_have_text(f"4 of {total} nodes")
    page.get_by_role("searchbox").fill("no such thing")
    expect(page.locator("#empty")).to_have_text("No node is like that.")
    page.get_by_role("button", name="Clear").click()
    fleet.fall_ill(fleet.nodes[4])
    chip = page.get_by_role("button", name="1 Sick")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    expect(count).to_have_text(f"1 of {total} nodes")
    fleet.recover(fleet.nodes[4])
    expect(count).to_have_text(f"0 of {total} nodes")


def test_a_large_fleet_has_only_the_cells_that_are_seen(browser: Any, opened: OPEN, tmp_path: Path) -> None:
    with Mosquitto(tmp_path / "mq") as broker, PageServer(broker.url) as server:
        nodes = simulation.make_fleet(400, sites=10, trouble=0.0, seed=1, now_ms=now_ms())
        player = simulation.Player(
            nodes, simulation.BrokerSettings(simulation.Broker.parse(broker.url)), rate=1
        )
        stop = threading.Event()
        player.birth(stop)
        player.close()
        server.wait_loaded(400)
        page = opened(server)
        expect(page.locator("#count")).to_have_text("400 nodes")
        assert page.locator(".cell").count() < 80
        page.locator("#grid").evaluate("grid => grid.scrollTop = grid.scrollHeight")
        expect(page.locator('[aria-posinset="400"]')).to_be_visible()
        assert page.locator(".cell").count() < 80


def test_a_broken_link_is_said_plainly(opened: OPEN, fleet: Fleet) -> None:
    with FlakyProxy(fleet.broker.port) as proxy, PageServer(proxy.url) as server:
        server.wait_loaded(len(fleet.nodes))
        page = opened(server)
        proxy.refuse(True)
        proxy.cut()
        expect(page.locator("#notices")).to_contain_text("This page has no link to the broker since")
        expect(page.locator("#link")).to_have_text("no link")
        proxy.refuse(False)
        expect(page.locator("#notices")).to_be_empty()
        expect(page.locator("#link")).to_contain_text("live from")


def test_a_page_server_that_comes_back_is_found_again(opened: OPEN, fleet: Fleet) -> None:
    page = opened()
    page.context.set_offline(True)
    page.evaluate("dispatchEvent(new Event('offline'))")
    page.context.set_offline(False)
    fleet.fall_ill(fleet.nodes[0])
    expect(cell(page, fleet.nodes[0])).to_contain_text("Sick")
    fleet.recover(fleet.nodes[0])
    expect(cell(page, fleet.nodes[0])).to_contain_text("Ready")


# -- what it is protected from -------------------------------------------------------------------------

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = "<img src=x onerror=window.hacked=1>"


def test_hostile_payloads_change_nothing(opened: OPEN, fleet: Fleet) -> None:
    """Markup in every text, a megabyte of one letter, wrong types: text is shown as text, the layout holds."""
    topics = Topics("hostile", "box-x")
    long_name = "x" * 253
    evil = replace(
        snapshot(),
        containers=(
            container(1, pod=SCRIPT, namespace=IMAGE, container=SCRIPT),
            container(2, pod=long_name, namespace="javascript:alert(1)"),
        ),
        gpus=(gpu_state(0, gpu=replace(gpu_state(0).gpu, model=IMAGE + "W" * 150)),),
        reasons=(SCRIPT, "R" * 500),
    )  # fmt: skip
    stamp = messages.Stamp(now_ms(), 1, "b", "s", "synced")

    def data(body: dict[str, Any], seq: int) -> bytes:
        return messages.encode(messages.envelope(body, stamp, message_id=f"m{seq}", seq=seq))

    page = opened()
    bodies = {
        topics.inventory: messages.inventory(evil),
        topics.allocation: messages.allocation(evil),
        topics.status: messages.status(evil, uplink=messages.UplinkFacts(commands=(SCRIPT, "snapshot"))),
        topics.telemetry: messages.telemetry([messages.sample(evil, now_ms())]),
        topics.event("agent"): messages.event("agent", SCRIPT, IMAGE),
    }
    for n, (topic, body) in enumerate(bodies.items()):
        fleet.observer.publish(topic, data(body, n), retain="tele" not in topic and "evt" not in topic)
    page.goto(f"{fleet.server.url}/#/hostile/box-x")
    view = page.locator("#node")
    expect(view.locator("td .pod-name").first).to_have_text(f"{IMAGE}/{SCRIPT}")
    before = view.inner_text()
    junk = [
        b"\xff\xfe", b"{", json.dumps({"state": "ready", "reasons": "A" * 2**20}).encode(), b'{"state": NaN}', b"[" * 50_000,
        b'{"state": {"a": 1}, "gpus": 7}', b'{"gpus": "many", "samples": {"0": 1}}',
    ]  # fmt: skip
    for topic in (topics.status, topics.inventory, topics.allocation, topics.telemetry, topics.event("xid")):
        for bad in junk:
            fleet.observer.publish(topic, bad)
    fleet.server.wait(lambda store: store.rejected >= 20)
    fleet.say(fleet.nodes[1].telemetry(now_ms()))
    expect(view.locator("td .pod-name").first).to_have_text(f"{IMAGE}/{SCRIPT}")
    assert view.inner_text().splitlines()[:3] == before.splitlines()[:3]
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, iframe, object, script:not([src])').length") == 0
    assert no_sideways_scrolling(page)
    assert view.evaluate("v => v.scrollWidth <= v.clientWidth")
    fleet.observer.publish(topics.status, None, retain=True)
    expect(page.locator('.cell[href="#/hostile/box-x"]')).to_have_count(0)


def test_who_does_not_know_the_password_sees_nothing(browser: Any, fleet: Fleet) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(fleet.server.url)
    expect(page.locator("#page")).to_be_hidden()
    page.get_by_label("Password").fill("not it")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#login-error")).to_have_text("that is not it")
    page.get_by_label("Password").fill("correct-horse-battery")
    page.get_by_role("button", name="Open").click()
    expect(page.locator(".cell").first).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Password")).to_be_visible()
    context.close()


# -- what an operator does -----------------------------------------------------------------------------


def test_a_command_reaches_a_real_agent_and_its_answer_the_page(
    opened: OPEN, fleet: Fleet, short_dir: Path
) -> None:
    config = {
        "node": {"name": "real-box", "site": "lab"},
        "gpus": {"source": "simulated", "pollSeconds": 0.5, "simulated": {"profile": "2x-rtx-4000-ada"}},
        "fleet": {
            "enabled": True, "brokers": [fleet.broker.url], "telemetrySeconds": 1, "willDelaySeconds": 0,
            "commands": {"allow": ["snapshot", "cordon-gpu", "uncordon-gpu"], "perMinute": 60},
        },
    }  # fmt: skip
    root = short_dir / "r"
    root.mkdir()
    page = opened()
    with AgentProcess(root, short_dir / "a", config) as agent:
        agent.wait_ready()
        page.goto(f"{fleet.server.url}/#/lab/real-box")
        gpu = page.locator(".gpu").first
        gpu.get_by_role("button", name="Cordon").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("No new container gets a share of this GPU")
        dialog.get_by_role("button", name="Check only").click()
        expect(dialog.locator(".answer")).to_have_text("succeeded")
        assert agent.snapshot()["gpus"][0]["cordoned"] is False
        dialog.get_by_role("button", name="Cordon", exact=True).click()
        expect(gpu.locator(".tags")).to_contain_text("cordoned")
        assert agent.snapshot()["gpus"][0]["cordoned"] is True
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Snapshot").click()
        dialog.get_by_role("button", name="Ask").click()
        expect(dialog.locator("pre")).to_contain_text('"real-box"')
        page.keyboard.press("Escape")
        expect(page.locator(".part-commands li")).to_have_count(3)
        expect(page.get_by_role("button", name="Restart agent")).to_have_count(0)
    expect(page.locator("#node .pill")).to_have_text("Offline")
    for name in ("status", "inv", "alloc"):
        fleet.observer.publish(f"gpufleet/v1/lab/real-box/{name}", None, retain=True)
    expect(page.locator('.cell[href="#/lab/real-box"]')).to_have_count(0)


def test_everything_can_be_done_with_the_keyboard(opened: OPEN, fleet: Fleet) -> None:
    page = opened()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    for _ in range(4):  # the site, the grid
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('cell')"):
            break
    expect(first_cell(page)).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    expect(page.locator(f'[aria-posinset="{len(fleet.server.page.store.nodes)}"] .cell')).to_be_focused()
    page.keyboard.press("Home")
    expect(first_cell(page)).to_be_focused()
    opened_key = first_cell(page).get_attribute("href")
    page.keyboard.press("Enter")
    expect(page.locator("#node")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#node")).to_be_hidden()
    expect(page.locator(f'.cell[href="{opened_key}"]')).to_be_focused()


def test_everything_has_a_name_for_a_screen_reader(opened: OPEN, fleet: Fleet) -> None:
    page = opened()
    node = next(n for n in fleet.nodes if n.pods)
    page.goto(f"{fleet.server.url}/#/{key(node)}")
    expect(page.locator(".gpu").first).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('a, button, input, select, textarea, [role=img], section')]
          .filter(e => e.checkVisibility() && !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
            || e.innerText?.trim() || e.labels?.length || e.closest('section.part'))).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    expect(page.get_by_role("img", name=re.compile("Memory of .* promised to"))).to_have_count(
        node.model.gpus
    )
    expect(page.get_by_role("img", name=re.compile("Temperature in the last hour: now"))).to_have_count(
        node.model.gpus
    )
    assert page.locator("[role=list] > [role=listitem]").count() > 0


def test_it_fits_a_phone(opened: OPEN, fleet: Fleet) -> None:
    page = opened(viewport={"width": 360, "height": 740}, has_touch=True)
    assert no_sideways_scrolling(page)
    node = max(fleet.nodes, key=lambda n: len(n.pods))
    page.locator("#query").fill(node.topics.node)
    cell(page, node).tap()
    expect(page.locator(".gpu").first).to_be_visible()
    expect(page.locator("#grid")).to_be_hidden()
    assert no_sideways_scrolling(page)
    page.get_by_label("Close this node").tap()
    expect(cell(page, node)).to_be_visible()


# -- pictures for the README -----------------------------------------------------------------------------


@pytest.mark.skipif(SCREENSHOTS not in os.environ, reason=f"{SCREENSHOTS} is not set")
def test_pictures(opened: OPEN, tmp_path: Path) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with Mosquitto(tmp_path / "mq") as broker, PageServer(broker.url) as server:
        nodes = simulation.make_fleet(48, sites=6, trouble=0.05, seed=11, now_ms=now_ms())
        sick = max((n for n in nodes if n.model.gpus == 2), key=lambda n: len(n.pods))
        sick.ill_since_ms, sick.lost = now_ms() - 14 * 60_000, False
        settings = simulation.BrokerSettings(simulation.Broker.parse(broker.url))
        player = simulation.Player(nodes, settings, rate=10, connections=1)
        player.birth(stop)
        server.wait_loaded(48)
        player.past(stop, 58)
        player.play(stop, 3.0, changes=False)
        player.close()
        for name, options in {
            "fleet-grid": {"color_scheme": "light"},
            "fleet-node": {"color_scheme": "light"},
            "fleet-dark": {"color_scheme": "dark"},
            "fleet-phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}},
        }.items():
            page = opened(server, **{"viewport": {"width": 1280, "height": 800}, **options})
            if name != "fleet-grid":
                page.goto(f"{server.url}/#/{key(sick)}")
                expect(page.locator(".gpu .stroke").first).to_be_visible()
            page.wait_for_timeout(900)
            if name in ("fleet-dark", "fleet-phone"):
                page.locator(".gpu").first.scroll_into_view_if_needed()
            path = IMAGES / f"{name}.png"
            page.screenshot(path=path)
            assert path.stat().st_size < 200 * 1024
