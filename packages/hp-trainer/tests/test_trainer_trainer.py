"""A trainer of one rank, in this process: what it resumes, how it stops and continues a text."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from hp_base.errors import PREEMPTED, DataError
from hp_base.signals import StopFlag
from hp_data import Tokenizer, load_tokenizer
from hp_data.preparation import prepare
from hp_platform import Runtime
from hp_trainer.config import Config
from hp_trainer.config.options import one_process, resolve
from hp_trainer.launch.task import Worker
from hp_trainer.model import Microbatch
from hp_trainer.training.generate import continue_text
from hp_trainer.training.train import banner, run
from hp_trainer.training.trainer import Trainer

SEQ_LEN = 12
OVERRIDES = (
    ("launch.device", "cpu"),
    ("data.seq_len", SEQ_LEN),
    ("data.eval_fraction", 0.2),
    ("train.global_batch_size", 2),
    ("train.microbatch_size", 1),
    ("model.dim", 16),
    ("model.init_std", 0.5),
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("some words in a row\n" * 40)
    return path


@pytest.fixture
def config(text: Path) -> Config:
    overrides = [*OVERRIDES, ("data.paths", [str(text)])]
    return one_process(resolve("quickstart", overrides, env={}).config)


def test_a_checkpoint_is_not_resumed_with_other_data(
    config: Config, worker: Worker, started: tuple[Runtime, Tokenizer], text: Path, tmp_path: Path
) -> None:
    first = Trainer(config, worker, *started)
    first.train_step()
    first.save()
    first.pipeline.close()
    again = Trainer(config, worker, *started)
    assert f"resumed from {worker.run_dir}" in again.resume()[0]
    assert again.step == 1
    again.pipeline.close()

    text.write_text(text.read_text().replace("words", "birds"))  # as many tokens
    prepare(tmp_path / "other", paths=[str(text)], tokenizer=load_tokenizer(""), eval_fraction=0.2)
    other = Trainer(config, replace(worker, data=tmp_path / "other"), *started)
    with pytest.raises(DataError, match=r"was trained on other data than .*other$"):
        other.resume()
    assert other.step == 0
    other.pipeline.close()


def test_a_text_longer_than_the_window_is_continued_from_its_end(
    config: Config, worker: Worker, started: tuple[Runtime, Tokenizer]
) -> None:
    runtime, tokenizer = started
    trainer = Trainer(config, worker, runtime, tokenizer)
    [stage] = trainer.pipeline.modules.values()
    for prompt in ("in a", "some words in a row"):  # one begins to be too long on the way
        start = ids = list(map(int, tokenizer.encode(prompt)))
        for _ in range(2 * SEQ_LEN):
            with torch.no_grad():
                logits = stage(torch.tensor([ids[-SEQ_LEN:]]), microbatch=Microbatch(1))
            ids = [*ids, int(logits[0, -1].argmax())]
        said = continue_text(
            trainer.pipeline, tokenizer, prompt, num_tokens=2 * SEQ_LEN, temperature=0.0
        )
        assert said == tokenizer.decode(ids[len(start) :])
    trainer.pipeline.close()


@pytest.mark.parametrize(("steps", "status"), [(1, 0), (2, PREEMPTED)])
def test_a_request_to_stop_in_the_last_step_stops_nothing(
    steps: int, status: int, config: Config, worker: Worker, started: tuple[Runtime, Tokenizer]
) -> None:
    train = msgspec.structs.replace(
        config.train, steps=steps, warmup_steps=0, eval_every=0, sample_tokens=0
    )
    asked = replace(worker, stop=StopFlag(lambda: True))
    trainer = Trainer(msgspec.structs.replace(config, train=train), asked, *started)
    assert run(trainer) == status
    assert trainer.step == 1
    assert (worker.run_dir / "loss.svg").exists() is (status == 0)  # the report of a whole run
    trainer.pipeline.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_run_says_what_the_compiler_took_and_in_which_steps(
    config: Config, worker: Worker, started: tuple[Runtime, Tokenizer]
) -> None:
    torch.compiler.reset()
    compiled = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, compile="aot_eager", steps=5)
    )
    trainer = Trainer(compiled, worker, *started)
    lines = banner(compiled, trainer.mesh, started[0], trainer.norm)
    assert any(line.startswith("compile aot_eager") for line in lines)
    first, *others = [trainer.train_step()[0] for _ in range(3)]
    assert first.compiled_graphs is not None
    assert first.compiled_graphs > 2
    assert first.compile_seconds is not None
    assert 0 < first.compile_seconds < first.step_seconds
    assert f"compiled {first.compiled_graphs} graphs in" in str(first)
    assert others[-1].compiled_graphs is None
    assert "compile_seconds" not in others[-1].as_dict()
    (note, *_) = trainer.problems
    assert note.startswith("note: torch.compile (aot_eager) compiled ")
    assert note.endswith("by step 1")
    trainer.pipeline.close()
