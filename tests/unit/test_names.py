"""Resource names and their collisions."""

from __future__ import annotations

import pytest

from edgeagent.sharing.names import GPU, GPU_SHARED, collisions, mig_name, resource_names, timeslice_name


@pytest.mark.parametrize(
    ("scheme", "prefix", "unit", "memory", "cores", "number"),
    [
        ("volcano", None, 1, "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "volcano.sh/vgpu-number"),
        ("volcano", None, 64, "volcano.sh/vgpu-memory-64mi", "volcano.sh/vgpu-cores", "volcano.sh/vgpu-number"),
        ("volcano", "x.y", 1, "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "volcano.sh/vgpu-number"),
        ("hami", None, 1, "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/gpu"),
        ("hami", None, 256, "nvidia.com/gpumem-256mi", "nvidia.com/gpucores", "nvidia.com/gpu"),
        ("custom", "gpu.acme.io", 1, "gpu.acme.io/vgpu-memory", "gpu.acme.io/vgpu-cores", "gpu.acme.io/vgpu-number"),
    ],
)  # fmt: skip
def test_names(scheme, prefix, unit, memory, cores, number):
    names = resource_names(scheme, prefix=prefix, unit_mib=unit)
    assert (names.memory, names.cores, names.number) == (memory, cores, number)
    assert names.memory_in_mib == memory.removesuffix(f"-{unit}mi")
    assert names.rewritten == (unit != 1)


def test_a_coarser_unit_is_told_with_what_authors_need():
    assert resource_names("hami").note is None
    assert resource_names("hami", unit_mib=64).note == (
        "nvidia.com/gpumem is offered as nvidia.com/gpumem-64mi (units of 64 MiB): manifests that write "
        "nvidia.com/gpumem need the admission policy that rewrites it"
    )


@pytest.mark.parametrize(("scheme", "prefix"), [("custom", None), ("custom", ""), ("slurm", None)])
def test_unknown_schemes(scheme, prefix):
    with pytest.raises(ValueError, match=scheme):
        resource_names(scheme, prefix=prefix)


def test_names_of_the_other_modes():
    assert timeslice_name(GPU, renamed=False) == "nvidia.com/gpu"
    assert timeslice_name(GPU, renamed=True) == GPU_SHARED == "nvidia.com/gpu.shared"
    assert mig_name("1g.5gb") == "nvidia.com/mig-1g.5gb"
    assert mig_name("1g.5gb+me") == "nvidia.com/mig-1g.5gb.me"


@pytest.mark.parametrize(
    ("scheme", "exclusive", "timeslice", "parts"),
    [
        ("volcano", [GPU], [GPU_SHARED], []),
        ("volcano", [], [GPU], []),
        (None, [GPU], [], []),
        ("hami", [], [], []),
        ("hami", [], [GPU_SHARED], []),
        ("hami", [GPU], [], ["nvidia.com/gpu cannot mean a share (names: hami) and a GPU in mode exclusive"]),
        ("hami", [], [GPU], ["mode timeslice on one node: set timeSlicing.renameByDefault: true"]),
        ("volcano", [GPU], [GPU], ["nvidia.com/gpu cannot mean a whole GPU"]),
        ("hami", [GPU], [GPU], ["mode exclusive", "mode timeslice", "a whole GPU"]),
        (None, ["nvidia.com/mig-1g.5gb"], [GPU], []),
    ],
)
def test_one_name_never_means_two_things(scheme, exclusive, timeslice, parts):
    names = resource_names(scheme) if scheme else None
    problems = collisions(names, exclusive, timeslice)
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))
