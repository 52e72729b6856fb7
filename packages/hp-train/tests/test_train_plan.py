"""Layouts by memory and time: the best of them found, and what the command says of them."""

import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from plan_layouts import enumerate_layouts

from hp_base.beside_tensors import GPU_MARGIN, Held
from hp_base.errors import ConfigError
from hp_plan import MACHINES, Machine, Spread, choose, estimate
from hp_plan.layouts.branch_and_bound import BranchAndBound, is_duplicate
from hp_plan.layouts.candidate import Candidate
from hp_plan.layouts.choose import _identity, plan_axes
from hp_plan.layouts.report import as_dict, details, name, reasons
from hp_plan.layouts.space import Axis, enumerate_meshes
from hp_plan.price.estimate import fits, planned
from hp_plan.price.prices import Prices
from hp_schedule import Precedence
from hp_train.cli import main
from hp_trainer.config import Config, rules, to_dict
from hp_trainer.config.options import resolve, split_overrides, with_keys
from hp_trainer.config.schema import fields
from hp_trainer.layout.communicators import held
from hp_trainer.layout.schedules import placement

VOCAB = 256
H100 = MACHINES["h100"]
TENSORS_ALONE = H100.with_values(**dict.fromkeys(GPU_MARGIN, 0.0))


def config_of(keys: dict[str, Any] | None = None) -> Config:
    return resolve("quickstart", (keys or {}).items(), env={}).config


@pytest.mark.parametrize("machine", [H100, MACHINES["cpu"]], ids=["h100", "cpu"])
def test_no_layout_is_faster_than_its_bounds(machine: Machine) -> None:
    config = config_of({"model.vocab_size": VOCAB})
    few = Axis("train.microbatch_size", (1, 4)), Axis("pipeline.stages_per_rank", (1, 2))
    keys = [axis.key for axis in few]
    axes = (*(axis for axis in plan_axes(config, 4) if axis.key not in keys), *few)
    for tied in (False, True):
        config = with_keys(config, {"model.tie_embeddings": tied})
        search = BranchAndBound(axes, Prices(machine, VOCAB, Spread()))
        layouts = enumerate_layouts(config, num_processes=range(4, 5), axes=(GATHER, *axes))
        for _, layout in itertools.islice(layouts, 0, None, 149):
            of_stages = placement(layout.pipeline, num_ranks=layout.mesh.pp)
            candidate = Candidate(search.prices, layout, of_stages)
            bounds = [search.bound_of_batch(layout), candidate.bound]
            by_stage = with_keys(layout, {"mesh.gather": "stage"})
            bounds += [bound for bound, _ in search._families([by_stage])]
            if layout.mesh.gather == "block":
                other = Candidate(search.prices, by_stage, of_stages)
                assert other.bound_by_block == pytest.approx(candidate.bound)
            seconds = estimate(layout, machine, vocab_size=VOCAB).seconds
            assert len(bounds) == 3
            assert all(0 < bound <= seconds * (1 + 1e-9) for bound in bounds)


GATHER = Axis("mesh.gather", ("stage", "block"))


@pytest.mark.sample("nodes of 3")
@pytest.mark.parametrize(
    "machine", [H100, H100.with_values(node_size=3)], ids=["h100", "nodes of 3"]
)
def test_layouts_come_in_the_order_of_their_times_and_none_is_left_out(machine: Machine) -> None:
    config = config_of({"train.global_batch_size": 8})
    axes = plan_axes(config, 4)
    config = with_keys(config, {"mesh.gather": "stage"})
    meshes = [mesh for _, mesh in enumerate_meshes(config, num_processes=range(4, 5), axes=axes)]
    search = BranchAndBound(axes, Prices(machine, VOCAB, Spread()))
    times, layouts = zip(*search.by_time(meshes), strict=True)
    assert list(times) == sorted(times)
    everything = enumerate_layouts(config, num_processes=range(4, 5), axes=(GATHER, *axes))
    assert set(layouts) == {layout for _, layout in everything if not is_duplicate(layout)}
    for seconds, layout in [*zip(times, layouts, strict=True)][::29]:
        found = estimate(layout, machine, vocab_size=VOCAB)
        assert seconds == pytest.approx(found.seconds, rel=1e-9)


def test_what_layouts_need_is_known_before_they_are_simulated() -> None:
    config = with_keys(config_of(), {"mesh.gather": "stage"})
    axes = plan_axes(config, 4)
    search = BranchAndBound(axes, Prices(H100, VOCAB, Spread()))
    layouts = enumerate_layouts(config, num_processes=range(4, 5), axes=axes)
    for _, layout in itertools.islice(layouts, 0, None, 61):
        plan = planned(layout, H100, vocab_size=VOCAB)
        candidate = Candidate(search.prices, layout, plan.schedule().stage_to_rank)
        peaks = Precedence(plan.schedule()).peaks
        needed = candidate.needed(peaks)
        assert needed == pytest.approx(plan.estimate().memory.total, abs=4)
        assert candidate.least_needed(peaks) <= needed
        assert 0 < search.least_bytes(layout) <= needed


