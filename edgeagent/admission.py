"""The admission policies: catch at `kubectl apply` what would fail later, and let authors write MiB.

Generated from the same names as the agent's resources, so that the two cannot drift. Pure text: CEL
expressions inside ValidatingAdmissionPolicy (Kubernetes 1.30+) and MutatingAdmissionPolicy (1.36+);
no webhook server is involved. Every expression is kept short enough to be read on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

VALIDATE_NAME = "edgeagent-shares"
REWRITE_NAME = "edgeagent-memory-units"
RUNTIME_CLASS_NAME = "edgeagent-runtime-class"

# Environment that would override what the agent gives a container: the pod's own env wins over a
# device plugin's (facts measured on 1.36). Exact names and prefixes.
FORBIDDEN_ENV = (
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "LD_AUDIT",
    "CUDA_DISABLE_CONTROL",
)
FORBIDDEN_ENV_PREFIXES = (
    "CUDA_MPS_",
    "CUDA_DEVICE_MEMORY_",
    "CUDA_DEVICE_SM_",
    "EDGEAGENT_",
    "NVIDIA_GPU_MEMORY_",
)

_POD = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
_WRITES = ["CREATE", "UPDATE"]
_CONTROLLERS = [
    {
        "apiGroups": ["apps"],
        "apiVersions": ["v1"],
        "operations": _WRITES,
        "resources": ["deployments", "daemonsets", "statefulsets", "replicasets"],
    },
    {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": _WRITES, "resources": ["jobs", "cronjobs"]},
]


@dataclass(frozen=True, slots=True)
class PolicyNames:
    """The resource names a policy speaks of. `memory_units` is what the node offers; equal to
    `memory` when the unit is 1 MiB."""

    memory: str
    cores: str
    number: str
    memory_units: str
    unit_mib: int


def validating_policy(names: PolicyNames) -> list[dict[str, Any]]:
    """The checks, as a policy and its binding."""
    memory = list(dict.fromkeys((names.memory, names.memory_units)))
    shares = [*memory, names.cores, names.number]
    variables = [
        {
            "name": "podSpec",
            "expression": (
                "object.kind == 'Pod' ? object.spec :\n"
                "object.kind == 'CronJob' ? object.spec.jobTemplate.spec.template.spec :\n"
                "object.spec.template.spec"
            ),
        },
        {
            "name": "containers",
            "expression": (
                "variables.podSpec.containers +\n"
                "(has(variables.podSpec.initContainers) ? variables.podSpec.initContainers : [])"
            ),
        },
        {
            "name": "sharing",
            "expression": (
                "variables.containers.filter(c, has(c.resources) && has(c.resources.limits) &&\n"
                f"  {shares}.exists(r, r in c.resources.limits))"
            ),
        },
    ]
    prefixes = " ||\n  ".join(f"e.name.startsWith('{p}')" for p in FORBIDDEN_ENV_PREFIXES)

    def at_most(resource: str, count: int) -> str:
        return (
            f"variables.sharing.all(c, !('{resource}' in c.resources.limits) ||\n"
            f"  quantity(c.resources.limits['{resource}']).compareTo(quantity('{count}')) <= 0)"
        )

    validations = [
        _validation(
            f"variables.sharing.all(c, !('{names.cores}' in c.resources.limits) ||\n"
            f"  {memory}.exists(m, m in c.resources.limits))",
            f"{names.cores} needs {names.memory} in the same container: "
            "compute without memory cannot be placed",
        ),
        _validation(at_most(names.cores, 100), f"{names.cores} is per cent of one GPU: at most 100"),
        _validation(
            at_most(names.number, 1), f"{names.number}: a container's share comes from one GPU: at most 1"
        ),
        _validation(
            "variables.containers.all(c, !has(c.resources) || !has(c.resources.requests) ||\n"
            f"  {shares}.all(r, !(r in c.resources.requests) ||\n"
            "    (has(c.resources.limits) && r in c.resources.limits &&\n"
            "     quantity(c.resources.requests[r]).compareTo(quantity(c.resources.limits[r])) == 0)))",
            f"requests of {names.memory}, {names.cores} and {names.number} must equal their limits",
        ),
        _validation(
            "variables.sharing.all(c, !has(c.env) || !c.env.exists(e,\n"
            f"  e.name in {list(FORBIDDEN_ENV)} ||\n  {prefixes}))",
            "a container with a GPU share must not set NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES, "
            "CUDA_MPS_*, LD_PRELOAD or the like: they would override its limits",
        ),
        _validation(
            "variables.sharing.all(c, !has(c.securityContext) ||\n"
            "  !has(c.securityContext.privileged) || c.securityContext.privileged != true)",
            "a privileged container sees every GPU: it cannot have a GPU share",
        ),
    ]
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [_POD, *_CONTROLLERS]},
        "variables": variables,
        "validations": validations,
    }
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": VALIDATE_NAME},
        "spec": spec,
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": VALIDATE_NAME},
        "spec": {"policyName": VALIDATE_NAME, "validationActions": ["Deny"]},
    }
    return [policy, binding]


def _validation(expression: str, message: str) -> dict[str, str]:
    return {"expression": expression, "message": message, "reason": "Invalid"}


def rewriting_policy(names: PolicyNames) -> list[dict[str, Any]]:
    """MiB into the node's units, as a policy and its binding; nothing when the unit is 1 MiB."""
    if names.unit_mib == 1:
        return []
    old, new = _json_pointer(names.memory), _json_pointer(names.memory_units)
    variables, mutations = [], []
    for field in ("containers", "initContainers"):
        for section in ("limits", "requests"):
            asking = f"{field}With{section.capitalize()}"
            variables.append(
                {
                    "name": asking,
                    "expression": (
                        f"(has(object.spec.{field}) ? object.spec.{field} : []).filter(c,\n"
                        f"  has(c.resources) && has(c.resources.{section}) &&\n"
                        f"  '{names.memory}' in c.resources.{section})"
                    ),
                }
            )
            path = f"'/spec/{field}/' + string(object.spec.{field}.indexOf(c)) + '/resources/{section}/"
            mib = f"quantity(c.resources.{section}['{names.memory}']).asInteger()"
            mutations.append(
                f"variables.{asking}.map(c, JSONPatch{{op: 'add',\n"
                f"  path: {path}{new}',\n"
                f"  value: string(({mib} + {names.unit_mib - 1}) / {names.unit_mib})}}) +\n"
                f"variables.{asking}.map(c, JSONPatch{{op: 'remove',\n"
                f"  path: {path}{old}'}})"
            )
    return _mutating(REWRITE_NAME, variables, mutations, _asks([names.memory]))


