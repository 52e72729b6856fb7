"""What a start would refuse is refused by `hp train --dry-run`, and before ranks are started."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from hp_train.cli import main
from hp_trainer.config.options import resolve
from hp_trainer.model.transformer import model_shapes
from hp_transformers.families.save import save_weights

Capture = pytest.CaptureFixture[str]


def text(folder: Path, size: int) -> list[str]:
    path = folder / "text.txt"
    path.write_text("once upon a time " * (size // 17 + 1))
    path.write_text(path.read_text()[:size])
    return ["--data", str(path)]


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_text_without_a_whole_sequence_is_refused_before_ranks_start(
    tmp_path: Path, capsys: Capture, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags, *text(tmp_path, 11)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "text.txt), train: 10 tokens must exceed data.seq_len (128)" in err
    assert not (tmp_path / "runs").exists()


def test_text_with_too_little_to_hold_out_is_refused(tmp_path: Path, capsys: Capture) -> None:
    given = ["train", "--dry-run", *text(tmp_path, 400), "--data.eval_fraction"]
    assert main([*given, "0.1"]) == 3
    said = "eval: 100 tokens must exceed data.seq_len (128) (raise data.eval_fraction)"
    assert said in capsys.readouterr().err
    assert main([*given, "0.4"]) == 0


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    given = [*text(tmp_path, 20_000), "--model.vocab_size", "200"]
    assert main(["train", "--dry-run", *given]) == 3
    said = "model.vocab_size (200) must be at least the tokens of the tokenizer (256)"
    assert said in capsys.readouterr().err


def test_weights_of_another_model_are_refused(tmp_path: Path, capsys: Capture) -> None:
    resolved = resolve("debug-qwen3", env={})
    model = replace(resolved.config.model, vocab_size=256, max_positions=512)
    tensors = {name: torch.zeros(shape) for name, shape in model_shapes(model).items()}
    save_weights(tmp_path / "model", tensors, model, dtype=torch.bfloat16)
    command = ["train", "debug-qwen3", "--dry-run", *text(tmp_path, 20_000)]
    command += ["--run.init_from", str(tmp_path / "model"), "--model.vocab_size", "256"]
    command += ["--model.max_positions", "512"]
    assert main(command) == 0
    capsys.readouterr()
    for change in (["--model.dim", "128"], ["--model.num_layers", "7"]):
        assert main([*command, *change]) == 2
        err = capsys.readouterr().err
        assert "[model] must be what hp import-hf prints for" in err
        assert "Traceback" not in err
