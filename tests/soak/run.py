"""One soak run: churn, invariants, samples of the process, and the report of it all."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.whole import WholeNode, process_size
from tests.soak.churn import Churn
from tests.soak.invariants import Figures, Invariants, percentile, slope
from tests.soak.plot import Series, svg

CONDITIONS = "fake NVML, stand-in kubelet and scheduler, mosquitto behind a failing proxy"
SAMPLE_S = 1.0
LAST_DEATH = 0.35  # of the run: after it the agent lives on, so that a slope means something
CONFIG = {"sharing": {"reserveAfterSeconds": 20}, "isolation": {"watchdog": {"pollSeconds": 1.0}}}


@dataclass
class Report:
    seconds: float
    seed: int
    done: dict[str, int]
    invariants: Invariants
    figures: Figures
    samples: list[dict[str, float]] = field(default_factory=list)

    @property
    def broken(self) -> dict[str, list[str]]:
        return self.invariants.broken


def soak(directory: Path, seconds: float, seed: int, pace_s: tuple[float, float] = (0.05, 0.35)) -> Report:
    """Runs for `seconds` and returns what was seen; nothing is raised for a broken invariant."""
    with WholeNode(
        directory, "rtx-4000-ada", "l4", broker=True, config=CONFIG, kubelet={"seed": seed}
    ) as node:
        node.ready()
        invariants = Invariants(node)
        invariants.usable = {g["gpu"]["uuid"]: g["usableMiB"] for g in node.agent.snapshot()["gpus"]}
        churn = Churn(node, invariants, seed)
        samples: list[dict[str, float]] = []
        begin_s = time.monotonic()
        next_step_s = next_sample_s = begin_s
        while (now_s := time.monotonic()) < begin_s + seconds:
            churn.deaths_allowed = now_s < begin_s + LAST_DEATH * seconds
            if now_s >= next_step_s:
                churn.step()
                next_step_s = time.monotonic() + churn.rng.uniform(*pace_s)
            if now_s >= next_sample_s:
                samples.append(
                    {
                        "s": now_s - begin_s,
                        "pid": node.agent.pid,
                        **process_size(node.agent.pid),
                        "pods": len(node.kubelet.cluster.pods),
                    }
                )
                next_sample_s = now_s + SAMPLE_S
            invariants.look()
            node.kubelet.stopping.wait(0.03)
        churn.drain()
        invariants.finish()
        figures = _figures(node, invariants, samples)
        return Report(time.monotonic() - begin_s, seed, dict(churn.done), invariants, figures, samples)


def _figures(node: WholeNode, invariants: Invariants, samples: list[dict[str, float]]) -> Figures:
    calls = node.kubelet.calls
    took: dict[str, list[float]] = {}
    for call in calls:
        if call.end_s is not None and call.error is None:
            took.setdefault(call.method, []).append((call.end_s - call.begin_s) * 1000)
    last = [s for s in samples if s["pid"] == samples[-1]["pid"]]
    settled = last[len(last) // 4 :]
    different, repeated = invariants.messages
    return {
        "calls": {
            name: {
                "n": len(ms),
                "p50_ms": percentile(ms, 0.5),
                "p99_ms": percentile(ms, 0.99),
                "max_ms": max(ms),
            }
            for name, ms in sorted(took.items())
        },
        "containers_started": len([c for c in calls if c.method == "PreStartContainer" and c.error is None]),
        "messages": different,
        "messages_repeated": repeated,
        "rejections_excused": dict(invariants.excused),
        "life_s": settled[-1]["s"] - settled[0]["s"],
        "rss_mib": {"first": settled[0]["rss_kib"] / 1024, "last": settled[-1]["rss_kib"] / 1024},
        "slope": {
            "rss_kib_per_min": slope([(s["s"], s["rss_kib"]) for s in settled]),
            "fds_per_min": slope([(s["s"], s["fds"]) for s in settled]),
            "threads_per_min": slope([(s["s"], s["threads"]) for s in settled]),
        },
        "fds": (min(s["fds"] for s in settled), max(s["fds"] for s in settled)),
        "threads": (min(s["threads"] for s in settled), max(s["threads"] for s in settled)),
    }


def markdown(report: Report) -> str:
    f = report.figures
    lines = [
        f"Soak of {report.seconds / 60:.1f} min, seed {report.seed}: {CONDITIONS}, Python "
        + platform.python_version()
        + f", {platform.machine()}, {os.cpu_count()} CPUs.",
        "",
        "| invariant | looks | broken |",
        "|---|---:|---:|",
    ]
    lines += [f"| {c.text} | {c.looks} | {len(c.broken)} |" for c in report.invariants.checks.values()]
    lines += ["", "| what was done | times |", "|---|---:|"]
    lines += [f"| {name} | {n} |" for name, n in sorted(report.done.items())]
    lines += [
        "",
        "| kubelet call that succeeded | n | p50 ms | p99 ms | max ms |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {c['n']} | {c['p50_ms']:.1f} | {c['p99_ms']:.0f} | {c['max_ms']:.0f} |"
        for name, c in f["calls"].items()
    ]
    slopes = f["slope"]
    lines += [
        "",
        "PreStartContainer includes waiting for room, which is its job.",
        "",
        f"| the process over its last {f['life_s'] / 60:.1f} min | from | to | slope per minute |",
        "|---|---:|---:|---:|",
        (
            f"| resident MiB | {f['rss_mib']['first']:.1f} | {f['rss_mib']['last']:.1f} |"
            f" {slopes['rss_kib_per_min'] / 1024:+.3f} |"
        ),
        f"| open files | {f['fds'][0]:.0f} | {f['fds'][1]:.0f} | {slopes['fds_per_min']:+.3f} |",
        f"| threads | {f['threads'][0]:.0f} | {f['threads'][1]:.0f} | {slopes['threads_per_min']:+.3f} |",
        "",
        f"{f['messages']} messages through the outbox, {f['messages_repeated']} repeats (consumers de-duplicate).",
    ]
    if f["rejections_excused"]:
        lines += [
            "",
            "Pods that the kubelet rejected because its list had changed since the scheduler bound them:",
        ]
        lines += [f"- {n} × {text}" for text, n in f["rejections_excused"].items()]
    for name, why in report.broken.items():
        lines += ["", f"### Broken: {name}", *(f"- {w}" for w in why)]
    return "\n".join(lines) + "\n"


def plot(report: Report) -> str:
    return svg(
        f"Soak, {report.seconds / 60:.0f} min: the agent's process",
        [
            Series("resident MiB", [(s["s"] / 60, s["rss_kib"] / 1024) for s in report.samples]),
            Series("open files", [(s["s"] / 60, s["fds"]) for s in report.samples]),
            Series("threads", [(s["s"] / 60, s["threads"]) for s in report.samples]),
            Series("pods", [(s["s"] / 60, s["pods"]) for s in report.samples]),
        ],
        "minutes",
    )
