"""Keys under other names, and configs that would make more work than any run."""

import os
import socket
import sys
from pathlib import Path

import pytest
from train_refusals import refusal

from hp_base.errors import ConfigError
from hp_trainer.config.aliases import _CALLED, aliases
from hp_trainer.config.options import resolve, split_overrides
from hp_trainer.config.schema import fields, sections


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.lr", "train.learning_rate"),
        ("train.LR", "train.learning_rate"),
        ("train.learnin_rate", "train.learning_rate"),
        ("optimizer.lr", "train.learning_rate"),
        ("train.wd", "train.weight_decay"),
        ("train.weigth_decay", "train.weight_decay"),
        ("train.bs", "train.global_batch_size"),
        ("train.batch_size", "train.global_batch_size"),
        ("train.micro_batch_size", "train.microbatch_size"),
        ("train.epochs", "train.steps"),
        ("train.max_steps", "train.steps"),
        ("train.step", "train.steps"),
        ("train.seed", "run.seed"),
        ("run.sede", "run.seed"),
        ("train.clip_grad", "train.max_grad_norm"),
        ("train.warmup", "train.warmup_steps"),
        ("train.eps", "train.adam_eps"),
        ("train.bf16", "train.dtype"),
        ("train.logging_steps", "train.log_every"),
        ("mesh.tp_size", "mesh.tp"),
        ("mesh.tensor_parallel_size", "mesh.tp"),
        ("parallel.pp", "mesh.pp"),
        ("mesh.dp", "mesh.dp_replicate"),
        ("mesh.fsdp", "mesh.dp_shard"),
        ("model.hidden_size", "model.dim"),
        ("model.n_layer", "model.num_layers"),
        ("model.layers", "model.num_layers"),
        ("model.num_expert", "model.num_experts"),
        ("model.num_experts_per_tok", "model.top_k"),
        ("model.rms_norm_eps", "model.norm_eps"),
        ("data.seq_length", "data.seq_len"),
        ("model.seq_len", "data.seq_len"),
        ("data.path", "data.paths"),
    ],
)
def test_a_key_of_another_name_leads_to_the_one_that_is_meant(written: str, meant: str) -> None:
    assert refusal((written, "1")) == f"unknown key {written}; did you mean {meant}?"


def test_every_other_name_is_of_a_key_and_is_none() -> None:
    assert set(aliases().values()) <= set(fields())
    assert not aliases().keys() & {field.name for field in fields().values()}
    assert len(aliases()) == sum(len(called.split()) for called in _CALLED.values())


def test_what_is_like_nothing_leads_to_what_there_is() -> None:
    assert "; [train] has steps, " in refusal(("train.qqqqqq", "1"))
    for section in sections():
        assert len(refusal((f"{section}.qqqqqq", "1"))) < 350
    assert refusal(("qqqqqq.zzzzzz", "1")) == "unknown key qqqqqq.zzzzzz"


BOMBS = {
    "200,000 keys": ("[train]\n" + "".join(f"k{n} = 1\n" for n in range(200_000)), []),
    "many sections": ("".join(f"[k{n}]\n" for n in range(6_000)), []),
    "50 MB of a string": ("[run]\nname = '" + "y" * 50_000_000 + "'\n", []),
    "a key of many parts": ("a." * 8_000 + "b = 1\n", []),
    "lists in lists": ("[train]\nsteps = " + "[" * 60_000, []),
    "tables in tables": ("a = " + "{a=" * 20_000, []),
    "thousands of digits": ("[train]\nsteps = 0x" + "f" * 10_000 + "\n", []),
    "thousands of digits in a list": ("", ["data.paths=[0x" + "f" * 10_000 + "]"]),
    "a million stages": ("", ["mesh.pp=1000000", "model.num_layers=4000000"]),
    "many processes": ("", ["mesh.dp_replicate=100000", "train.global_batch_size=400000"]),
    "a list of stages": ("[mesh]\npp = 20000\nstage_tp = [" + "1," * 20_000 + "]\n", []),
    "many layers": ("", ["model.num_layers=2147483647"]),
    "many experts": ("", ["model.num_experts=2147483646"]),
    "many microbatches": ("", ["train.global_batch_size=2147483640"]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_one_line_and_bounded_work(name: str, tmp_path: Path) -> None:
    text, given = BOMBS[name]
    (tmp_path / "bomb.toml").write_text(text)
    fields(), aliases()  # made once
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    overrides, _ = split_overrides(given)
    sys.setprofile(count)
    try:
        with pytest.raises(ConfigError) as caught:
            resolve(str(tmp_path / "bomb.toml"), overrides, env={})
    finally:
        sys.setprofile(None)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert calls < 1_000_000


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_a_config_that_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            listening.bind(str(path))
        else:
            path.mkdir()
        with pytest.raises(ConfigError, match="must be a readable file") as caught:
            resolve(str(path), env={})
    assert "\n" not in str(caught.value)


def test_a_config_may_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("[train]\nsteps = 7\n")
    (tmp_path / "link.toml").symlink_to(tmp_path / "real.toml")
    assert resolve(str(tmp_path / "link.toml"), env={}).config.train.steps == 7
