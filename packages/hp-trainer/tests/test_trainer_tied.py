"""One embedding at both ends of the model, wherever the ends are."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hp_base.signals import StopFlag
from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_trainer.config.options import resolve
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.layout.mesh import build_mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.model import TransformerStage
from hp_trainer.model.layers import Linear
from hp_trainer.model.parallelize import Pipeline, build_pipeline
from hp_trainer.training.startup import prepare_data
from hp_trainer.training.trainer import Trainer

_TABLE = "embedding.weight"
_TIMEOUT = timedelta(seconds=30)
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"mesh.dp_shard": 2, "pipeline.schedule": "1f1b"},
    "apart": {"mesh.pp": 2, "pipeline.schedule": "1f1b"},
    "there and back": {"mesh.pp": 2, "pipeline.schedule": "zbv", "pipeline.stages_per_rank": 2},
    "sharded by stage": {"mesh.dp_shard": 2, "pipeline.stages_per_rank": 2},
}


def _names(pipeline: Pipeline) -> list[str]:
    """Where this rank's stages have the tensor that the optimizer updates."""
    table = next((p for p in pipeline.parameters if p.name == _TABLE), None)
    return [
        f"{index}: {name}"
        for index, stage in pipeline.modules.items()
        for name, parameter in stage.named_parameters(remove_duplicate=False)
        if table is not None and parameter is table.tensor
    ]


def linears(pipeline: Pipeline) -> list[Linear]:
    stages = pipeline.modules.values()
    return [part for stage in stages for part in stage.modules() if isinstance(part, Linear)]


def _build(address: str) -> dict[str, dict[str, Any]]:
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    found: dict[str, dict[str, Any]] = {}
    for name, keys in LAYOUTS.items():
        given = {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.ep": 1, "pipeline.stages_per_rank": 1}
        given |= {"model.tie_embeddings": True, "model.num_experts": 0} | keys
        config = resolve("quickstart", given.items(), env={}).config
        mesh = build_mesh(Layout.of(config.mesh), runtime, timeout=_TIMEOUT)
        # Only axes of one rank share a group: nothing is ever sent there.
        alone = {id(group) for group in mesh.groups.values() if group.size() == 1}
        others = [id(group) for group in mesh.groups.values() if group.size() > 1]
        assert len(alone) == 1
        assert len({*others, *alone}) == len(others) + 1
        pipeline = build_pipeline(config, mesh, runtime, vocab_size=33, timeout=_TIMEOUT)
        tables = [p for p in pipeline.parameters if p.name == _TABLE]
        for table in tables:
            table.local.add_(1.0)
            table.update_tied_copies()
        stages = [s for s in pipeline.modules.values() if isinstance(s, TransformerStage)]
        assert len(stages) == len(pipeline.modules)
        held = [s.embedding.weight for s in stages if s.embedding is not None]
        parts = [(w.to_local() if isinstance(w, DTensor) else w).detach().clone() for w in held]
        found[name] = {
            "places": _names(pipeline),
            "tables": len(tables),
            "twins": sum(len(table.tied_copies) for table in tables),
            "peers": [0 if t.tied_ranks is None else t.tied_ranks.size() for t in tables],
            "sharded": [isinstance(weight, DTensor) for weight in held],
            "parts": parts,
            "memory": [weight.data_ptr() for weight in held if not isinstance(weight, DTensor)],
            "split": {part.is_split for part in linears(pipeline)},
            "outputs": [s.output for s in stages if s.output is not None],
        }
    shutdown()
    return found


def test_both_ends_have_one_table(tmp_path: Path) -> None:
    ranks = run_distributed(_build, f"file://{tmp_path}/meeting", world_size=2, timeout=120)
    first, second = ranks
    assert all(rank[name]["outputs"] == [] for rank in ranks for name in LAYOUTS)
    # One stage: one parameter in one place, which FSDP shards once.
    for rank in ranks:
        one = rank["sharded"]
        assert one["places"] == [f"0: {_TABLE}"]
        assert (one["twins"], one["peers"], one["sharded"]) == (0, [0], [True])
    # Only a schedule that puts weight gradients off pays for layers that can.
    assert [first[name]["split"] for name in LAYOUTS] == [{False}, {False}, {True}, {False}]
    # Two ranks: a copy each, equal, and a group of the two.
    for rank, place in zip(ranks, (0, 1), strict=True):
        assert rank["apart"]["places"] == [f"{place}: {_TABLE}"]
        assert rank["apart"]["peers"] == [2]
    assert torch.equal(first["apart"]["parts"][0], second["apart"]["parts"][0])
    # There and back: the same memory, a gradient of each stage, and nobody to sum with.
    assert first["there and back"]["places"] == [f"0: {_TABLE}"]
    assert first["there and back"]["twins"] == 1
    assert len(set(first["there and back"]["memory"])) == 1
    assert torch.equal(*first["there and back"]["parts"])
    assert first["there and back"]["peers"] == [0]
    assert second["there and back"]["tables"] == 0
    # Two FSDP units of one rank: one is updated, the other follows.
    for rank in ranks:
        both = rank["sharded by stage"]
        assert (both["tables"], both["twins"], both["peers"]) == (1, 1, [0])
        assert both["sharded"] == [True, True]
        assert torch.equal(*both["parts"])


def _resumed(folder: Path, address: str) -> list[bool]:
    """Whether the table's copies of a rank are equal: at the start, after a step, after a load."""
    info = RankInfo.from_env()
    assert info is not None
    given: dict[str, Any] = {"mesh.pp": 1, "mesh.dp_replicate": 1, "mesh.ep": 1}
    given |= {"model.tie_embeddings": True, "model.num_experts": 0, "data.seq_len": 12}
    given |= LAYOUTS["sharded by stage"] | {"data.paths": [str(folder / "text.txt")]}
    given |= {"launch.device": "cpu", "train.async_save": False, "train.learning_rate": 1e-1}
    config = resolve("quickstart", given.items(), env={}).config
    heartbeats = Heartbeats.create(folder / f"heartbeats-{info.rank}", num_ranks=2)
    worker = Worker(info, folder / "run", heartbeats, StopFlag())
    runtime = initialize(info, device_type="cpu", init_method=address)
    tokenizer = prepare_data(config, worker, runtime)
    found: list[bool] = []
    for is_first in (True, False):
        trainer = Trainer(config, worker, runtime, tokenizer)
        if is_first:
            trainer.train_step()
            trainer.save()
        else:
            trainer.resume()
        stages = [s for s in trainer.pipeline.modules.values() if isinstance(s, TransformerStage)]
        tables = [s.embedding.weight for s in stages if s.embedding is not None]
        one, other = [w.to_local() for w in tables if isinstance(w, DTensor)]
        found.append(torch.equal(one, other))
        trainer.pipeline.close()
    shutdown()
    return found


def test_copies_follow_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("some words in a row\\n" * 400)
    address = f"file://{tmp_path}/meeting"
    assert run_distributed(_resumed, tmp_path, address, world_size=2) == [[True, True]] * 2
