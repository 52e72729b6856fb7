"""Parameters gathered in the dtype of the computation give the bits of those that are cast then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from hp_train.verify.program import Program
from hp_train.verify.runs import Runs
from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, resolve

PROGRAM = Program(steps=4)
SMALL = {
    "model.dim": 16,
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.num_experts": 4,
    "model.dense_hidden": 16,
    "train.global_batch_size": 4,
    "train.microbatch_size": 1,
    "train.eval_batches": 1,
}
LAYOUTS = {
    "stage": "mesh.dp_shard=2",
    "block": "mesh.dp_shard=2 mesh.gather=block train.recompute=attention",
    "shards of experts": "mesh.dp_shard=4 mesh.ep=2 model.expert_bias=true",
    "cut inside experts": "mesh.dp_shard=3 model.num_experts=2 model.top_k=1 "
    "model.expert_hidden=12 train.global_batch_size=6",
    "zero bubble": "mesh.dp_shard=2 mesh.pp=2 pipeline.schedule=zero_bubble",
    "tied, ahead": "mesh.cp=2 model.tie_embeddings=true model.num_mtp_modules=1",
    "tensor": "mesh.dp_shard=2 mesh.tp=2 mesh.gather=block model.attention_bias=true",
}


def config_of(corpus: Path, layout: str) -> Config:
    given = {"data.paths": [str(corpus)], **SMALL, **dict(key.split("=") for key in layout.split())}
    config = resolve(
        str(Path(__file__).parents[1] / "verify.toml"), [*given.items()], env={}
    ).config
    return PROGRAM.applied_to(checked_config(config, dtype="bfloat16"))


@pytest.mark.sample("shards of experts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_narrow_gather_changes_no_bit(name: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{i}+{i * i}"}) + "\n" for i in range(400)))
    config = config_of(corpus, LAYOUTS[name])
    runs = Runs(
        tmp_path,
        base=config,
        program=PROGRAM,
        job="integration_tests.jobs.verify_jobs:GathersWide",
    )
    comparison = runs.compare(config, replace(config, run=replace(config.run, name="wide")))
    assert comparison.ok, str(comparison)
    assert comparison.bitwise
    assert comparison.num_values > 10_000
