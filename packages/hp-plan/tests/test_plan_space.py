"""Layouts that a config allows, and samples that cover them."""

import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest
from plan_layouts import enumerate_layouts

from hp_plan.layouts.space import AXES, Axis, sample_layouts
from hp_trainer.config import Config, rules
from hp_trainer.config.options import resolve, with_keys

# Sizes that many meshes divide.
KEYS = {
    "mesh.pp": 1,
    "mesh.dp_replicate": 1,
    "mesh.ep": 1,
    "pipeline.stages_per_rank": 1,
    "model.num_layers": 8,
    "model.num_experts": 12,
    "train.global_batch_size": 24,
    "train.microbatch_size": 3,
}

# Where all values of all axes go together, there are hundreds of thousands of layouts. Those of
# these axes go with nearly all of the others.
FREE = ("mesh.ep_buffer", "pipeline.keep_microbatches", "data.packing")
COUNTED = tuple(axis for axis in AXES if axis.key not in FREE)
LEFT_OUT = (
    *("mesh.cp", "mesh.cp_heads", "mesh.cp_deal", "mesh.etp", "mesh.stage_ep"),
    "mesh.reduce_once",
)
FEW_EACH = tuple(Axis(axis.key, axis.choices[:2]) for axis in COUNTED)
PAIRED = tuple(axis for axis in COUNTED if axis.key not in LEFT_OUT)
PAIRED_FEW = tuple(
    axis if axis.key.startswith("mesh.") else Axis(axis.key, axis.choices[:2]) for axis in PAIRED
)


@pytest.fixture(scope="module")
def config() -> Config:
    return resolve("quickstart", KEYS.items(), env={}).config


def values(config: Config, axes: Sequence[Axis] = COUNTED) -> tuple[object, ...]:
    found: list[object] = []
    for axis in axes:
        section, _, name = axis.key.partition(".")
        found.append(getattr(getattr(config, section), name))
    return tuple(found)


def pairs(config: Config, axes: Sequence[Axis] = COUNTED) -> set[object]:
    return set(itertools.combinations(enumerate(values(config, axes)), 2))


@pytest.mark.sample("few values each")
@pytest.mark.parametrize("axes", [FEW_EACH, COUNTED], ids=["few values each", "all"])
def test_every_enumerated_layout_keeps_the_rules_and_is_its_choice(
    config: Config, axes: Sequence[Axis]
) -> None:
    choices, count = set(), 0
    for choice, layout in enumerate_layouts(config, num_processes=range(2, 4), axes=axes):
        rules.check(layout)
        assert 2 <= layout.world_size <= 3
        assert values(layout) == choice
        choices.add(choice)
        count += 1
    assert len(choices) == count > 1000


def test_every_value_of_every_axis_is_drawn_and_keeps_the_rules(config: Config) -> None:
    """Whatever the config itself has of them: it is one process with microbatches of three."""
    of_mesh = ("pp", "dp_shard", "cp", "cp_heads", "cp_deal", "ep", "ep_buffer", "gather")
    keys = {f"mesh.{name}" for name in of_mesh} | {"pipeline.overlap", "train.recompute"}
    keys |= {"pipeline.retention", "pipeline.schedule", "pipeline.stages_per_rank", *FREE}
    keys |= {"train.microbatch_size"}
    axes = [axis for axis in AXES if axis.key in keys]
    axes = [Axis(a.key, (1, 2)) if a.choices[:3] == (1, 2, 3) else a for a in axes]
    layouts = sample_layouts(config, 60, num_processes=range(2, 5), axes=axes).layouts
    for layout in layouts:
        rules.check(layout)
    drawn = zip(*(values(each, axes) for each in layouts), strict=True)
    for axis, found in zip(axes, drawn, strict=True):
        assert set(found) == set(axis.choices), axis.key


def test_nothing_allowed_is_left_out(config: Config) -> None:
    axes = (Axis("mesh.pp", (1, 2)), Axis("mesh.dp_replicate", (1, 2)), Axis("pipeline.schedule"))
    found = {
        choice for choice, _ in enumerate_layouts(config, num_processes=range(1, 5), axes=axes)
    }
    expected = set()
    for choice in itertools.product(*(axis.choices for axis in axes)):
        layout = with_keys(config, {a.key: v for a, v in zip(axes, choice, strict=True)})
        try:
            rules.check(layout)
        except Exception:  # noqa: BLE001 - refused
            continue
        expected.add(choice)
    assert found == expected
    assert len(found) > 10


@pytest.mark.sample("few values each")
@pytest.mark.parametrize("axes", [PAIRED_FEW, PAIRED], ids=["few values each", "all"])
def test_a_sample_has_every_pair_of_settings_that_any_layout_has(
    config: Config, axes: Sequence[Axis]
) -> None:
    sample = sample_layouts(config, 280, axes=axes)
    assert len(sample.layouts) == len(set(map(values, sample.layouts))) == 280
    covered = set().union(*(pairs(layout) for layout in sample.layouts))
    for _, layout in enumerate_layouts(config, num_processes=range(2, 9), axes=axes):
        assert pairs(layout) <= covered, layout
    assert sample.num_covered == sample.num_pairs
    assert {layout.world_size for layout in sample.layouts} == {2, 3, 4, 6, 8}


def test_a_sample_of_a_small_pool_has_what_comes_up_seldom(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hp_plan.layouts.space._POOL_SIZE", 1000)
    named = (
        *("mesh.pp", "mesh.stage_tp", "mesh.dp_replicate", "mesh.ep"),
        *("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.overlap"),
    )
    axes = [axis for axis in AXES if axis.key in named]
    sample = sample_layouts(config, 200, axes=axes)
    covered = set().union(*(pairs(layout, axes) for layout in sample.layouts))
    for _, layout in enumerate_layouts(config, num_processes=range(2, 9), axes=axes):
        assert pairs(layout, axes) <= covered, layout


def test_a_sample_is_decided_by_its_seed_and_grows_at_its_end(config: Config) -> None:
    few, many, others = (
        sample_layouts(config, count, seed=seed, num_processes=range(2, 5), axes=FEW_EACH)
        for count, seed in ((10, 0), (30, 0), (10, 1))
    )
    assert few.layouts == many.layouts[:10]
    assert few.layouts != others.layouts
    assert few.num_covered < many.num_covered


def test_a_sample_ends_where_layouts_do(config: Config) -> None:
    axes = (Axis("mesh.dp_replicate", (1, 2, 4)),)
    sample = sample_layouts(config, 190, axes=axes)
    assert [layout.mesh.dp_replicate for layout in sample.layouts] in ([2, 4], [4, 2])
    assert sample.num_meshes == 2


def test_layouts_are_drawn_without_torch() -> None:
    code = "import sys, hp_plan.layouts.space; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
