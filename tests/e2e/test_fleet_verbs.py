"""Commands and wishes from the broker, carried out by the real agent: what the answers say is so."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.mosquitto.observer import Seen
from tests.fakes.whole import MEMORY, NUMBER, WholeNode

BASE = "gpufleet/v1/lab/edge-1/"
VERBS = ["snapshot", "cordon-gpu", "uncordon-gpu", "drain-gpu", "set-sharing"]


class Operator:
    """Sends commands as the fleet page does, and reads the answers."""

    def __init__(self, node: WholeNode) -> None:
        self.node = node
        self._sent = 0

    def status(self, **wanted: Any) -> dict[str, Any]:
        return self.node.observer.wait_payload(
            "/status", lambda p: all(p.get(k) == v for k, v in wanted.items()), 30.0
        )

    def command(self, verb: str, **args: Any) -> dict[str, Any]:
        """The last answer to it."""
        self._sent += 1
        ident = f"op-{self._sent}"
        body = {
            "id": ident, "verb": verb, "node": "edge-1", "replyTo": "ops", "args": args,
            "exp": time.time_ns() // 10**6 + 60_000, "sess": self.node.observer.last("/status")["sess"],
        }  # fmt: skip
        self.node.observer.publish(BASE + f"cmd/{verb}", body)

        def ended(seen: list[Seen]) -> dict[str, Any] | None:
            answers = [s.payload for s in seen if s.topic == BASE + "res/ops"]
            return next((a for a in answers if a["cmd"] == ident and a["state"] != "accepted"), None)

        answer: dict[str, Any] = self.node.observer.wait(ended, 30.0)
        return answer


@pytest.fixture
def operator(short_dir: Path) -> Iterator[Operator]:
    config = {"fleet": {"commands": {"allow": VERBS, "perMinute": 600}}}
    with WholeNode(short_dir, "l4", "l4", broker=True, api=True, config=config) as node:
        node.ready()
        found = Operator(node)
        found.status(state="ready", kubelet=True)
        yield found
        node.assert_clean_log()


def test_a_sharing_is_kept_only_by_the_agent_that_became_ready_with_it(operator: Operator) -> None:
    """Not by the one before the restart, which is ready with the old one."""
    node = operator.node
    before = operator.status(state="ready", kubelet=True)
    answer = operator.command(
        "set-sharing", sharing={"maxSharesPerGpu": 4}, expectConfigHash=before["configHash"]
    )
    assert (answer["state"], answer["sess"] != before["sess"]) == ("succeeded", True)
    assert node.kubelet.allocatable[NUMBER] == 8
    assert operator.status(sess=answer["sess"])["configHash"] == answer["result"]["configHash"]
    assert not (node.agent.state_dir / "fleet/sharing-trial.json").exists()


def test_a_sharing_with_which_nothing_starts_is_taken_back_at_the_third_start(operator: Operator) -> None:
    """Every GPU off: the agent runs, the kubelet hears of no resource. Who restarts it does not help."""
    node = operator.node
    before = operator.status(state="ready", kubelet=True)
    node.observer.clear()
    node.observer.publish(
        BASE + "cmd/set-sharing",
        {
            "id": "off", "verb": "set-sharing", "node": "edge-1", "sess": before["sess"],
            "exp": time.time_ns() // 10**6 + 60_000,
            "args": {"sharing": {"mode": "off"}, "expectConfigHash": before["configHash"]},
        },
    )  # fmt: skip
    node.agent.wait_snapshot(lambda s: s["gpus"] and s["gpus"][0]["mode"] == "off")
    for _ in range(3):
        node.agent.kill()
        node.agent.start().wait_ready()
    node.agent.wait_snapshot(lambda s: s["kubeletConnected"] and s["configHash"] == before["configHash"])
    node.kubelet.wait_for(lambda: node.kubelet.allocatable[MEMORY] == 45088)


def test_a_drain_ends_the_pods_unless_it_is_called_off(operator: Operator) -> None:
    node = operator.node
    pod = node.share("a", 1000)
    gpu = node.gpu_of(pod)
    answer = operator.command("drain-gpu", gpu=gpu, graceS=0.5)
    assert answer["result"]["pods"] == ["default/a"]
    assert operator.command("uncordon-gpu", gpu=gpu)["state"] == "succeeded"
    node.agent.wait_snapshot(lambda _: "drain given up" in node.agent.log())
    assert pod.apps[0].running
    operator.command("drain-gpu", gpu=gpu, graceS=0)
    node.kubelet.wait_for(lambda: pod.gone or not pod.apps[0].running)


def test_wishes_are_taken_as_far_as_they_may_be_and_the_rest_is_named(operator: Operator) -> None:
    before = operator.status(state="ready", kubelet=True)["configHash"]
    wishes = {"gpus": {"pollSeconds": 0.5}, "fleet": {"commands": {"allow": ["restart-agent"]}}}
    operator.node.observer.publish(BASE + "cfg/desired", json.dumps(wishes), retain=True)
    status = operator.node.observer.wait_payload("/status", lambda p: "desired" in p)
    assert [r["key"] for r in status["desired"]["refused"]] == ["fleet.commands.allow"]
    assert status["configHash"] != before
    assert operator.node.agent.call("config")["gpus"]["pollSeconds"] == 0.5
    assert "restart-agent" not in status["commands"]