def runtime_class_policy(names: PolicyNames) -> list[dict[str, Any]]:
    """Adds `runtimeClassName: nvidia` to sharing pods that name none: only where binding is early."""
    shares = list(dict.fromkeys((names.memory, names.memory_units, names.cores, names.number)))
    return _mutating(
        RUNTIME_CLASS_NAME,
        [],
        ["[JSONPatch{op: 'add', path: '/spec/runtimeClassName', value: 'nvidia'}]"],
        f"!has(object.spec.runtimeClassName) && ({_asks(shares)})",
    )


def _asks(resources: list[str]) -> str:
    """CEL: some container of the pod has one of `resources` among its limits."""
    return (
        "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : []))\n"
        ".exists(c, has(c.resources) && has(c.resources.limits) &&\n"
        f"  {resources}.exists(r, r in c.resources.limits))"
    )


def _json_pointer(name: str) -> str:
    """RFC 6901 escaping of one path segment."""
    return name.replace("~", "~0").replace("/", "~1")


def _mutating(
    name: str, variables: list[dict[str, str]], expressions: list[str], condition: str
) -> list[dict[str, Any]]:
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "IfNeeded",
        "matchConstraints": {"resourceRules": [_POD]},
        "matchConditions": [{"name": "asks-for-a-share", "expression": condition}],
    }
    if variables:
        spec["variables"] = variables
    spec["mutations"] = [{"patchType": "JSONPatch", "jsonPatch": {"expression": e}} for e in expressions]
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name},
    }
    return [policy, binding]


class _Dumper(yaml.SafeDumper):
    """Long expressions as literal blocks, so that a person can read them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(documents: list[dict[str, Any]], header: str) -> str:
    """The manifests as one YAML stream below a comment."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=1000
    )
