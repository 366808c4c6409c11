"""Admission policies: what is refused with which sentence, and what the MiB rewrite does."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from edgeagent.admission import (
    PolicyNames,
    rewriting_policy,
    runtime_class_policy,
    to_yaml,
    validating_policy,
)
from tests.fakes.admission import Policy

MEMORY, UNITS = "volcano.sh/vgpu-memory", "volcano.sh/vgpu-memory-64mi"
CORES, NUMBER = "volcano.sh/vgpu-cores", "volcano.sh/vgpu-number"
NAMES = PolicyNames(MEMORY, CORES, NUMBER, UNITS, 64)


@pytest.fixture(scope="module")
def checks() -> Policy:
    return Policy(validating_policy(NAMES)[0])


@pytest.fixture(scope="module")
def rewrite() -> Policy:
    return Policy(rewriting_policy(NAMES)[0])


def container(limits: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    resources = {} if limits is None else {"resources": {"limits": dict(limits), "requests": dict(limits)}}
    return {"name": more.pop("name", "app"), "image": "x", **resources, **more}


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    body = {"containers": list(containers), **({"initContainers": list(init)} if init else {}), **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": body}


def wrapped(kind: str, p: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec as the template of a controller of `kind`."""
    spec: dict[str, Any] = {"template": {"spec": p["spec"]}}
    if kind == "CronJob":
        spec = {"jobTemplate": {"spec": spec}}
    return {"kind": kind, "metadata": {"name": "c"}, "spec": spec}


REFUSED = {
    "cores without memory": (container({CORES: "30"}), "compute without memory"),
    "cores and number without memory": (container({CORES: "30", NUMBER: "1"}), "compute without memory"),
    "more than 100 cores": (container({MEMORY: "100", CORES: "101"}), "at most 100"),
    "two shares": (container({MEMORY: "100", NUMBER: "2"}), "at most 1"),
    "limits and requests differ": (
        container() | {"resources": {"limits": {MEMORY: "100"}, "requests": {MEMORY: "50"}}},
        "must equal their limits",
    ),
    "requests only": (container() | {"resources": {"requests": {MEMORY: "50"}}}, "must equal their limits"),
    "visible devices": (
        container({MEMORY: "1"}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
        "must not set",
    ),
    "preload": (container({MEMORY: "1"}, env=[{"name": "LD_PRELOAD", "value": "/x.so"}]), "must not set"),
    "MPS limit": (
        container({UNITS: "1"}, env=[{"name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "value": "0=80G"}]),
        "must not set",
    ),
    "privileged": (container({MEMORY: "1"}, securityContext={"privileged": True}), "privileged"),
}


@pytest.mark.parametrize("kind", ["Pod", "Deployment", "CronJob"])
@pytest.mark.parametrize("init", [False, True], ids=["container", "init container"])
@pytest.mark.parametrize(("bad", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(checks: Policy, kind: str, init: bool, bad: dict[str, Any], expected: str) -> None:
    """Each mistake is refused with one sentence, in every place a pod can come from."""
    good = container({MEMORY: "2000", CORES: "30"}, name="good")
    p = pod(good, init=(bad,)) if init else pod(good, bad)
    messages = checks.refusals(p if kind == "Pod" else wrapped(kind, p))
    assert len(messages) == 1
    assert expected in messages[0]


ACCEPTED = {
    "no share at all": container(),
    "no share, privileged, any env": container(securityContext={"privileged": True}, env=[{"name": "LD_PRELOAD", "value": "x"}]),
    "other limits": container({"cpu": "1", "memory": "1Gi"}),
    "memory": container({MEMORY: "8000"}),
    "memory as a short quantity": container({MEMORY: "8k"}),
    "units": container({UNITS: "125"}),
    "memory and cores": container({MEMORY: "8000", CORES: "100"}),
    "volcano's three": container({MEMORY: "8000", CORES: "30", NUMBER: "1"}),
    "a number alone: a whole GPU": container({NUMBER: "1"}),
    "own env": container({MEMORY: "8000"}, env=[{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}, {"name": "A"}]),
    "not privileged": container({MEMORY: "8000"}, securityContext={"privileged": False}),
}  # fmt: skip


@pytest.mark.parametrize("good", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(checks: Policy, good: dict[str, Any]) -> None:
    assert checks.refusals(pod(good)) == []
    assert checks.refusals(wrapped("Deployment", pod(good))) == []


@pytest.mark.parametrize(
    ("mib", "units"), [("8000", "125"), ("1", "1"), ("64", "1"), ("65", "2"), ("8k", "125"), ("23034", "360")]
)
def test_mib_become_units_rounded_up(rewrite: Policy, mib: str, units: str) -> None:
    after = rewrite.mutate(pod(container({MEMORY: mib, CORES: "30"})))
    resources = after["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {UNITS: units, CORES: "30"}, "requests": {UNITS: units, CORES: "30"}}


def test_every_container_is_rewritten_and_nothing_else(rewrite: Policy) -> None:
    """Containers and init containers, each by its own number; those without a share stay as they are."""
    before = pod(
        container({"cpu": "1"}, name="web"),
        container({MEMORY: "100"}, name="a"),
        container({MEMORY: "200"}, name="b"),
        container(name="none"),
        init=(container({MEMORY: "300"}, name="i"),),
    )
    after = rewrite.mutate(before)
    limits = [c.get("resources", {}).get("limits") for c in after["spec"]["containers"]]
    assert limits == [{"cpu": "1"}, {UNITS: "2"}, {UNITS: "4"}, None]
    assert after["spec"]["initContainers"][0]["resources"]["limits"] == {UNITS: "5"}


def test_pods_without_a_share_are_not_touched(rewrite: Policy) -> None:
    before = pod(container({"cpu": "1"}), container(name="b"))
    assert rewrite.mutate(before) == before
    assert rewrite.mutate(pod(container({UNITS: "3"}))) == pod(container({UNITS: "3"}))


def test_unit_of_one_needs_no_rewrite() -> None:
    assert rewriting_policy(PolicyNames(MEMORY, CORES, NUMBER, MEMORY, 1)) == []


def test_runtime_class_is_added_only_where_none_is_named() -> None:
    policy = Policy(runtime_class_policy(NAMES)[0])
    assert policy.mutate(pod(container({MEMORY: "1"})))["spec"]["runtimeClassName"] == "nvidia"
    assert (
        policy.mutate(pod(container(), init=(container({CORES: "1", MEMORY: "1"}),)))["spec"][
            "runtimeClassName"
        ]
        == "nvidia"
    )
    assert (
        policy.mutate(pod(container({MEMORY: "1"}), runtimeClassName="mine"))["spec"]["runtimeClassName"]
        == "mine"
    )
    assert "runtimeClassName" not in policy.mutate(pod(container()))["spec"]


def test_yaml_is_what_was_generated() -> None:
    """The printed stream parses back to the same documents, each with its binding."""
    documents = validating_policy(NAMES) + rewriting_policy(NAMES)
    text = to_yaml(documents, "line one\nline two")
    assert text.startswith("# line one\n# line two\n---\n")
    assert list(yaml.safe_load_all(text)) == documents
    assert [d["kind"] for d in documents] == [
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "MutatingAdmissionPolicy",
        "MutatingAdmissionPolicyBinding",
    ]
