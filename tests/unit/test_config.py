"""Configuration: what is refused, with which line and which advice; what defaults and shorthands mean."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeagent.config import Config, load_file, load_text, parse_size_mib, to_plain
from edgeagent.errors import ConfigError


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(text, "agent.yaml")
    return caught.value.problems


REFUSED = {
    "unknown key, close one named": ("sharing:\n  bindin: late", "agent.yaml:2: sharing.bindin: unknown key (did you mean binding?)"),
    "unknown key, known ones listed": ("node:\n  zzz: 1", "agent.yaml:2: node.zzz: unknown key (known here: name, site)"),
    "unit zero": ("sharing:\n  memoryUnitMiB: 0", "agent.yaml:2: sharing.memoryUnitMiB: 0 is out of range: must be between 1 and 65536"),
    "unit negative": ("sharing: {memoryUnitMiB: -64}", "agent.yaml:1: sharing.memoryUnitMiB: -64 is out of range"),
    "unit as a size": ("sharing:\n  reserveMiB: 2GiB", "agent.yaml:2: sharing.reserveMiB: '2GiB': the unit is in the key's name; write 2048"),
    "unit as a decimal size": ("sharing: {reserveMiB: 2GB}", "must be a plain number, not '2GB'"),
    "seconds with a unit": ("gpus: {pollSeconds: 5s}", "agent.yaml:1: gpus.pollSeconds: must be a plain number, not '5s'"),
    "unknown mode": ("sharing:\n  mode: sharedd", "'sharedd' must be one of shared, exclusive, timeslice, mig, off (did you mean shared?)"),
    "tab": ("sharing:\n\tmode: shared", "agent.yaml:2: tab in the indentation: use spaces"),
    "duplicate key": ("sharing:\n  mode: shared\n  mode: 'off'", "agent.yaml:3: sharing.mode: given twice (first in line 2)"),
    "duplicate section": ("node: {}\nnode: {}", "agent.yaml:2: node: given twice (first in line 1)"),
    "duplicate key in a free mapping": ("health:\n  xidClasses: {'79': fatal, '79': app}", "health.xidClasses.79: given twice"),
    "not YAML": ("a: [", "agent.yaml:1: not valid YAML"),
    "a list": ("- a", "agent.yaml:1: must be a mapping, not a list"),
    "a word": ("hello", "agent.yaml:1: must be a mapping, not 'hello'"),
    "list for a number": ("gpus: {pollSeconds: [5]}", "gpus.pollSeconds: must be a number, not a list"),
    "fraction for a whole number": ("sharing: {maxSharesPerGpu: 1.5}", "must be a whole number, not '1.5'"),
    "not a number": ("gpus: {pollSeconds: .nan}", "gpus.pollSeconds: must be finite"),
    "infinite": ("gpus: {pollSeconds: .inf}", "gpus.pollSeconds: must be finite"),
    "text for a switch": ("sharing: {timeSlicing: {renameByDefault: maybe}}", "must be true or false, not 'maybe'"),
    "upper case site": ("node: {site: Berlin}", "agent.yaml:1: node: site: 'Berlin' must be 1 to 63 of [a-z0-9-]"),
    "relative root": ("hostRoot: host", "hostRoot: 'host' does not have the right form: must be an absolute path"),
    "port alone": ("metrics: {listen: 9435}", "metrics.listen: '9435' does not have the right form: must be ADDRESS:PORT, for example"),
    "isolation that is for one axis": ("isolation: nvml-cgroup", "agent.yaml:1: isolation.compute: 'nvml-cgroup' must be one of auto, none, mps"),
    "uplink without broker": ("fleet: {enabled: true}", "fleet: brokers: at least one is needed when enabled"),
    "broker without scheme": ("fleet: {brokers: ['broker:1883']}", "'broker:1883' is not mqtt://HOST[:PORT]"),
    "broker with a password": ("fleet: {brokers: ['mqtt://me:secret@b']}", "is not mqtt://HOST[:PORT]"),
    "certificate without key": ("fleet: {tls: {certFile: /c}}", "certFile and keyFile go together"),
    "expiry below will delay": ("fleet: {willDelaySeconds: 4000}", "sessionExpirySeconds must be longer"),
    "custom without prefix": ("sharing: {names: custom}", "prefix: needed with names: custom"),
    "reserved prefix": ("sharing: {prefix: x.kubernetes.io}", "reserved by Kubernetes"),
    "rule without match": ("sharing: {gpus: [{mode: 'off'}]}", "sharing.gpus[0].match: exactly one of uuid, index, model"),
    "XID class": ("health: {xidClasses: {'13': bad}}", "'bad' must be app, degraded, fatal or unknown"),
    "XID number": ("health: {xidClasses: {x: app}}", "xidClasses.x: not an XID number"),
    "timeslice without replicas": ("sharing: {mode: timeslice}", "mode: timeslice needs replicas"),
    "timeslice rule without replicas": ("sharing: {gpus: [{match: {index: 1}, mode: timeslice}]}", "gpus[0]: mode: timeslice needs replicas"),
    "prefix that would do nothing": ("sharing: {prefix: gpu.example.com}", "prefix: needs names: custom (names is volcano)"),
    "replicas of one": ("sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}", "1 is out of range"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_line_and_advice(text: str, expected: str) -> None:
    """Each bad input is one problem that names file, line and key, and says what would be right."""
    found = problems(text)
    assert len(found) == 1
    assert expected in found[0]


def test_all_problems_at_once() -> None:
    """Three mistakes in three sections are three problems, in the order of the file."""
    found = problems("node: {site: A}\nsharing: {placement: x}\ngpus: {pollSeconds: 0}")
    assert [p.split(": ")[1] for p in found] == ["node", "sharing.placement", "gpus.pollSeconds"]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "{}", "sharing:\n", "sharing:\n  mode:\n"])
def test_empty_means_defaults(text: str) -> None:
    assert load_text(text) == Config()


def test_bare_off_is_the_mode_not_a_boolean() -> None:
    """YAML 1.1 reads a bare `off` as false; for a mode the word is meant."""
    assert load_text("sharing: {mode: off}").sharing.mode == "off"


@pytest.mark.parametrize(("text", "both"), [("auto", "auto"), ("none", "none")])
def test_isolation_scalar_sets_both_axes(text: str, both: str) -> None:
    isolation = load_text(f"isolation: {text}").isolation
    assert (isolation.memory, isolation.compute) == (both, both)


def test_pasted_time_slicing_block_is_accepted() -> None:
    """The block from NVIDIA's plugin documentation works as it is."""
    config = load_text(
        """
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 10
      devices: all
"""
    )
    block = config.sharing.time_slicing
    assert block is not None
    assert block.rename_by_default
    assert block.fail_requests_greater_than_one
    assert [(r.name, r.replicas) for r in block.resources] == [("nvidia.com/gpu", 10)]


