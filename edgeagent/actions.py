"""What operators may ask of the agent over MQTT, in the terms of the agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgeagent import logs
from edgeagent.config import to_plain
from edgeagent.config.diff import config_hash
from edgeagent.config.overlay import overlaid
from edgeagent.errors import ConfigError, ControlError
from edgeagent.snapshot_json import to_json

if TYPE_CHECKING:
    from edgeagent.agent import Agent

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # the answer to a restart is sent before the restart
LEVELS = ("debug", "info", "warning", "error")


class AgentActions:
    """fleet.commands.CommandActions for an Agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._restarting = False

    def snapshot(self) -> Mapping[str, Any]:
        return to_json(self._agent.snapshot())

    def set_log_level(self, level: str, dry_run: bool) -> Mapping[str, Any]:
        if level not in LEVELS:
            raise ControlError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
        if not dry_run:
            log.info("log level set from the fleet level=%s", level)
            logs.set_level(level)
        return {"level": level}

    def cordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]:
        return self._cordon(uuid, True, dry_run)

    def uncordon_gpu(self, uuid: str, dry_run: bool) -> Mapping[str, Any]:
        return self._cordon(uuid, False, dry_run)

    def _cordon(self, gpu: str, cordoned: bool, dry_run: bool) -> Mapping[str, Any]:
        uuid = self._agent.gpu_uuid(gpu)
        if not dry_run:
            self._agent.cordon(uuid, cordoned)
        return {"gpu": uuid, "cordoned": cordoned}

    def drain_gpu(self, uuid: str, grace_s: float, dry_run: bool) -> Mapping[str, Any]:
        """Cordons the GPU and has the API server end its pods after `grace_s`."""
        uuid = self._agent.gpu_uuid(uuid)
        snapshot = self._agent.snapshot()
        pods = {c.pod_uid: c.pod_label for c in snapshot.containers if c.gpu_uuid == uuid}
        if not dry_run:
            self._agent.cordon(uuid, True)
            timer = threading.Timer(grace_s, self._evict_all, (tuple(pods), uuid))
            timer.name, timer.daemon = "drain-gpu", True
            timer.start()
        return {"gpu": uuid, "cordoned": True, "pods": sorted(pods.values()), "graceSeconds": grace_s}

    def _evict_all(self, pod_uids: tuple[str, ...], uuid: str) -> None:
        gpus = self._agent.snapshot().gpus
        if not any(g.gpu.uuid == uuid and g.cordoned for g in gpus):
            log.info("drain given up, the GPU was uncordoned meanwhile gpu=%s", uuid)
            return
        for pod_uid in pod_uids:
            self._agent.notices.evict(pod_uid, "GpuDrained", f"GPU {uuid} is being drained by an operator")

    def config_hash(self) -> str:
        return config_hash(self._agent.config)

    def sharing(self) -> Mapping[str, Any]:
        plain: Mapping[str, Any] = to_plain(self._agent.config.sharing)
        return plain

    def set_sharing(self, sharing: Mapping[str, Any], dry_run: bool) -> Mapping[str, Any]:
        """Most of sharing needs a restart: what is wanted is kept, and the agent begins anew with it."""
        wanted = overlaid(self._agent.config, {"sharing": sharing}, "set-sharing")
        if wanted.sharing.memory_unit_mib != self._agent.config.sharing.memory_unit_mib:
            holders = self._agent.snapshot().containers
            if holders:
                raise ConfigError("memoryUnitMiB cannot change while containers hold shares")
        if not dry_run:
            self._agent.keep_sharing(to_plain(wanted.sharing))
            self._restart_soon("sharing was set from the fleet")
        return {"configHash": config_hash(wanted)}

    def ready(self) -> bool:
        # Until the restart that new settings wait for, the old ones are ready: that proves nothing.
        return self._agent.kubelet.connected and not self._restarting

    def restart_agent(self, dry_run: bool) -> Mapping[str, Any]:
        if not dry_run:
            self._restart_soon("asked for by the fleet")
        return {"restarting": not dry_run}

    def _restart_soon(self, reason: str) -> None:
        self._restarting = True
        timer = threading.Timer(ANSWER_S, self._agent.restart, (reason,))
        timer.name, timer.daemon = "restart-soon", True
        timer.start()

    def collect_diagnostics(self, dry_run: bool) -> Mapping[str, Any]:
        from edgeagent.diagnostics import collect

        if dry_run:
            return {"path": None}
        return {
            "path": str(
                collect(self._agent.diagnostics_dir, self._agent.config, to_json(self._agent.snapshot()))
            )
        }
