"""The layout that `hp plan` writes is what `hp train` trains and `hp dry-run` rehearses."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from hp_train.cli import main
from hp_trainer.config.options import resolve
from integration_tests.runs import write_corpus

SMALL = (
    *("data.seq_len=64", "train.global_batch_size=8", "train.steps=2", "train.warmup_steps=1"),
    *("train.eval_every=0", "train.sample_tokens=0", "train.log_every=1", "run.name=run"),
)


def test_what_is_written_for_a_cpu_is_trained_and_gone_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.toml"
    given = [*SMALL, f"run.output_dir={tmp_path}", "--data", str(write_corpus(tmp_path))]
    asked = ["--machine", "cpu", "--gpus", "2", "--write", str(file)]
    assert main(["plan", "debug-qwen3-moe", *given, *asked]) == 0
    capfd.readouterr()
    assert main(["train", str(file)]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    trained = resolve(str(tmp_path / "run" / "config.toml"), env={}).config
    written = resolve(str(file), env={}).config
    assert written.world_size == 2
    assert (trained.mesh, trained.pipeline) == (written.mesh, written.pipeline)
    assert replace(trained.train, dtype="") == replace(written.train, dtype="")
    again = tmp_path / "again.toml"
    asked = ["--machine", "cpu", "--gpus", "1", "--train.steps", "3", "--write", str(again)]
    assert main(["plan", "--resume", str(tmp_path / "run"), *asked]) == 0
    assert main(["train", str(again)]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_dry_run_needs_what_the_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.toml"
    sizes = ["model.dim=512", "model.expert_hidden=1024", "data.seq_len=512", "model.num_layers=4"]
    given = ["debug-qwen3-moe", *sizes, "train.dtype=bfloat16", "train.global_batch_size=8"]
    asked = ["--gpus", "4", "--vocab-size", "256", "--json", "--write", str(file)]
    assert main(["plan", *given, *asked]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert main(["dry-run", str(file), "--documents", "1", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    live = max(rank["memory"]["peak_live"] for rank in ranks)
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert sum(best["memory"][kind] for kind in kinds) == pytest.approx(live, rel=0.15)


def test_a_model_of_transformers_is_written_with_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    few = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
    transformers.Qwen3Config(**sizes, **few).save_pretrained(tmp_path / "model")
    file = tmp_path / "best.toml"
    given = [f"model.transformers={tmp_path / 'model'}", "data.seq_len=16"]
    assert main(["plan", *given, "--gpus", "2", "--write", str(file)]) == 0
    assert main(["train", str(file), "--dry-run"]) == 0
    assert "config best is good: 2 processes" in capsys.readouterr().out
