"""Reload: which keys change at once, which need a restart, and what the hash says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edgeagent.config import Config, load_text
from edgeagent.config.diff import changes, config_hash, with_reloadable

ROOT = Path(__file__).resolve().parents[2]


def test_each_changed_key_is_named_on_its_side() -> None:
    new = load_text("log: {level: debug}\ngpus: {pollSeconds: 1, source: nvml}\nsharing: {memoryUnitMiB: 64}")
    found = changes(Config(), new)
    assert found.reloadable == ("log.level", "gpus.pollSeconds")
    assert found.restart == ("gpus.source", "sharing.memoryUnitMiB")


def test_in_force_after_a_reload_are_only_the_reloadable_keys() -> None:
    new = load_text("log: {level: debug}\nsharing: {memoryUnitMiB: 64, placement: spread}")
    now = with_reloadable(Config(), new)
    assert (now.log.level, now.sharing.placement, now.sharing.memory_unit_mib) == ("debug", "spread", 1)
    assert changes(now, new).restart == ("sharing.memoryUnitMiB",)


def test_no_change_is_no_change() -> None:
    assert changes(Config(), load_text("node: {site: default}")) == changes(Config(), Config())
    assert config_hash(Config()) == config_hash(load_text("node: {site: default}"))
    assert config_hash(Config()) != config_hash(load_text("node: {site: other}"))


def test_the_configuration_page_is_what_the_schema_says() -> None:
    """docs/configuration.md is written by `python tools/make_config_doc.py`."""
    done = subprocess.run([sys.executable, "tools/make_config_doc.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0
