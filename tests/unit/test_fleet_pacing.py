"""Pacing, the retained topics, the estimate and the clock: pure parts of the uplink."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeagent.config.schema import FleetConfig
from edgeagent.fleet import estimate
from edgeagent.fleet.pacing import MONTH_MS, ByteBudget, EventLimiter, TokenBucket
from edgeagent.fleet.retained import RetainedState
from edgeagent.hostroot import HostRoot
from edgeagent.node.clock import PERSIST_EVERY_MS, Moment, SystemClock, back_fill


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5)
    assert not bucket.take(0.5)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_a_bucket_survives_a_clock_that_goes_back() -> None:
    bucket = TokenBucket(1.0, 1)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert bucket.take(51.0)


def test_kinds_do_not_hold_up_each_other_and_nothing_is_forgotten() -> None:
    limiter = EventLimiter(2)
    admitted = [limiter.admit("xid", 0.0) for _ in range(5)]
    assert admitted == [0, 0, None, None, None]
    assert limiter.admit("oom", 0.0) == 0
    assert limiter.leftovers(1.0) == {}
    assert limiter.leftovers(31.0) == {"xid": 3}
    assert not limiter.holding


def test_a_budget_holds_back_backlog_first_then_telemetry() -> None:
    budget = ByteBudget(1_000_000)
    budget.spend(60_000, 0)
    assert (budget.backlog_allowed(0), budget.telemetry_allowed(0)) == (False, True)
    budget.spend(60_000, 0)
    assert not budget.telemetry_allowed(0)
    assert budget.telemetry_allowed(MONTH_MS // 10)
    budget.spend(2_000_000, MONTH_MS // 2)
    assert not budget.telemetry_allowed(MONTH_MS - 1)
    assert budget.telemetry_allowed(MONTH_MS), "a new month"


def test_a_budget_is_kept_and_garbage_is_not_believed() -> None:
    budget = ByteBudget(1000)
    budget.spend(950, 5)
    again = ByteBudget(1000)
    again.load(budget.dump())
    assert (again.used_bytes, again.began_ms) == (950, 5)
    for text in (None, "", "x y", "1", "-1 5"):
        again.load(text)
    assert again.used_bytes == 950
    assert ByteBudget(None).telemetry_allowed(0)


def test_retained_topics_are_sent_once_and_again_after_a_connect() -> None:
    state = RetainedState()
    assert state.want("a", {"x": 1})
    assert not state.want("a", {"x": 1})
    version = state.sent("a")
    assert state.next_due() is None
    state.want("a", {"x": 2})  # while the first is in flight
    state.acknowledge("a", version)
    assert state.next_due() == "a"
    state.acknowledge("a", state.sent("a"))
    assert state.next_due() is None
    assert state.confirmed("a")
    state.connected()
    assert state.next_due() == "a"


def test_a_cleared_topic_is_forgotten_when_the_broker_has_it() -> None:
    state = RetainedState()
    state.want("a", {"x": 1})
    state.want("a", None)
    assert "a" not in state
    state.acknowledge("a", state.sent("a"))
    assert state.next_due() is None
    state.connected()
    assert state.next_due() is None


def test_a_refused_body_is_not_offered_again_until_it_changes() -> None:
    state = RetainedState()
    state.want("a", {"x": 1})
    state.refuse("a", state.sent("a"))
    assert state.next_due() is None
    state.want("a", {"x": 2})
    assert state.next_due() == "a"


# -- estimate -------------------------------------------------------------------------------------

LTE = replace(FleetConfig(), link="metered", brokers=("mqtts://b",))


def test_the_default_metered_link_fits_the_target() -> None:
    assert estimate.monthly(LTE).total_mb <= 45


@pytest.mark.parametrize(
    ("dearer", "cheaper"),
    [
        (replace(LTE, deflate=False), LTE),
        (LTE, replace(LTE, batch_seconds=300.0)),
        (LTE, replace(LTE, brokers=("mqtt://b",))),
        (replace(FleetConfig(), brokers=("mqtts://b",)), LTE),
        (replace(LTE, telemetry_seconds=2.0), LTE),
    ],
)
def test_the_estimate_orders_settings_rightly(dearer: FleetConfig, cheaper: FleetConfig) -> None:
    assert estimate.monthly(dearer).total_bytes > estimate.monthly(cheaper).total_bytes


def test_more_pods_cost_more() -> None:
    assert estimate.monthly(LTE, gpus=2, pods=16).telemetry_bytes > estimate.monthly(LTE).telemetry_bytes


# -- clock ----------------------------------------------------------------------------------------


def test_the_last_good_time_is_a_floor(tmp_path: Path) -> None:
    floor, good_ms = tmp_path / "floor", 1_790_000_000_000
    root = HostRoot(tmp_path)
    first = SystemClock(root, floor, synced=lambda: True, wall_ns=lambda: good_ms * 1_000_000)
    first.keep()
    second = SystemClock(root, floor, synced=lambda: False, wall_ns=lambda: 0)
    moment = second.now()
    assert moment.wall_ms >= good_ms
    assert not moment.synced
    third = SystemClock(root, floor, synced=lambda: True, wall_ns=lambda: 5_000_000)
    assert third.now().wall_ms == 5, "a synchronised clock is believed against the floor"


def test_the_floor_is_not_taken_from_a_clock_that_is_not_right(tmp_path: Path) -> None:
    floor = tmp_path / "floor"
    SystemClock(HostRoot(tmp_path), floor, synced=lambda: False).keep()
    assert not floor.exists()


@pytest.mark.parametrize("text", ["", "x", "-5"])
def test_a_broken_floor_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "floor").write_text(text)
    clock = SystemClock(
        HostRoot(tmp_path), tmp_path / "floor", synced=lambda: False, wall_ns=lambda: 7_000_000
    )
    assert clock.now().wall_ms == 7


def test_timesyncd_counts_where_the_kernel_cannot_be_asked(tmp_path: Path) -> None:
    clock = SystemClock(HostRoot(tmp_path), synced=lambda: None)
    assert not clock.now().synced
    (tmp_path / "run/systemd/timesync").mkdir(parents=True)
    (tmp_path / "run/systemd/timesync/synchronized").touch()
    assert clock.now().synced


def test_the_boot_id_is_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("abc\n")
    assert SystemClock(HostRoot(tmp_path)).now().boot_id == "abc"


def test_the_kernel_can_be_asked() -> None:
    moment = SystemClock().now()
    assert moment.mono_ms > 0
    assert isinstance(moment.synced, bool)
    assert PERSIST_EVERY_MS > 0


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (Moment(5, 1000, "a", False), Moment(90_000, 4000, "a", True), 87_000),
        (Moment(5, 1000, "a", False), Moment(90_000, 4000, "b", True), None),
        (Moment(5, 1000, "a", False), Moment(90_000, 4000, "a", False), None),
        (Moment(5, 9000, "a", False), Moment(90_000, 4000, "a", True), None),
        (Moment(5, 1000, "unknown", False), Moment(90_000, 4000, "unknown", True), None),
    ],
    ids=["same boot", "another boot", "still wrong", "from the future", "no boot id"],
)
def test_back_fill(then: Moment, now: Moment, expected: int | None) -> None:
    assert back_fill(then, now) == expected
