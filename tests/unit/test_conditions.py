"""What a reading says about each condition, and how conditions come and go."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.gpus.model import GpuFault, GpuKind, GpuProcess, GpuReading, ProcessType
from edgeagent.health.conditions import (
    FAULT_CONDITIONS,
    RULES,
    Books,
    ConditionType,
    Limits,
    Sign,
    Track,
    advance,
    condition_id,
    overcommit_mib,
    raised_by_event,
    signs_of,
    temperature_limits_c,
    withdrawn_mib,
)
from tests.fakes.gpus import UUIDS, make_gpu, make_reading

T = ConditionType
LIMITS = Limits()
UUID = UUIDS[0]


def signs(
    active: frozenset[ConditionType] = frozenset(),
    previous: GpuReading | None = None,
    limits: Limits = LIMITS,
    **changes: Any,
) -> dict[ConditionType, Sign]:
    return signs_of(make_gpu(), make_reading(UUID, **changes), previous, limits, active)


def bad(found: dict[ConditionType, Sign]) -> set[ConditionType]:
    return {kind for kind, sign in found.items() if sign.bad}


def test_an_idle_gpu_has_no_trouble() -> None:
    assert bad(signs()) == set()


FAULTS = {
    GpuFault.LOST: T.LOST,
    GpuFault.NOT_FOUND: T.LOST,
    GpuFault.RESET_REQUIRED: T.RESET_REQUIRED,
    GpuFault.DRIVER_MISMATCH: T.DRIVER_MISMATCH,
    GpuFault.DRIVER_NOT_LOADED: T.DRIVER_NOT_LOADED,
    GpuFault.LIBRARY_MISSING: T.DRIVER_NOT_LOADED,
    GpuFault.UNRESPONSIVE: T.DRIVER_UNRESPONSIVE,
    GpuFault.NO_PERMISSION: T.NOT_READY,
    GpuFault.FAILED: T.NOT_READY,
}


@pytest.mark.parametrize("fault", list(GpuFault))
def test_each_fault_is_one_condition_and_says_nothing_else(fault: GpuFault) -> None:
    found = signs_of(make_gpu(), GpuReading(UUID, 0.0, fault), None, LIMITS)
    assert bad(found) == ({FAULTS[fault]} if fault in FAULTS else set())
    others = [sign.bad for kind, sign in found.items() if kind not in FAULT_CONDITIONS]
    assert others == [None] * len(others), "without a reading nothing else is raised or cleared"


def test_every_fault_condition_takes_the_shares_away() -> None:
    assert all(RULES[kind].makes_unhealthy for kind in FAULT_CONDITIONS)


def test_a_driver_mismatch_says_what_the_back_end_knows() -> None:
    detail = "the NVIDIA library is 550.107.02 but the loaded kernel module is 550.90.07"
    reading = GpuReading(UUID, 0.0, GpuFault.DRIVER_MISMATCH, detail)
    sign = signs_of(make_gpu(), reading, None, LIMITS)[T.DRIVER_MISMATCH]
    assert "550.107.02" in sign.message
    assert "550.90.07" in sign.message


READINGS: dict[str, tuple[dict[str, Any], set[ConditionType]]] = {
    "hot": ({"temperature_c": 90.0}, {T.OVER_TEMPERATURE}),
    "nearly hot": ({"temperature_c": 89.9}, set()),
    "thermal slowdown, hardware": ({"throttle_reasons": frozenset({"thermal_hw"})}, {T.THERMAL_SLOWDOWN}),
    "thermal slowdown, software": ({"throttle_reasons": frozenset({"thermal_sw"})}, {T.THERMAL_SLOWDOWN}),
    "power cap is normal": ({"throttle_reasons": frozenset({"power_cap"})}, set()),
    "power brake": ({"throttle_reasons": frozenset({"power_brake"})}, {T.POWER_BRAKE}),
    "over-current": ({"throttle_reasons": frozenset({"oc"})}, {T.POWER_BRAKE}),
    "row remap failed": ({"row_remap_failed": True}, {T.ROW_REMAP_FAILED}),
    "row remap pending": ({"row_remap_pending": True}, {T.ROW_REMAP_PENDING}),
    "driver wants a reset": ({"recovery_action": "reset"}, {T.RECOVERY_ACTION}),
    "driver wants nothing": ({"recovery_action": "none"}, set()),
    "old errors are history": ({"ecc_uncorrectable": 7}, set()),
}


@pytest.mark.parametrize(("changes", "expected"), READINGS.values(), ids=READINGS)
def test_a_reading_shows(changes: dict[str, Any], expected: set[ConditionType]) -> None:
    assert bad(signs(**changes)) == expected


@pytest.mark.parametrize("celsius", [None, -256.0, math.nan, math.inf, 4000.0])
def test_a_temperature_that_is_none_neither_raises_nor_clears(celsius: float | None) -> None:
    assert signs(temperature_c=celsius)[T.OVER_TEMPERATURE].bad is None


def test_an_alarm_stays_between_its_two_thresholds() -> None:
    hot = frozenset({T.OVER_TEMPERATURE})
    assert signs(temperature_c=87.0)[T.OVER_TEMPERATURE].bad is False
    assert signs(active=hot, temperature_c=87.0)[T.OVER_TEMPERATURE].bad is None
    assert signs(active=hot, temperature_c=84.9)[T.OVER_TEMPERATURE].bad is False


@pytest.mark.parametrize(
    ("slowdown", "shutdown", "limits", "expected"),
    [
        (90.0, 95.0, LIMITS, (90.0, 85.0)),
        (None, 95.0, LIMITS, (90.0, 85.0)),
        (None, None, LIMITS, None),
        (90.0, 95.0, Limits(temperature_c=70.0), (70.0, 65.0)),
        (90.0, 95.0, Limits(temperature_c=70.0, temperature_clear_c=60.0), (70.0, 60.0)),
        (90.0, None, Limits(temperature_clear_c=99.0), (90.0, 85.0)),
    ],
    ids=["slowdown", "below shutdown", "none known", "configured", "both configured", "clear above raise"],
)
def test_temperature_thresholds(
    slowdown: float | None, shutdown: float | None, limits: Limits, expected: tuple[float, float] | None
) -> None:
    gpu = make_gpu(temperature_slowdown_c=slowdown, temperature_shutdown_c=shutdown)
    assert temperature_limits_c(gpu, limits) == expected


def test_new_uncorrectable_errors_count_and_old_ones_do_not() -> None:
    before = make_reading(UUID, ecc_uncorrectable=7)
    found = signs(previous=before, ecc_uncorrectable=9)[T.ECC_UNCORRECTABLE]
    assert found.bad
    assert found.facts["newErrors"] == 2
    assert signs(previous=before, ecc_uncorrectable=7)[T.ECC_UNCORRECTABLE].bad is False
    assert signs(previous=before, ecc_uncorrectable=0)[T.ECC_UNCORRECTABLE].bad is False, "driver reloaded"


def test_over_current_counts_only_what_is_new() -> None:
    before = make_reading(UUID, overcurrent_events=3)
    assert signs(previous=before, overcurrent_events=5)[T.POWER_BRAKE].bad
    assert signs(previous=before, overcurrent_events=3)[T.POWER_BRAKE].bad is False
    assert signs(overcurrent_events=3)[T.POWER_BRAKE].bad is False


@pytest.mark.parametrize("action", ["drain", "recover_imex"])
def test_actions_that_leave_the_gpu_usable_leave_the_shares(action: str) -> None:
    sign = signs(recovery_action=action)[T.RECOVERY_ACTION]
    track = advance(Track(), T.RECOVERY_ACTION, sign, UUID, LIMITS, 0.0, 0)
    assert track.condition is not None
    assert (track.condition.makes_unhealthy, track.condition.severity) == (False, "warning")


def test_a_fatal_xid_does_not_clear_while_the_driver_wants_a_reset() -> None:
    assert signs(recovery_action="reset")[T.XID_FATAL].bad is None
    assert signs(recovery_action="none")[T.XID_FATAL].bad is False
    assert signs(recovery_action=None)[T.XID_FATAL].bad is False


# -- host overcommit (field case E3) ----------------------------------------------------------------


def test_host_use_that_grows_into_promises_is_told_with_its_numbers() -> None:
    books = Books(usable_mib=8000, promised_mib=4096)
    found = signs_of(make_gpu(), make_reading(UUID), None, LIMITS, books=books, beyond_mib=6000.0)
    sign = found[T.HOST_OVERCOMMIT]
    assert sign.bad
    assert sign.facts == {
        "overcommittedMiB": 2096, "promisedMiB": 4096, "usableMiB": 8000, "hostUsedMiB": 6000,
    }  # fmt: skip
    assert not RULES[T.HOST_OVERCOMMIT].makes_unhealthy, "running pods' shares are never withdrawn"


@pytest.mark.parametrize(
    ("beyond", "active", "expected"),
    [(3904.0, False, False), (4160.0, False, False), (4161.0, False, True), (4000.0, True, True),
     (3904.0, True, False), (None, False, None)],
    ids=["fits", "at the threshold", "above it", "not yet cleared", "cleared", "no process lists"],
)  # fmt: skip
def test_host_overcommit_has_hysteresis(beyond: float | None, active: bool, expected: bool | None) -> None:
    books = Books(usable_mib=8000, promised_mib=4096)
    held = frozenset({T.HOST_OVERCOMMIT}) if active else frozenset()
    found = signs_of(make_gpu(), make_reading(UUID), None, LIMITS, held, books, beyond)
    assert found[T.HOST_OVERCOMMIT].bad is expected


def test_on_unified_memory_what_is_available_must_cover_what_is_promised() -> None:
    books = Books(usable_mib=12000, promised_mib=8000)
    reading = make_reading(
        UUID,
        host_memory_available_mib=3000.0,
        processes=(GpuProcess(7, frozenset({ProcessType.COMPUTE}), 2000.0),),
    )
    assert overcommit_mib(reading, books, None, unified=True) == 3000.0
    gpu = make_gpu(kind=GpuKind.INTEGRATED)
    assert signs_of(gpu, reading, None, LIMITS, books=books)[T.HOST_OVERCOMMIT].bad


@pytest.mark.parametrize(
    ("books", "beyond", "expected"),
    [
        (Books(8000, 0), 2660.0, 2660),
        (Books(7500, 0, reserve_mib=500), 2660.0, 2160),
        (Books(7500, 0, reserve_mib=500), 400.0, 0),
        (Books(8000, 4096), 6000.0, 3904),
        (Books(8000, 8000), 6000.0, 0),
        (Books(8000, 0), None, 0),
        (Books(8000, 0), 0.5, 1),
    ],
    ids=["no reserve", "reserve covers a part", "reserve covers it", "never what is promised", "all promised",
         "not known", "rounded against us"],
)  # fmt: skip
def test_units_withdrawn_for_the_host(books: Books, beyond: float | None, expected: int) -> None:
    assert withdrawn_mib(books, beyond) == expected


@given(
    st.integers(0, 90000), st.integers(0, 90000), st.integers(0, 4000), st.floats(0, 200000, allow_nan=False)
)
@settings(max_examples=150)
def test_what_is_left_is_never_more_than_there_is(
    usable: int, promised: int, reserve: int, beyond: float
) -> None:
    promised = min(promised, usable)
    books = Books(usable, promised, reserve)
    withdrawn = withdrawn_mib(books, beyond)
    left = usable - promised - withdrawn
    assert 0 <= left <= usable - promised
    if left:
        assert promised + left + beyond <= usable + reserve + 1


# -- tracks -----------------------------------------------------------------------------------------


def play(kind: ConditionType, pattern: str, limits: Limits = LIMITS, step_s: float = 5.0) -> str:
    """'b' bad, 'g' good, '?' unknown, one a poll -> '!' where the condition holds, '.' where not."""
    track, out = Track(), ""
    for i, what in enumerate(pattern):
        sign = Sign({"b": True, "g": False, "?": None}[what], "trouble")
        track = advance(track, kind, sign, UUID, limits, i * step_s, i * 1000)
        out += "!" if track.condition else "."
    return out


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        (T.LOST, "gbggg", ".!!.."),
        (T.LOST, "bgbgg", "!!!!."),
        (T.LOST, "b?g?g", "!!!!."),
        (T.OVER_TEMPERATURE, "bgbgb", "....."),
        (T.OVER_TEMPERATURE, "bbgg", ".!!."),
        (T.OVER_TEMPERATURE, "b?b", "..!"),
        (T.OVER_TEMPERATURE, "bb???", ".!!!!"),
    ],
    ids=["at once", "flapping holds", "unknown counts for nothing", "slow needs two in a row", "slow",
         "unknown does not break a row", "unknown does not clear"],
)  # fmt: skip
def test_hysteresis(kind: ConditionType, pattern: str, expected: str) -> None:
    assert play(kind, pattern) == expected


def test_since_is_when_it_began() -> None:
    track = advance(Track(), T.LOST, Sign(True, "gone"), UUID, LIMITS, 0.0, 1000)
    track = advance(track, T.LOST, Sign(True, "gone"), UUID, LIMITS, 5.0, 6000)
    assert track.condition is not None
    assert track.condition.since_ms == 1000


def test_an_event_holds_and_then_needs_good_polls() -> None:
    track = raised_by_event(Track(), T.XID_FATAL, Sign(True, "XID 79"), UUID, LIMITS, 0.0, 0)
    for now in range(5, 60, 5):
        track = advance(track, T.XID_FATAL, Sign(False), UUID, LIMITS, float(now), now * 1000)
        assert track.condition is not None
    assert advance(track, T.XID_FATAL, Sign(False), UUID, LIMITS, 60.0, 60000).condition is None


def test_polls_between_the_regular_ones_do_not_speed_recovery_up() -> None:
    track = advance(Track(), T.LOST, Sign(True, "gone"), UUID, LIMITS, 0.0, 0)
    for _ in range(10):
        track = advance(track, T.LOST, Sign(False), UUID, LIMITS, 0.1, 100, scheduled=False)
    assert track.condition is not None


@given(st.text(alphabet="bg?", max_size=30), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=150)
def test_a_condition_never_outlives_enough_good_polls(pattern: str, raise_polls: int, recover: int) -> None:
    limits = Limits(raise_polls=raise_polls, recover_polls=recover)
    for kind in (T.LOST, T.OVER_TEMPERATURE):
        assert play(kind, pattern + "g" * recover, limits).endswith(".")
        assert play(kind, pattern + "b" * raise_polls, limits).endswith("!")


def test_ids_are_stable_and_fit_into_a_topic() -> None:
    assert condition_id(T.XID_FATAL, "GPU-1A2b") == "xidfatal-gpu-1a2b"
    assert condition_id("KubeletDown", None) == "kubeletdown"
    assert condition_id(T.LOST, "MIG/x +#y") == "lost-mig-x-y"


def test_an_mps_daemon_that_stays_away_withdraws_the_gpu_and_its_return_gives_it_back() -> None:
    """One bad look may be its restart; a fault of the GPU itself is told instead."""
    gpu, limits = make_gpu(), Limits()
    reading = make_reading(gpu.uuid)
    track = Track()
    for n in range(2):
        sign = signs_of(gpu, reading, None, limits, mps_problem="it does not answer")[
            ConditionType.MPS_DAEMON
        ]
        track = advance(track, ConditionType.MPS_DAEMON, sign, gpu.uuid, limits, float(n), n)
        assert (track.condition is not None) is (n == 1)
    assert track.condition is not None
    assert track.condition.makes_unhealthy
    assert "it does not answer" in track.condition.message
    lost = make_reading(gpu.uuid, fault=GpuFault.LOST)
    assert signs_of(gpu, lost, None, limits, mps_problem="x")[ConditionType.MPS_DAEMON].bad is None
    for n in range(2, 5):
        sign = signs_of(gpu, reading, None, limits)[ConditionType.MPS_DAEMON]
        track = advance(track, ConditionType.MPS_DAEMON, sign, gpu.uuid, limits, float(n), n)
    assert track.condition is None
