"""`hp verify` finds every bug of a table and names the quantity that is wrong; nothing else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hp_train.verify.program import Program
from hp_train.verify.runs import Runs
from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, one_process, resolve
from integration_tests.jobs.verify_faults import (
    CONTEXT,
    FAULTS,
    LAYOUTS,
    MATRIX,
    PIPELINE,
    SHARDED,
    TENSOR,
)

ROOT = Path(__file__).parents[1]
PROGRAM = Program(steps=8)
SHORT = Program(steps=2)
"""The same without a step that is skipped; of bugs that the first step shows as well."""
GATHERED = Program(steps=6) if os.environ.get("HP_WHOLE") == "1" else SHORT
"""Of layouts that are sound, whose bugs the others show: with HP_WHOLE all that happens in eight
steps."""
SMALL = {
    "model.dim": 16,
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.num_experts": 4,
    "model.dense_hidden": 16,
    "model.router_score": "sigmoid",
    "model.correction_bias": True,
    "train.global_batch_size": 4,
    "train.microbatch_size": 2,
    "train.eval_batches": 1,
}


def config_of(corpus: str, layout: str, *, fault: str = "", program: Program = PROGRAM) -> Config:
    overrides = {**SMALL, "data.paths": [corpus], "run.name": fault}
    overrides |= {key: value for key, _, value in (o.partition("=") for o in layout.split())}
    config = resolve(str(ROOT / "verify.toml"), overrides.items(), env={}).config
    return program.applied_to(checked_config(config, dtype="float64"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents so short that most sequences have several."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}+{i * i}"}) + "\n" for i in range(400)))
    return str(path)


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All of them share one run of one process, and the server that ranks are forked from."""
    return Runs(
        tmp_path_factory.mktemp("runs"),
        base=config_of(corpus, ""),
        program=PROGRAM,
        job=JOB,
    )


@pytest.fixture(scope="module")
def short_runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same of `SHORT`."""
    base = config_of(corpus, "", program=SHORT)
    return Runs(tmp_path_factory.mktemp("short"), base=base, program=SHORT, job=JOB)


@pytest.fixture(scope="module")
def gathered_runs(corpus: str, short_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same of `GATHERED`."""
    if GATHERED is SHORT:
        return short_runs
    base = config_of(corpus, "", program=GATHERED)
    return Runs(tmp_path_factory.mktemp("gathered"), base=base, program=GATHERED, job=JOB)


JOB = "integration_tests.jobs.verify_faults:build"
ONE = "train.microbatch_size=1"
HYBRID = f"{SHARDED} mesh.dp_replicate=2 {ONE}"
BY_FSDP = {
    "block": f"{SHARDED} mesh.gather=block",
    "block, pipeline": f"{SHARDED} {PIPELINE} mesh.gather=block pipeline.schedule=1f1b "
    "train.recompute=full",
    "block, cut": f"{TENSOR} {CONTEXT} mesh.gather=block train.recompute=attention",
    "auto": f"{SHARDED} mesh.gather=auto",
    "copies, stage": f"{HYBRID} mesh.gather=stage mesh.ep=2",
    "copies, split backward": f"{HYBRID} {PIPELINE} pipeline.schedule=zero_bubble",
    "copies, tied": f"{HYBRID} mesh.gather=block model.tie_embeddings=true",
    "copies, pipeline": f"{HYBRID} {PIPELINE} mesh.gather=block train.recompute=full",
    "once": f"{SHARDED} mesh.ep=2 mesh.gather=block mesh.reduce_once=true {ONE} "
    "model.num_mtp_modules=1",
    "once, copies": f"{HYBRID} mesh.gather=block mesh.reduce_once=true",
    "once, tied ends": f"{SHARDED} {PIPELINE} mesh.gather=block mesh.reduce_once=true {ONE} "
    "pipeline.schedule=u_shape model.tie_embeddings=true",
}


@pytest.mark.sample("copies, pipeline")
@pytest.mark.parametrize("name", BY_FSDP)
def test_however_parameters_are_gathered_a_layout_is_equal(
    name: str, corpus: str, gathered_runs: Runs
) -> None:
    config = config_of(corpus, BY_FSDP[name], program=GATHERED)
    comparison = gathered_runs.compare(config, one_process(config))
    assert comparison.ok, str(comparison)
    assert comparison.num_steps == GATHERED.steps


def runs_like(config: Config, folder: Path) -> Runs:
    """Short runs of other data or another model than all tests share."""
    return Runs(folder, base=one_process(config), program=SHORT, job=JOB)


WHOLE = "data.packing=best_fit"
PACKED = {
    "pp, cp": f"{WHOLE} {PIPELINE} {CONTEXT}",
    "cp, tp": f"{WHOLE} {CONTEXT} {TENSOR}",
    "ep, recompute": f"{WHOLE} {SHARDED} mesh.ep=2 train.recompute=full",
}


