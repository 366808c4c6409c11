"""Whatever happens to the cards, in whatever order: what the NVML back end says stays true."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeagent.gpus.model import GpuFault, Inventory
from edgeagent.gpus.nvml import NvmlBackend
from edgeagent.hostroot import HostRoot
from tests.fakes.nvml import FakeNvml
from tests.fakes.nvml import host as hosts

CARDS = 3
PICK = st.integers(0, CARDS - 1)
# What the library as a whole may answer, and the fault that it means for every card.
LIBRARY = {
    18: GpuFault.DRIVER_MISMATCH,
    9: GpuFault.DRIVER_NOT_LOADED,
    1: GpuFault.FAILED,
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cards(RuleBasedStateMachine):
    """The model: which cards are plugged in, which of them are lost, and what the library answers."""

    @initialize(enumerate_=st.sampled_from(["init", "live"]), old_driver=st.booleans())
    def start(self, enumerate_: str, old_driver: bool) -> None:
        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        self.fake = FakeNvml(root / "nvml", enumerate=enumerate_, old_driver=old_driver)
        self.uuids = [self.fake.add("l4") for _ in range(CARDS)]
        self.root = root / "host"
        hosts.nvidia_host(self.root, self.fake)
        self.clock = Clock()
        self.backend = NvmlBackend(
            HostRoot(self.root), str(self.fake.library_path), call_timeout_s=2.0, clock=self.clock
        )
        self.plugged = set(self.uuids)
        self.lost: set[str] = set()
        self.library: int | None = None
        self.known_gone: set[str] = set()  # what the back end has noticed and not yet found anew
        self.found = self.backend.inventory()

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()
            self.directory.cleanup()

    def alive(self, uuid: str) -> bool:
        return uuid in self.plugged and uuid not in self.lost and self.library is None

    @rule(n=PICK, code=st.sampled_from([15, 16]))
    def lose(self, n: int, code: int) -> None:
        self.fake.lose(self.uuids[n], code)
        self.lost.add(self.uuids[n])

    @rule(n=PICK)
    def recover(self, n: int) -> None:
        self.fake.recover(self.uuids[n])
        self.lost.discard(self.uuids[n])

    @rule(n=PICK)
    def unplug(self, n: int) -> None:
        self.fake.remove(self.uuids[n])
        hosts.nvidia_host(self.root, self.fake)
        self.plugged.discard(self.uuids[n])

    @rule(n=PICK)
    def plug(self, n: int) -> None:
        self.fake.insert(self.uuids[n])
        hosts.nvidia_host(self.root, self.fake)
        self.plugged.add(self.uuids[n])

    @rule(order=st.permutations(range(CARDS)))
    def renumber(self, order: list[int]) -> None:
        self.fake.order(*(self.uuids[n] for n in order))
        hosts.nvidia_host(self.root, self.fake)

    @rule(code=st.sampled_from([None, *LIBRARY]))
    def library_answers(self, code: int | None) -> None:
        self.fake.all_calls(code)
        self.library = code

    @rule(seconds=st.sampled_from([1, 5, 400]))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def wait(self) -> None:
        self.backend.wait_event(0.0)

    @rule(n=PICK)
    def read(self, n: int) -> None:
        uuid = self.uuids[n]
        mark = self.fake.mark()
        reading = self.backend.read(uuid)
        calls = self.fake.calls(mark)
        if uuid in self.known_gone:
            assert reading.fault is not None
            assert calls == []  # a GPU known to be gone is not touched
        elif reading.fault is not None:
            self.known_gone.add(uuid)
        if reading.fault is None:
            assert self.alive(uuid)
            assert reading.temperature_c == 40
        elif calls and self.library is not None:
            assert reading.fault is LIBRARY[self.library]

    @rule()
    def look(self) -> None:
        self.clock.now += 301  # past any pause between two tries
        self.found = self.backend.inventory()
        alive = {u for u in self.uuids if self.alive(u)}
        assert {g.uuid for g in self.found.gpus} == alive
        self.known_gone = set(self.uuids) - alive
        for uuid in self.uuids:
            assert (self.backend.read(uuid).fault is None) == (uuid in alive)
        if self.library is not None:
            assert self.found.fault is LIBRARY[self.library]
        assert (self.found.problem is None) == bool(alive)

    @precondition(lambda self: self.library is None)
    @rule()
    def looking_twice_is_the_same(self) -> None:
        self.look()
        again = self.backend.inventory()
        assert again.gpus == self.found.gpus

    @invariant()
    def no_stale_handle_is_used(self) -> None:
        if hasattr(self, "fake"):
            assert [c for c in self.fake.calls() if c.mark == "stale"] == []

    @invariant()
    def inventories_explain_themselves(self) -> None:
        found: Inventory | None = getattr(self, "found", None)
        if found is not None:
            assert found.evidence
            assert bool(found.gpus) == (found.problem is None)


TestCards = Cards.TestCase
TestCards.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
