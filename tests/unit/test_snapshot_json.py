"""The stable JSON form of a snapshot: keys, words, and nothing a strict parser would refuse."""

from __future__ import annotations

import json
import math
from typing import Any

from edgeagent.gpus.model import GpuProcess, ProcessType
from edgeagent.snapshot_json import camel, to_json
from tests.fakes.fleet import snapshots


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_names_are_camel_case_and_units_keep_their_spelling() -> None:
    assert [camel(n) for n in ("uuid", "gpu_uuid", "usable_mib", "promised_cores_pct", "temperature_c")] == [
        "uuid", "gpuUuid", "usableMiB", "promisedCoresPct", "temperatureC",
    ]  # fmt: skip


def test_a_snapshot_survives_a_strict_parser_and_says_what_it_holds() -> None:
    plain = to_json(snapshots.snapshot())
    assert strict(json.dumps(plain, allow_nan=False)) == plain
    gpu = plain["gpus"][0]
    assert gpu["gpu"]["computeCapability"] == "8.9"
    assert gpu["hostUse"] == {"usedMiB": 120.0, "processes": [{"pid": 77, "name": "Xorg", "usedMiB": 120.0}]}
    assert gpu["levels"]["memory"]["level"] == "cooperative"
    assert gpu["reading"]["throttleReasons"] == ["idle"]
    assert gpu["mode"] == "shared"
    assert gpu["conditions"][0]["podsHurt"] == ["vision/inference-7c9d8f-00001"]
    assert plain["containers"][0]["usedMiB"] == 1235.4


def test_a_pod_without_a_known_name_is_called_by_its_uid() -> None:
    known = snapshots.container(1)
    assert known.pod_label == "vision/inference-7c9d8f-00001"
    assert snapshots.container(1, namespace=None, pod=None).pod_label == f"pod {known.pod_uid}"


def test_what_is_not_known_is_absent() -> None:
    reading = snapshots.reading(power_w=math.nan, temperature_c=math.inf, clock_sm_mhz=None)
    plain = to_json(snapshots.snapshot(gpus=(snapshots.gpu_state(reading=reading, host_use=None),)))
    gpu = plain["gpus"][0]
    assert "hostUse" not in gpu
    assert not {"powerW", "temperatureC", "clockSmMhz"} & gpu["reading"].keys()

    def values(value: Any) -> Any:
        if isinstance(value, dict):
            for v in value.values():
                yield from values(v)
        elif isinstance(value, list):
            for v in value:
                yield from values(v)
        else:
            yield value

    assert None not in list(values(plain))


def test_sets_are_sorted_lists() -> None:
    process = GpuProcess(7, frozenset({ProcessType.MPS, ProcessType.COMPUTE}), 10.0)
    plain = to_json(
        snapshots.snapshot(gpus=(snapshots.gpu_state(reading=snapshots.reading(processes=(process,))),))
    )
    assert plain["gpus"][0]["reading"]["processes"] == [
        {"pid": 7, "types": ["compute", "mps"], "usedMiB": 10.0}
    ]
