"""Half a minute of `make soak`: every invariant holds under churn. The long run says more about slopes."""

from __future__ import annotations

from pathlib import Path

from tests.soak.run import markdown, soak


def test_nothing_is_promised_twice_or_lost_under_churn(short_dir: Path) -> None:
    report = soak(short_dir, 20.0, seed=3, pace_s=(0.02, 0.2))
    print(markdown(report))
    assert report.broken == {}
    assert report.done["pod created"] > 20
    assert sum(n for name, n in report.done.items() if name.startswith("agent")) >= 1
