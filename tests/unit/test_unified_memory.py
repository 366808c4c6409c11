"""RAM that is GPU memory too: the division always adds up and the K3s argument says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeagent.node.unified_memory import kubelet_memory


@pytest.mark.parametrize(
    ("total", "gpu", "argument", "pods"),
    [
        pytest.param(7620, 6084, "--kubelet-arg=system-reserved=memory=6852Mi", 768, id="Orin Nano 8GB"),
        pytest.param(62817, 50254, "--kubelet-arg=system-reserved=memory=51278Mi", 11539, id="AGX Orin"),
        pytest.param(3957, 2421, "--kubelet-arg=system-reserved=memory=3189Mi", 768, id="Nano"),
    ],
)
def test_default_division(total: int, gpu: int, argument: str, pods: int) -> None:
    division = kubelet_memory(total, gpu)
    assert (division.k3s_argument, division.pods_mib) == (argument, pods)


def test_sentence_says_how_much_is_promised_twice() -> None:
    division = kubelet_memory(7620, 6084)
    assert "6852Mi" in division.sentence()
    assert "nothing is promised twice" in division.sentence(768)
    assert "6752 MiB are promised twice" in division.sentence(7520)


@given(st.integers(1, 2_000_000), st.integers(0, 2_000_000))
def test_it_always_adds_up(total: int, gpu: int) -> None:
    d = kubelet_memory(total, gpu)
    assert d.gpu_mib + d.system_mib + d.pods_mib == total
    assert min(d.gpu_mib, d.system_mib, d.pods_mib) >= 0
    assert d.promised_twice_mib(d.pods_mib) == 0
