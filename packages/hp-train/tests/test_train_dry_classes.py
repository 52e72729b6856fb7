"""Which ranks stand for which, the tokens of a dry run, and how a config is made to fit."""

from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_data import load_tokenizer
from hp_data.dataset import Dataset
from hp_plan.costs.routing import Skew, parse_skew
from hp_train.dry_run.classes import classes_of
from hp_train.dry_run.command import dry_config, fit_to, require_possible, write_data
from hp_train.dry_run.made_up import document_lengths, write_tokens
from hp_trainer.config.options import resolve

UNIFORM = Skew("uniform")


def classes(*keys: str, gpus: int = 8, skew: str = "uniform") -> dict[int, tuple[int, ...]]:
    pairs = [key.partition("=") for key in keys]
    given = [(name, value) for name, _, value in pairs]
    config = resolve("debug-qwen3-moe", given, env={}, fit=fit_to(gpus)).config
    return classes_of(config, parse_skew(skew, config.model), vocab_size=256)


@pytest.mark.parametrize(
    ("keys", "firsts"),
    [
        ((), [0]),
        (("mesh.ep=8",), [0]),
        (("mesh.pp=2",), [0, 4]),
        (("mesh.tp=2",), [0, 1]),
        (("mesh.dp_replicate=2",), [0, 4]),
        (("mesh.cp=2", "mesh.cp_ring=true"), [0, 1]),
        (("mesh.cp=2",), [0]),
    ],
)
def test_ranks_that_do_the_same_are_one_class(keys: tuple[str, ...], firsts: list[int]) -> None:
    found = classes(*keys)
    assert sorted(rank for ranks in found.values() for rank in ranks) == list(range(8))
    assert all(rank == ranks[0] for rank, ranks in found.items())
    assert list(found) == firsts


def test_ranks_with_smaller_shards_are_apart() -> None:
    """A matrix of 64 rows over 48 ranks: 32 of them have two, the others none."""
    found = classes(gpus=48)
    first = min(ranks[0] for ranks in found.values() if 32 in ranks)
    assert first == 32


def test_experts_that_get_more_are_apart() -> None:
    assert len(classes("mesh.ep=4", skew="gini=0.3")) == 4


def test_a_rank_that_is_asked_for_stands_for_itself() -> None:
    config = resolve("debug-qwen3-moe", (), env={}, fit=fit_to(8)).config
    found = classes_of(config, UNIFORM, vocab_size=256, apart=[5])
    assert found == {0: (0, 1, 2, 3, 4, 6, 7), 5: (5,)}


def test_every_sequence_has_the_same_documents(tmp_path: Path) -> None:
    write_tokens(tmp_path, load_tokenizer(""), document_lengths(64, 3))
    data = Dataset.open(tmp_path, "train", seq_len=64, seed=1)
    lengths = tuple(document_lengths(64, 3))
    assert sum(lengths) == 64
    assert set(data.batch(range(200)).documents) == {lengths}
    assert data.num_targets(range(10)) == 10 * (64 - 2)


def test_every_sequence_has_the_documents_that_are_asked_for(tmp_path: Path) -> None:
    config = resolve("debug-qwen3-moe", [("data.seq_len", "64")], env={}, fit=fit_to(1)).config
    lengths = [64]
    assert sum(lengths) == 64
    for given in (lengths, [40, 20, 4]):
        folder = tmp_path / str(len(given))
        folder.mkdir()
        write_data(config, folder, lengths=given)
        data = Dataset.open(folder, "train", seq_len=64, seed=1)
        assert set(data.batch(range(20)).documents) == {tuple(given)}


def test_fsdp_fills_the_devices_and_the_batch_grows() -> None:
    config = resolve("debug-qwen3-moe", [("mesh.tp", "2")], env={}, fit=fit_to(64)).config
    assert (config.mesh.dp_shard, config.world_size) == (32, 64)
    assert config.train.global_batch_size == 32 * config.train.microbatch_size


@pytest.mark.parametrize(
    ("keys", "gpus", "problem"),
    [
        ((("mesh.dp_shard", "2"),), 8, "must equal the ranks of the mesh"),
        ((("mesh.tp", "2"),), 7, "multiple of the others"),
    ],
)
def test_a_mesh_that_does_not_fill_the_devices_is_refused(
    keys: tuple[tuple[str, str], ...], gpus: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve("debug-qwen3-moe", keys, env={}, fit=fit_to(gpus))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("train.compile", "inductor", "train.compile .inductor. must be none"),
        ("launch.device", "cpu", "hp dry-run is of GPUs"),
        ("launch.backend", "gloo", "hp dry-run is of GPUs"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(key: str, value: str, problem: str) -> None:
    config = resolve("debug-qwen3-moe", [(key, value)], env={}, fit=fit_to(None)).config
    with pytest.raises(ConfigError, match=problem):
        require_possible(config, [])


def test_ranks_have_time_on_few_cores() -> None:
    config = dry_config(resolve("debug-qwen3-moe", (), env={}).config)
    assert config.launch.device == "cuda"
    assert config.launch.step_timeout_seconds >= 3600
