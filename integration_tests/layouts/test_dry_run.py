"""`hp dry-run`: ranks of a class run one program, all of them fit together, and what is said of it.

One process for each rank or class, without a GPU; all of it takes about a minute of CPU.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from msgspec.structs import replace

from hp_data import load_tokenizer
from hp_dry import same_program
from hp_dry.rehearsal import held_by, run_classes, summary_of
from hp_dry.script import ANSWERS
from hp_dry.trace import Collective, Trace
from hp_plan.costs.routing import parse_skew
from hp_train.cli import main
from hp_train.dry_run.answers import evenly
from hp_train.dry_run.classes import classes_of
from hp_train.dry_run.command import dry_config, fit_to
from hp_train.dry_run.made_up import write_tokens
from hp_train.dry_run.rehearsal import Job, run_rank
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.layout.communicators import held
from hp_trainer.model import model_shapes
from hp_vtp.pipeline import StageTransport

SMALL = (
    *("model.num_layers=2", "data.seq_len=32"),
    *("train.global_batch_size=4", "train.microbatch_size=1"),
)
LAYOUTS = {
    "fsdp": (),
    "replicated": ("mesh.dp_replicate=2", "mesh.ep=2"),
    "ep": ("mesh.ep=4", "train.dtype=bfloat16"),
    "skewed": ("mesh.ep=2",),
    "tp": ("mesh.tp=2", "mesh.ep=2"),
    "cp": ("mesh.cp=2", "mesh.ep=4"),
    "ring": ("mesh.cp=4", "mesh.cp_ring=true"),
    "etp": ("mesh.ep=2", "mesh.etp=2", "train.recompute=full"),
    "1f1b": ("mesh.pp=2", "mesh.ep=2", "pipeline.schedule=1f1b"),
    "zbv": (
        "mesh.pp=2",
        "pipeline.schedule=zbv",
        "pipeline.stages_per_rank=2",
        "model.num_layers=4",
    ),
    "dualpipe": (
        "mesh.pp=2",
        "mesh.ep=2",
        "pipeline.schedule=dualpipe_v",
        "pipeline.stages_per_rank=2",
        "pipeline.overlap=true",
        "model.num_layers=4",
        "train.global_batch_size=8",
    ),
    "unequal": ("mesh.pp=2", "mesh.stage_tp=[1,2]", "mesh.dp_shard=2"),
}
PROVEN_BY_FEW = ("etp", "dualpipe", "unequal")
"""Of these it is looked at that the ranks that stand for others prove the same for all."""


def reductions_of(traces: Iterable[Trace]) -> set[str]:
    """What NCCL would be asked to do with the numbers of several ranks."""
    reduced = ("all_reduce", "reduce_scatter", "reduce")
    return {
        event.detail.split(",")[0]
        for trace in traces
        for event in trace
        if isinstance(event, Collective) and event.op in reduced
    }


@pytest.mark.sample("replicated")
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_class_run_the_same_program_and_all_fit(name: str, tmp_path: Path) -> None:
    keys = dict(key.split("=", 1) for key in (*SMALL, *LAYOUTS[name]))
    resolved = resolve(
        "debug-qwen3-moe", [*keys.items()], env={}, fit=fit_to(6 if name == "unequal" else 4)
    )
    config = dry_config(resolved.config)
    skew = parse_skew("gini=0.3" if name == "skewed" else "uniform", config.model)
    write_tokens(tmp_path, load_tokenizer(""), [config.data.seq_len])
    job = Job(config=config, skew=skew, data=tmp_path, steps=1)
    everyone = {rank: (rank,) for rank in range(config.world_size)}
    run = run_classes(run_rank, job, classes=everyone, gpus_per_node=8)
    assert summary_of(run, everyone, name=name, gpus_per_node=8).problems == ()
    assert reductions_of(run.traces.values()) <= {"sum", "max"}  # never PREMUL_SUM or AVG
    classes = classes_of(config, skew, vocab_size=256)
    assert len(classes) < config.world_size or name in ("skewed", "ring")
    if name != "unequal":  # whose ranks have two threads, which take turns as it happens
        for first, ranks in classes.items():
            for rank in ranks:
                assert same_program(run.traces[first], run.traces[rank]) is None
    if name not in PROVEN_BY_FEW:
        return
    alone = run_classes(run_rank, job, classes=classes, gpus_per_node=8)
    assert summary_of(alone, classes, name=name, gpus_per_node=8).problems == ()


@pytest.mark.parametrize("fault", ["", "messages on devices at once", "modules of torch too"])
@pytest.mark.sample("messages on devices at once")
def test_no_kernel_is_loaded_while_messages_of_another_thread_wait(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        monkeypatch.setattr(StageTransport, "_goes_by_host", False)
    if fault == "modules of torch too":
        monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    keys = dict(key.split("=", 1) for key in (*SMALL, *LAYOUTS["unequal"]))
    config = dry_config(resolve("debug-qwen3-moe", [*keys.items()], env={}, fit=fit_to(6)).config)
    write_tokens(tmp_path, load_tokenizer(""), [config.data.seq_len])
    skew = parse_skew("uniform", config.model)
    classes = classes_of(config, skew, vocab_size=256)
    job = Job(config=config, skew=skew, data=tmp_path, steps=2)
    run = run_classes(run_rank, job, classes=classes, gpus_per_node=8)
    found = summary_of(run, classes, name="unequal", gpus_per_node=8).problems
    assert bool(found) == bool(fault)
    for line in found:
        assert "module load: rank " in line
        assert re.search(
            r" may wait for ever: .* is launched first, and so loaded, at \S+:\d+", line
        )
    names = {re.split(r" may wait for ever: ", line)[1].split(" ")[0] for line in found}
    ours = {name for name in names if name.startswith("hp_expert.")}
    assert (ours == names) == (fault != "modules of torch too")


def test_how_ranks_gather_is_decided_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where nothing is known yet
    keys = dict(key.split("=", 1) for key in (*SMALL, "mesh.gather=stage", "model.num_experts=4"))
    config = dry_config(resolve("debug-qwen3-moe", [*keys.items()], env={}, fit=fit_to(2)).config)
    data = tmp_path / "data"
    data.mkdir()
    write_tokens(data, load_tokenizer(""), [config.data.seq_len])
    skew = parse_skew("uniform", config.model)
    decided = dry_config(with_keys(config, {"mesh.gather": "auto"}))
    assert decided.mesh.gather in ("block", "stage")
    job = Job(config=decided, skew=skew, data=data, steps=1)
    everyone = classes_of(config, skew, vocab_size=256)
    run = run_classes(run_rank, job, classes=everyone, gpus_per_node=8)
    found = summary_of(run, everyone, name="decided", gpus_per_node=8)
    assert found.problems == ()
    assert found.layout.endswith(f"gathered by {decided.mesh.gather}")


def test_the_command_says_and_draws_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, curve = tmp_path / "page.html", tmp_path / "curve.svg"
    skews = ("--skew", "uniform", "--skew", "gini=0.5")
    keys = ("mesh.ep=2", *SMALL)
    files = ("--html", str(page), "--svg", str(curve), "--traces", str(tmp_path / "traces"))
    command = ["dry-run", "debug-qwen3-moe", "--gpus", "2", "--json", *skews, *files, *keys]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert [*found["beside"]] == ["context", "communicators", "peer buffers"]
    assert (found["communicators"], found["peers"]) == (5, 1)
    assert found["world_size"] == 2
    assert {rank["skew"] for rank in found["ranks"]} == {"uniform", "gini=0.5"}
    assert found["ranks"][0]["saved"]["file"] == "rank-00000.safetensors"
    assert page.read_text().lower().startswith("<!doctype html")
    assert curve.read_text().startswith("<svg")
    assert len(list((tmp_path / "traces").iterdir())) == 1


@pytest.mark.parametrize("gather", ["stage", "block"])
def test_of_sharded_blocks_two_are_gathered_at_once(
    gather: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"mesh.gather": gather, "mesh.dp_shard": "2", "pipeline.schedule": "1f1b"}
    settings |= {"model.num_layers": "6", "model.dim": "64"}
    settings |= {"train.global_batch_size": "4", "train.microbatch_size": "1"}
    keys = [f"{key}={value}" for key, value in settings.items()]
    assert main(["dry-run", "debug-llama3", "--json", *keys]) == 0
    memory = json.loads(capsys.readouterr().out)["ranks"][0]["memory"]
    model = resolve("debug-llama3", [*settings.items()], env={}).config.model
    sizes: Counter[str] = Counter()
    for name, shape in model_shapes(replace(model, vocab_size=256)).items():
        in_block = name.startswith("layers.")
        sizes[".".join(name.split(".")[:2]) if in_block else ""] += math.prod(shape)
    whole, block = sum(sizes.values()), sizes["layers.1"]
    assert "backward" in memory["peak"]["place"]
    # The output matrix is gone when the first block runs, and the embedding is not there at all.
    norm = replace(model, vocab_size=256).dim
    expected = whole if gather == "stage" else norm + 2 * block
    assert memory["at_peak"]["gathered parameters"] == pytest.approx(4 * expected, rel=0.01)


def gathered_bytes(
    *keys: str, capsys: pytest.CaptureFixture[str], of: str = "fsdp"
) -> tuple[str, Counter[str]]:
    """The layout of a dry run of `debug-llama3`, and the bytes of what the ranks of a group do."""
    small = {"mesh.dp_shard": "2", "pipeline.schedule": "1f1b", "train.microbatch_size": "1"}
    small |= {"model.num_layers": "6", "model.dim": "64", "train.global_batch_size": "2"}
    small |= dict(key.split("=") for key in keys)
    command = ["dry-run", "debug-llama3", "--json", "--steps", "1"]
    assert main([*command, *map("=".join, small.items())]) == 0
    found = json.loads(capsys.readouterr().out)
    bytes_of: Counter[str] = Counter()
    for communicator in found["ranks"][0]["traffic"]["communicators"]:
        if communicator["name"].startswith(of):
            for name, done in communicator["operations"].items():
                bytes_of[name] += done["bytes"]
    return found["layout"], bytes_of


@pytest.mark.sample("stage")
@pytest.mark.parametrize("gather", ["stage", "block"])
def test_what_is_cast_is_gathered_in_half_of_the_bytes_and_reduced_in_all(
    gather: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, wide = gathered_bytes(f"mesh.gather={gather}", "train.dtype=float32", capsys=capsys)
    _, narrow = gathered_bytes(f"mesh.gather={gather}", "train.dtype=bfloat16", capsys=capsys)
    assert narrow["reduce_scatter"] == wide["reduce_scatter"]
    assert narrow["all_gather"] == pytest.approx(wide["all_gather"] / 2, rel=0.01)
    # But norms of 64 numbers, in a step: two of each of six blocks, and one in no block.
    times = 6 * (2 if gather == "stage" else 4) + 1
    assert narrow["all_gather"] - wide["all_gather"] / 2 == 2 * 64 * times


@pytest.mark.sample("block")
@pytest.mark.parametrize("gather", ["stage", "block"])
def test_sums_over_copies_of_shards_are_of_all_microbatches_and_of_a_unit_each(
    gather: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"mesh.gather={gather}", "mesh.dp_replicate=2", "train.global_batch_size=8")
    settings = {"model.num_layers": "6", "model.dim": "64"}
    model = resolve("debug-llama3", [*settings.items()], env={}).config.model
    shapes = model_shapes(replace(model, vocab_size=256)).values()
    _, bytes_of = gathered_bytes(*keys, capsys=capsys, of="dp_replicate")
    # Of half of the parameters in a step, after one number when ranks meet.
    assert bytes_of == {"all_reduce": 4 + 4 * sum(map(math.prod, shapes)) // 2}


def test_auto_gathers_by_what_fits_and_takes_less_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys: tuple[str, ...] = ("mesh.dp_shard=64", "train.dtype=bfloat16")
    keys += ("model.dim=4096", "model.num_layers=6", "model.num_heads=32")
    # Of 6 layers 5 or 20 G parameters: gathered and with gradients 28 or 112 GiB. By block they are
    # gathered while others compute, but for each microbatch anew.
    for hidden, batch, how in ((2**16, 128, "stage"), (2**16, 64, "block"), (2**18, 128, "block")):
        size = f"model.dense_hidden={hidden}", f"train.global_batch_size={batch}"
        layout, _ = gathered_bytes(*keys, *size, capsys=capsys)
        assert layout.endswith(f", gathered by {how}")


HELD = {
    "replicated over both nodes": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.ep=4"),
    "ring": ("mesh.cp=4", "mesh.cp_ring=true"),
    "hybrid": ("mesh.cp=4", "mesh.cp_heads=2"),
    "etp": ("mesh.ep=2", "mesh.etp=2"),
    "tied": ("mesh.pp=3", "pipeline.schedule=1f1b", "model.tie_embeddings=true"),
    "dense at first": ("mesh.pp=2", "mesh.ep=2", "model.num_dense_layers=2"),
    "unequal": ("mesh.pp=2", "mesh.stage_tp=[1,2]"),
    "u_shape": ("mesh.pp=2", "mesh.tp=2", "pipeline.schedule=u_shape"),
}


@pytest.mark.sample("etp")
@pytest.mark.parametrize("name", HELD)
def test_the_plan_counts_what_ranks_hold_of_nccl(name: str, tmp_path: Path) -> None:
    keys = dict(key.split("=", 1) for key in (*SMALL, "model.num_layers=3", *HELD[name]))
    gpus = 3 if name in ("tied", "unequal") else 4
    resolved = resolve("debug-qwen3-moe", [*keys.items()], env={}, fit=fit_to(gpus))
    config = dry_config(resolved.config)
    write_tokens(tmp_path, load_tokenizer(""), [config.data.seq_len])
    # Two steps: in the first, messages of unequal stages go through the hosts.
    job = Job(config=config, skew=parse_skew("uniform", config.model), data=tmp_path, steps=2)
    ranks = range(config.world_size)
    run = run_classes(run_rank, job, classes={rank: (rank,) for rank in ranks}, gpus_per_node=2)
    for node_size in (2, 8):
        planned = [held(config, rank, node_size=node_size) for rank in ranks]
        assert planned == [held_by(run.traces[rank], node_size=node_size) for rank in ranks]


def test_a_script_is_run_by_hp_dry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "--gpus", "2", "--", "train.py"]) == 2
    assert "hp-dry [FLAGS] -- SCRIPT runs a script" in capsys.readouterr().err


def test_experts_of_a_script_get_as_much_as_each_other() -> None:
    [each] = entry_points(group=ANSWERS)
    assert each.load() is evenly