@pytest.mark.sample("ep, recompute")
@pytest.mark.parametrize("name", PACKED)
def test_padding_counts_in_no_layout(name: str, corpus: str, tmp_path: Path) -> None:
    config = config_of(corpus, PACKED[name], program=SHORT)
    comparison = runs_like(config, tmp_path).compare(config, one_process(config))
    assert comparison.ok, str(comparison)
    assert comparison.num_steps == SHORT.steps


DEAL = f"{ONE} mesh.cp=2 mesh.cp_heads=1 mesh.cp_deal=true"
DEALT = {
    "gather": f"{DEAL} model.num_mtp_modules=1",
    "ring, pipeline": f"{DEAL} {PIPELINE} mesh.cp_ring=true",
    "padding, tp": f"{DEAL} {TENSOR} {WHOLE}",
    "window, experts": f"{DEAL} {SHARDED} mesh.ep=2 train.recompute=full model.sliding_window=3",
    "heads": f"{ONE} mesh.cp=4 mesh.cp_heads=2 mesh.cp_deal=true",
}


@pytest.mark.sample("ring, pipeline")
@pytest.mark.parametrize("name", DEALT)
def test_documents_that_are_dealt_out_change_no_number(
    name: str, corpus: str, tmp_path: Path
) -> None:
    config = config_of(corpus, DEALT[name], program=SHORT)
    comparison = runs_like(config, tmp_path).compare(config, one_process(config))
    assert comparison.ok, str(comparison)
    assert comparison.num_steps == SHORT.steps


@pytest.mark.sample("mesh.pp=2", "mesh.cp=2", "mesh.dp_replicate=2 mesh.ep=2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_without_a_bug_is_equal(layout: str, corpus: str, runs: Runs) -> None:
    config = config_of(corpus, layout)
    comparison = runs.compare(config, one_process(config))
    assert comparison.ok, str(comparison)
    assert comparison.num_steps == PROGRAM.steps
    assert comparison.num_values > 50_000
    # What this layout saved, and what it loaded of the other one's checkpoint.
    states = {f"{kind}.{MATRIX}" for kind in ("model", "optimizer.exp_avg")}
    assert all(states <= comparison.worst[phase].keys() for phase in ("saved", "loaded"))


@pytest.mark.sample("mesh.dp_shard=2 mesh.cp=2")
@pytest.mark.parametrize(
    "layout",
    [
        f"{TENSOR} model.tie_embeddings=true",
        f"{PIPELINE} pipeline.schedule=zero_bubble",
        f"{SHARDED} {CONTEXT}",
    ],
)
def test_a_layout_that_goes_through_logits_in_tiles_is_equal(
    layout: str, corpus: str, tmp_path: Path
) -> None:
    config = config_of(corpus, f"{layout} model.num_mtp_modules=1", program=SHORT)
    job = "integration_tests.jobs.verify_jobs:TiledLoss"
    comparison = Runs(tmp_path, base=config, program=SHORT, job=job).compare(
        config, one_process(config)
    )
    assert comparison.ok, str(comparison)
    assert not comparison.bitwise


def test_one_process_without_a_bug_equals_the_oracle(corpus: str, runs: Runs) -> None:
    comparison = runs.compare(one_process(config_of(corpus, "")), None)
    assert comparison.ok, str(comparison)


@pytest.mark.sample(
    "one_number_of_one_gradient_off_by_its_last_bit",
    "the_norm_counts_experts_twice",
    "positions_of_a_rank_begin_one_later",
    "the_balancing_loss_is_that_of_half_a_batch",
    "the_rate_is_wrong_after_warm_up",
    "norms_decay",
    "moments_that_another_layout_saved_are_not_loaded",
    "heads_are_scaled_by_the_width_of_the_model",
    "adam_has_another_beta",
)
@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_found_and_named(
    name: str, corpus: str, runs: Runs, short_runs: Runs, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    program = SHORT if fault.found.startswith("step 1,") else PROGRAM
    runs = short_runs if program is SHORT else runs
    config = config_of(corpus, fault.layout, fault=name, program=program)
    if fault.layout:
        other = config_of(corpus, fault.beside, program=program)
        runs = runs_like(other, tmp_path) if "model." in fault.layout else runs
        comparison = runs.compare(config, other if fault.beside else one_process(other))
    else:
        comparison = runs.compare(config, None)
    assert not comparison.ok
    first = str(comparison.first or comparison.flaws[0])
    assert re.match(fault.found, first), first


def test_the_table_has_every_kind_of_bug() -> None:
    """What layouts get wrong, and what all of them have in common."""
    assert sum(bool(fault.layout) for fault in FAULTS.values()) >= 30
    assert sum(not fault.layout for fault in FAULTS.values()) >= 12