@pytest.mark.sample("2 devices")
@pytest.mark.parametrize("num", [2, 4], ids="{} devices".format)
def test_the_best_layout_is_the_best_of_all(num: int) -> None:
    config = with_keys(config_of(), {"train.global_batch_size": 8})
    axes = (GATHER, *plan_axes(config, num))
    found = {
        layout: estimate(layout, H100, vocab_size=VOCAB)
        for _, layout in enumerate_layouts(config, num_processes=range(num, num + 1), axes=axes)
    }
    sizes = sorted(one.memory.total for one in found.values())
    for memory in (H100.memory, sizes[len(sizes) // 3]):  # all fit; about a third does
        machine = H100.with_values(memory=memory)
        choice = choose(config, num, machine, vocab_size=VOCAB, count=8)
        best: dict[object, float] = {}
        for layout, one in found.items():
            if fits(layout, one.memory.total, machine):
                words = _identity(layout)
                best[words] = min(one.seconds, best.get(words, one.seconds))
        least = sorted(best.values())[:8]
        assert choice.is_complete
        even = [with_keys(one.config, {"pipeline.stage_layers": ()}) for one in choice.best]
        seconds = [estimate(one, H100, vocab_size=VOCAB).seconds for one in even]
        assert sorted(seconds) == pytest.approx(least)
        assert [one.seconds for one in choice.best] == sorted(one.seconds for one in choice.best)
        assert choice.num_simulated < len(found) / 4
        for one in choice.best:
            rules.check(one.config)
            assert one.config.world_size == num


def test_the_next_best_are_found_as_well_where_ranks_share_a_core() -> None:
    """Compare with every layout, of which few are simulated."""
    config = with_keys(config_of(), {"train.global_batch_size": 4})
    machine, axes = MACHINES["cpu"].with_values(cores=1), plan_axes(config, 2)
    layouts = enumerate_layouts(config, num_processes=range(2, 3), axes=axes)
    every = [estimate(layout, machine, vocab_size=VOCAB).seconds for _, layout in layouts]
    best = choose(config, 2, machine, vocab_size=VOCAB, count=8)
    found = sorted({one.seconds for one in best.best})  # some are one schedule by two names
    assert found == pytest.approx(sorted(set(every))[: len(found)])
    assert best.is_complete
    assert best.num_simulated < len(every) / 10


def test_stages_that_take_longer_give_layers_away() -> None:
    values = {"model.num_layers": 8, "train.global_batch_size": 16, "mesh.pp": 2}
    config = with_keys(config_of(), values)
    choice = choose(config, 2, H100, vocab_size=VOCAB, count=40)
    uneven = [one for one in choice.best if one.config.pipeline.stage_layers]
    assert uneven
    for one in uneven:
        rules.check(one.config)
        even = with_keys(one.config, {"pipeline.stage_layers": ()})
        assert one.seconds < estimate(even, H100, vocab_size=VOCAB).seconds
        assert name(one).count("layers") == 1


def test_blocks_are_gathered_where_a_stage_does_not_fit() -> None:
    mesh = {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.dp_shard": 2, "mesh.ep": 1}
    pipeline = {"pipeline.schedule": "1f1b", "pipeline.stages_per_rank": 1}
    batch = {"train.global_batch_size": 2, "train.microbatch_size": 1}
    config = config_of({**mesh, **pipeline, **batch, "model.num_layers": 12})
    axes = (GATHER,)
    (_, by_stage), (_, by_block) = enumerate_layouts(config, num_processes=range(2, 3), axes=axes)
    assert (by_stage.mesh.gather, by_block.mesh.gather) == ("stage", "block")
    whole, parts = (estimate(each, H100, vocab_size=VOCAB) for each in (by_stage, by_block))
    assert parts.memory.buffers < whole.memory.buffers / 2
    sent = {t.purpose: t.bytes for t in whole.transfers}["parameters"]
    assert {t.purpose: t.bytes for t in parts.transfers}["parameters"] == 1.5 * sent
    tight = H100.with_values(memory=(parts.memory.total + whole.memory.total) / 2)
    found = {
        machine: list(BranchAndBound((), Prices(machine, VOCAB, Spread())).by_time([by_stage]))
        for machine in (H100, tight)
    }
    assert {layout for _, layout in found[H100]} == {by_stage, by_block}
    assert [layout for _, layout in found[tight]] == [by_block]
    assert "gathered by block" in name(parts)


def test_layouts_that_do_not_fit_are_told_apart() -> None:
    config = config_of()
    free = choose(config, 2, H100, vocab_size=VOCAB)
    least = 0.99 * free.best[0].memory.total
    tight = choose(config, 2, H100.with_values(memory=least), vocab_size=VOCAB)
    assert all(found.memory.total <= least for found in tight.best)
    assert tight.best[0].seconds >= free.best[0].seconds
    assert tight.too_large is not None
    assert "does not fit, by" in "\n".join(reasons(tight, H100.with_values(memory=least)))
    with pytest.raises(ConfigError, match=r"no layout of 2 processes fits: .* must be at most"):
        choose(config, 2, H100.with_values(memory=1e5), vocab_size=VOCAB)


def test_a_gpu_gives_less_than_all_of_its_memory_to_tensors() -> None:
    config = config_of({"mesh.pp": 2, "mesh.dp_replicate": 2, "mesh.ep": 2})
    found = estimate(config, H100, vocab_size=VOCAB)
    bare = estimate(config, TENSORS_ALONE, vocab_size=VOCAB).memory
    memory = found.memory
    # Default, world, dp_replicate, ep, tokens, two edges; three peers, one in exchanges of experts.
    nccl = held(config, 0, node_size=8)
    assert nccl == Held(communicators=7, peers=3)
    assert memory.context == H100.context_memory
    assert memory.communicators == 7 * H100.communicator_memory + 3 * H100.peer_memory
    assert memory.fragmentation == round(H100.fragmentation * bare.total)
    assert memory.total == bare.total + sum(
        memory.kinds[kind] for kind in ("context", "communicators", "fragmentation")
    )
    # As 79.8 of 80 GiB did, tensors that alone fill the device do not pass.
    full = H100.with_values(memory=bare.total)
    with pytest.raises(ConfigError, match="must be at most the memory of a device"):
        choose(config, 4, full, vocab_size=VOCAB, most=40)
    text = "\n".join(details(found))
    assert "context 953.67 MiB, communicators 2.62 GiB, fragmentation " in text
    assert as_dict(found)["memory"] == memory.kinds | {"total": memory.total}


def test_a_search_that_ends_early_says_so() -> None:
    config = config_of({"model.expert_hidden": 128, "model.num_shared_experts": 1})
    assert choose(config, 2, H100, vocab_size=VOCAB).is_complete
    early = choose(config, 2, TENSORS_ALONE, vocab_size=VOCAB, most=2)
    assert not early.is_complete
    assert reasons(early, H100)[0].startswith("best of the 2 most promising layouts of ")
    assert [found.seconds for found in early.best] == sorted(found.seconds for found in early.best)


def test_layouts_that_cannot_hold_what_is_under_way_are_left_out() -> None:
    # Interleaved 1F1B has more under way on the first of four ranks than V-Min, of the same sizes.
    mesh = {"mesh.pp": 4, "mesh.dp_replicate": 1, "mesh.ep": 1, "model.num_layers": 8}
    config = config_of(mesh | {"data.seq_len": 4096, "train.global_batch_size": 8})
    config = with_keys(config, {"train.microbatch_size": 1, "pipeline.stages_per_rank": 2})
    eager, thrifty = (
        with_keys(config, {"pipeline.schedule": name}) for name in ("interleaved_1f1b", "v_min")
    )
    eager_bytes, thrifty_bytes = (
        estimate(layout, H100, vocab_size=VOCAB).memory.total for layout in (eager, thrifty)
    )
    tight = H100.with_values(memory=(eager_bytes + thrifty_bytes) / 2)
    axes = (Axis("pipeline.schedule", ("interleaved_1f1b", "v_min")),)
    search = BranchAndBound(axes, Prices(tight, VOCAB, Spread()))
    assert [layout for _, layout in search.by_time([thrifty])] == [thrifty]
    assert search.smallest == eager
    assert search.num_simulated == 1


def test_a_model_that_fits_only_in_few_layouts_is_found_one() -> None:
    # 70 G parameters with their moments are 1 TiB, and most layouts keep too many activations:
    # 40 layouts are enough only if those that cannot hold what is under way are not among them.
    config = resolve(
        "llama-3.1-70b", {"data.seq_len": 8192, "train.global_batch_size": 8}.items(), env={}
    ).config
    choice = choose(config, 32, H100, vocab_size=128_256, most=40)
    assert choice.best[0].memory.total <= H100.memory


def test_reasons_name_what_the_next_layout_spends_more_on() -> None:
    choice = choose(config_of(), 4, H100, vocab_size=VOCAB, count=8)
    text = "\n".join((*reasons(choice, H100), *details(choice.best[0])))
    assert "next mesh" in text or "next schedule" in text
    assert "slower" in text
    assert "parameters" in text


def test_machines_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"flops \(0\) must be >= 1"):
        H100.with_values(flops=0)
    with pytest.raises(ValueError, match=r"latency \(nan\)"):
        H100.with_values(latency=math.nan)
    assert isinstance(H100, Machine)


def test_the_command_compares_with_the_configured_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--json", "--top", "2", "--search", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 2
    assert found["configured"]["seconds"] >= found["best"][0]["seconds"]
    assert found["configured"]["config"]["mesh.pp"] == 2
    assert found["configured"]["memory"]["parameters"] > 0


@pytest.mark.parametrize("retention", ["recompute", "offload"])
def test_layouts_that_keep_all_are_compared_with_one_that_gives_up(
    retention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--pipeline.schedule", "gpipe", "--pipeline.stages_per_rank", "1"]
    command = ["plan", "--json", "--top", "2", "--search", "0.1", *keys]
    assert main([*command, "--pipeline.retention", retention]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["configured"]["config"]["pipeline.retention"] == retention
    assert {each["config"]["pipeline.retention"] for each in found["best"]} == {"keep"}


def test_skew_of_experts_makes_the_busiest_rank_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first of two ranks gets three quarters of the rows.
    shares = tmp_path / "shares.json"
    shares.write_text(json.dumps([3, 3, 3, 3, 1, 1, 1, 1]))
    found = {}
    for skew in ("uniform", "gini=0.3", str(shares)):
        command = ["plan", "--json", "--skew", skew, "--train.dtype", "bfloat16"]
        command += ["--flops", "1e9", "--grouped-flops", "1e9"]
        assert main([*command, "--mesh.ep", "2"]) == 0
        found[skew] = json.loads(capsys.readouterr().out)["configured"]
    even, uneven, given = (found[skew]["parts"]["compute"] for skew in found)
    assert 1.02 * even < uneven
    config = config_of({"mesh.ep": 2, "train.dtype": "bfloat16"})
    machine = H100.with_values(flops=1e9, grouped_flops=1e9)
    spread = Spread(loads=((2, 1.5),))
    plan = estimate(config, machine, vocab_size=VOCAB, spread=spread)
    assert given == pytest.approx(plan.parts["compute"])
    assert found[str(shares)]["sent"]["experts"] == 1.5 * found["uniform"]["sent"]["experts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --skew gini=2", "--skew (gini=2)"),
        ("plan --gpus 0", "--gpus (0) must be at least 1"),
        ("plan --gpus 7", "no layout of 7 processes is allowed"),
        ("plan --flops -1", "--flops (-1) must be at least 0"),
        ("plan --machine h10", '--machine ("h10") must be one of a100, h100, '),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_best_layout_is_written_as_a_config_and_told_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, mine = tmp_path / "best.toml", tmp_path / "mine.toml"
    mine.write_text("[train]\nsteps = 7\nglobal_batch_size = 8\n[launch]\nnum_processes = 1\n")
    paths = [str(tmp_path / "a b"), str(tmp_path / "c")]
    for path in paths:
        Path(path).write_text("some words in a row\n" * 1000)
    given = ["--data", *paths, "--data.seq_len", "64"]
    asked = ["plan", str(mine), *given, "--machine", "cpu", "--gpus", "4", "--node-size", "4"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hp, train, *words = shlex.split(found["command"])
    assert (hp, train, words[0]) == ("hp", "train", str(mine))
    overrides, rest = split_overrides(words)
    by_flags = resolve(rest[0], overrides, env={}).config
    best, tables = found["best"][0]["config"], to_dict(by_flags)
    assert best == {key: tables[fields()[key].section][fields()[key].name] for key in best}
    assert (by_flags.train.steps, by_flags.data.paths, by_flags.world_size) == (7, (*paths,), 4)
    assert main([*asked, "--write", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {file}; to run it: hp train {file}\n")
    by_file = resolve(str(file), env={})
    assert by_file.config == by_flags
    text = file.read_text()
    assert "steps = 7  # " + str(mine) + ":2" in text
    assert "seq_len = 64  # command line" in text
    assert re.search(r"dp_shard = \d  # hp plan", text)
    assert main(["train", str(file), "--dry-run"]) == 0
    asked[asked.index("--node-size") + 1] = "3"
    assert main(asked) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("to run it, on each node: torchrun --nnodes 2 --nproc-per-node 2 ")
    assert told.endswith(" --run.name NAME")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("mine.toml", "must be another file than the config"),
        ("best.json", "must end with .toml"),
        ("none/best.toml", "No such file or directory"),
    ],
)
def test_a_layout_is_not_written_where_no_config_can_be(
    file: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("")
    asked = ["plan", str(tmp_path / "mine.toml"), "--write", str(tmp_path / file)]
    assert main(asked) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
