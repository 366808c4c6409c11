"""The hour of readings: order, thinning, cutting."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.dashboard.series import FIELDS, MAX_POINTS, MIN_GAP_S, SPAN_S, Hour

T0 = 1_790_000_000


def values(n: float) -> list[float | None]:
    return [n, None, n / 2, n]


def test_values_that_are_not_known_stay_so() -> None:
    hour = Hour()
    hour.add(T0, values(8))
    out = hour.since(0, T0)
    assert (out["utilPct"], out["temperatureC"], out["powerW"]) == ([8], [None], [4])


def test_a_copy_gets_only_what_is_new() -> None:
    hour = Hour()
    for n in range(5):
        hour.add(T0 + 10 * n, values(n))
    assert hour.since(T0 + 20, T0 + 40)["t"] == [T0 + 30, T0 + 40]
    assert hour.rewrites == 0
    hour.add(T0 + 5, values(9))
    assert hour.rewrites == 1


def test_six_hours_of_samples_every_second_stay_small() -> None:
    hour = Hour()
    for n in range(6 * 3600):
        hour.add(T0 + n, values(n % 100))
    assert len(hour) <= MAX_POINTS
    assert len(hour.since(0, T0 + 6 * 3600)["t"]) == SPAN_S // MIN_GAP_S


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-4000, 4000), max_size=120))
def test_points_in_any_order_are_kept_in_order(offsets: list[int]) -> None:
    hour = Hour()
    for offset in offsets:
        hour.add(T0 + offset, values(offset))
    out = hour.since(0, hour.newest_s)
    assert out["t"] == sorted(set(out["t"]))  # type: ignore[type-var]
    assert all(b - a >= MIN_GAP_S for a, b in zip(out["t"], out["t"][1:], strict=False))  # type: ignore[operator]
    assert {len(out[name]) for name in FIELDS} == {len(out["t"])}


def test_times_that_are_none_are_refused() -> None:
    hour = Hour()
    assert not any(hour.add(t, values(1)) for t in (0, -5, 2**32, 2**60))