def test_plain_form_loads_again_to_the_same() -> None:
    """What `to_plain` shows is a valid file with the same meaning."""
    config = load_text(
        "sharing: {memoryUnitMiB: 64, gpus: [{match: {index: 1}, mode: 'off'}]}\nhostRoot: /host"
    )
    assert load_text(yaml.safe_dump(to_plain(config))) == config


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    for content, expected in (
        (None, "cannot read"),
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (1 << 20) + b"#", "larger"),
    ):
        path = tmp_path / "agent.yaml"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=expected):
            load_file(path)


@pytest.mark.parametrize(
    ("text", "mib"), [("8GiB", 8192), ("8Gi", 8192), (" 500 MiB ", 500), ("8GB", None), ("8", None)]
)
def test_sizes(text: str, mib: int | None) -> None:
    assert parse_size_mib(text) == mib


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(load_text(text), Config)
    except ConfigError as e:
        assert all(p.startswith("config") for p in e.problems)


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12))
_TREES = st.recursive(
    _LEAVES,
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(Config)] + ["hostRoot", "x"]),
        _TREES
        | st.dictionaries(
            st.sampled_from(
                ["pollSeconds", "mode", "memoryUnitMiB", "gpus", "brokers", "tls", "enabled", "timeSlicing"]
            ),
            _TREES,
        ),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_shape_is_a_config_or_a_config_error(tree: dict[str, typing.Any]) -> None:
    """Right YAML of the wrong shape is refused, never a traceback."""
    try:
        load_text(yaml.safe_dump(tree))
    except ConfigError as e:
        assert e.problems
