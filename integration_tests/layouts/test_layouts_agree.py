"""Every layout computes what one process computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hp_base.signals import StopFlag
from hp_data import load_tokenizer
from hp_platform import RankInfo, initialize
from hp_platform.testing import compare, run_distributed
from hp_trainer.config import Config
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import Result, config_of, prepare_run, train_in, worker_of

RICH: dict[str, Any] = {"tie_embeddings": True, "num_mtp_modules": 2, "correction_bias": True}
"""A model whose first stage knows what the last one needs, and the other way round."""

SPARSE: dict[str, Any] = {"num_dense_layers": 3, "num_experts": 32, "top_k": 1}
"""Experts in the last layer alone, more of them than a step has tokens for."""
FEW = {"global_batch_size": 2, "microbatch_size": 1}
SMALLER = {"microbatch_size": 1}
"""Twice as many microbatches, for schedules that need four of them."""

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "pp2-ep2-interleaved": {
        "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    },
    "pp2-dp1-1f1b": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}, "model": RICH},
    "dp4-ep2": {"mesh": {"dp_replicate": 4, "ep": 2}},
    "pp2-fsdp2-1f1b": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "1f1b"},
        "train": {"compile": "aot_eager"},
        "model": RICH,
    },
    "pp2-ep2-one-microbatch": {
        "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
        "pipeline": {"schedule": "1f1b"},
        "model": SPARSE,
        "train": FEW,
    },
    "pp2-fsdp2-ep2-one-microbatch": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "model": SPARSE,
        "train": FEW,
    },
    "pp4-gpipe": {"mesh": {"pp": 4}, "pipeline": {"schedule": "gpipe"}},
    "ep4": {"mesh": {"dp_replicate": 4, "ep": 4}},
    "fsdp4": {"mesh": {"dp_shard": 4}},
    "fsdp2-compiled": {"mesh": {"dp_shard": 2}, "train": {"compile": "aot_eager"}},
    "fsdp4-ep2": {"mesh": {"dp_shard": 4, "ep": 2}},
    "hsdp-ep4": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 4}},
    "pp2-fsdp2-ep2-zbv": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "zbv", "stages_per_rank": 2},
        "train": {"recompute": "feed_forward"},
    },
    "tp2": {
        "mesh": {"tp": 2},
        "model": RICH,
        "train": {"recompute": "full", "compile": "aot_eager"},
    },
    "tp2-fsdp2-ep4": {"mesh": {"tp": 2, "dp_shard": 2, "ep": 4}},
    "tp2-etp2-fsdp2-ep2": {"mesh": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}},
    "cp2": {"mesh": {"cp": 2}, "model": RICH},
    "cp4-hybrid-ep2": {
        "mesh": {"cp": 4, "cp_heads": 2, "ep": 2},
        "train": {"recompute": "attention"},
    },
    "cp4-ring": {"mesh": {"cp": 4, "cp_ring": True}, "model": RICH},
    "cp2-keys-tp2-ep2": {"mesh": {"cp": 2, "cp_heads": 1, "tp": 2, "ep": 2}, "model": RICH},
    "pp2-cp2-interleaved-zero-bubble": {
        "mesh": {"pp": 2, "cp": 2, "ep": 2},
        "pipeline": {"schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
        "model": RICH,
    },
    "pp2-tp2-v-half": {
        "mesh": {"pp": 2, "tp": 2, "ep": 2},
        "pipeline": {"schedule": "v_half", "stages_per_rank": 2},
        "train": {"recompute": "full"},
        "model": RICH,
    },
    "pp2-fsdp2-dualpipe": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "dualpipe_v", "stages_per_rank": 2},
        "train": SMALLER,
        "model": RICH,
    },
    "stages1-2-1f1b": {
        "mesh": {"pp": 2, "stage_tp": [1, 2]},
        "pipeline": {"schedule": "1f1b"},
    },
    "pp2-fsdp2-uneven": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "zero_bubble", "stage_layers": [3, 1]},
        "model": RICH,
    },
    "stages2-1-ep-interleaved": {
        "mesh": {"pp": 2, "stage_tp": [2, 1], "stage_ep": [2, 1]},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        "train": {"recompute": "full"},
    },
    "stages1-2-1": {
        "mesh": {"pp": 3, "stage_tp": [1, 2, 1]},
        "pipeline": {"schedule": "1f1b"},
        "model": RICH,
    },
    "u1-2": {
        "mesh": {"pp": 2, "stage_tp": [1, 2]},
        "pipeline": {"schedule": "u_shape"},
        "model": RICH,
    },
    "u1-2-fsdp2-ep2": {
        "mesh": {"pp": 2, "stage_tp": [1, 2], "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "u_shape"},
        "model": RICH,
    },
    "stages2-1-cp2-zbv": {
        "mesh": {"pp": 2, "stage_tp": [2, 1], "cp": 2},
        "pipeline": {"schedule": "zbv", "stages_per_rank": 2},
    },
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("one")
    return {
        "float32": train_in(config_of(), folder / "float32"),
        "float64": train_in(config_of(train={"dtype": "float64"}), folder / "float64"),
        "rich": train_in(config_of(model=RICH, train={"dtype": "float64"}), folder / "rich"),
        "sparse": train_in(
            config_of(model=SPARSE, train={**FEW, "dtype": "float64", "steps": 2}),
            folder / "sparse",
        ),
    }


@pytest.mark.sample(
    "pp2-fsdp2-ep2-zbv",
    "tp2-etp2-fsdp2-ep2",
    "pp2-cp2-interleaved-zero-bubble",
    "pp2-fsdp2-dualpipe",
    "stages2-1-ep-interleaved",
    "u1-2-fsdp2-ep2",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_one_process_in_fp64(
    name: str, one_process: dict[str, Result], tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    result = train_in(config_of(layout, train={"dtype": "float64", "steps": 2}), tmp_path)
    models = [("rich", RICH), ("sparse", SPARSE), ("float64", None)]
    expected = one_process[next(key for key, model in models if model is layout.get("model"))]
    comparison = compare(result.first_gradients, expected.first_gradients, bound=1e-12)
    assert comparison.ok, comparison
    assert result.losses == pytest.approx(expected.losses[:2], rel=1e-12)
    assert result.ahead == pytest.approx(expected.ahead[:2], rel=1e-12)
    assert result.norms == pytest.approx(expected.norms[:2], rel=1e-12)


def test_some_experts_of_the_sparse_model_have_no_tokens(one_process: dict[str, Result]) -> None:
    gradient = one_process["sparse"].first_gradients["layers.3.moe.experts.w1"]
    idle = [expert for expert, part in enumerate(gradient) if not part.any()]
    assert 0 < len(idle) < len(gradient)


@pytest.mark.sample("pp2-ep2-interleaved")
@pytest.mark.parametrize("name", ["pp2-ep2-interleaved", "dp4-ep2"])
def test_the_loss_curve_equals_one_process_in_fp32(
    name: str, one_process: dict[str, Result], tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    result = train_in(config_of(layout), tmp_path)
    expected = one_process["float32"]
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    assert result.eval_loss == pytest.approx(expected.eval_loss, rel=1e-5)
    assert expected.losses[-1] < expected.losses[0]


def test_a_repeated_run_is_bitwise_the_same(tmp_path: Path) -> None:
    config = config_of(LAYOUTS["pp2-ep2-interleaved"])
    first, second = (train_in(config, tmp_path / name) for name in ("a", "b"))
    assert first.losses == second.losses
    comparison = compare(first.parameters, second.parameters)
    assert comparison.ok, comparison


@pytest.mark.sample("pp2-ep2-interleaved-pp2-dp1-1f1b")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pp2-ep2-interleaved", "dp4-ep2"),
        ("pp2-ep2-interleaved", "pp2-dp1-1f1b"),
        ("pp2-fsdp2-ep2-zbv", "fsdp4-ep2"),
        ("fsdp4", "hsdp-ep4"),
    ],
)
def test_a_run_goes_on_under_another_layout(
    one: str, other: str, one_process: dict[str, Result], tmp_path: Path
) -> None:
    changed = {"model": RICH, "train": {"dtype": "float64"}}
    before = train_in(config_of(LAYOUTS[one], **changed), tmp_path, until=2)
    after = train_in(config_of(LAYOUTS[other], **changed), tmp_path)
    expected = one_process["rich"]
    assert [*before.losses, *after.losses] == pytest.approx(expected.losses, rel=1e-12)
    comparison = compare(after.parameters, expected.parameters, bound=1e-12)
    assert comparison.ok, comparison


def test_weights_and_moments_come_back_bit_for_bit_under_stages_of_other_sizes(
    one_process: dict[str, Result], tmp_path: Path
) -> None:
    """Each layout loads what the one before has saved, the last one goes on."""
    names = ["stages1-2-1", "pp2-fsdp2-ep2-zbv", "u1-2-fsdp2-ep2"]
    changed = {"model": RICH, "train": {"dtype": "float64"}}
    first, *others = (config_of(LAYOUTS[name], **changed) for name in names)
    saved = train_in(first, tmp_path, until=2)
    for other in others:
        loaded = train_in(other, tmp_path, until=2)
        assert loaded.losses == []
        for mine, theirs in (
            (loaded.parameters, saved.parameters),
            (loaded.moments, saved.moments),
        ):
            comparison = compare(mine, theirs)
            assert comparison.ok, comparison
    after = train_in(config_of(LAYOUTS["u1-2"], **changed), tmp_path)
    expected = one_process["rich"]
    assert [*saved.losses, *after.losses] == pytest.approx(expected.losses, rel=1e-12)
    assert after.eval_loss == pytest.approx(expected.eval_loss, rel=1e-12)
    comparison = compare(after.parameters, expected.parameters, bound=1e-12)
    assert comparison.ok, comparison


def _trainer(encoded: bytes, directory: str, address: str, stop: StopFlag) -> Trainer:
    """What trains a rank on a CPU."""
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    worker = replace(worker_of(info, Path(directory)), stop=stop)
    return Trainer(msgspec.json.decode(encoded, type=Config), worker, runtime, load_tokenizer(""))


def _evaluation(encoded: bytes, directory: str, address: str) -> tuple[float | None, list[float]]:
    """Loss over all batches, and the mean of each."""
    trainer, losses = _trainer(encoded, directory, address, StopFlag()), []
    config = trainer.config
    for batch in range(config.train.eval_batches):
        share = trainer.batches.cut(trainer.held_out, batch * config.train.global_batch_size)
        found = trainer.runner.evaluate_microbatches(share.args, share.kwargs, share.targets)
        losses.append(float(sum(found.losses)) / share.num_targets)
    loss = trainer.evaluate()
    trainer.close()
    return loss, losses


def test_evaluation_goes_through_as_many_batches_as_asked_for(tmp_path: Path) -> None:
    config = config_of(train={"eval_batches": 3, "dtype": "float64"})
    address = prepare_run(config, tmp_path)
    [(loss, losses)] = run_distributed(
        _evaluation, msgspec.json.encode(config), str(tmp_path), address, world_size=1
    )
    assert len(set(losses)) == 3
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-12)


def _asked_alone(encoded: bytes, directory: str, address: str) -> list[bool | None]:
    """Whether a step ends the run, and evaluation, before and after the last rank was asked."""
    asked: list[bool] = []
    trainer = _trainer(encoded, directory, address, StopFlag(passed_on=lambda: bool(asked)))
    info = trainer.runtime.info
    stops: list[bool | None] = []
    for _ in range(2):
        stops += [trainer.train_step()[1], trainer.evaluate() is None]
        if info.rank == info.world_size - 1:
            asked.append(True)
    trainer.close()
    return stops


def test_all_ranks_stop_where_one_was_asked_to(tmp_path: Path) -> None:
    config = config_of(mesh={"dp_shard": 2})
    address = prepare_run(config, tmp_path)
    encoded = msgspec.json.encode(config)
    for found in run_distributed(_asked_alone, encoded, str(tmp_path), address, world_size=2):
        assert found == [False, False, True, True]
