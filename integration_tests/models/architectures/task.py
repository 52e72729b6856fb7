"""What the reference and hp-train compute alike: the batches, the optimizer, the steps."""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from hp_data import load_tokenizer
from hp_data.dataset import Dataset
from hp_data.preparation import prepare
from hp_trainer.config import Config, rules
from hp_trainer.config.options import build
from hp_trainer.config.transformers_folder import shape_of_folder

STEPS, RELOAD_AFTER, BATCH, TOKENS = 3, 2, 4, 16
"""Updates; the one after which hp-train saves and loads; sequences of each, and their length."""
_WORDS = range(5, 60)
_SEPARATOR = 60
_DOCUMENTS, _LONGEST = 60, 24
TOKENIZER = "tokenizer.json"

COMMON: dict[str, Any] = {
    "train.steps": STEPS,
    "train.global_batch_size": BATCH,
    "train.microbatch_size": 1,
    "train.dtype": "float64",
    "train.learning_rate": 1e-2,
    "train.min_learning_rate_ratio": 1.0,
    "train.warmup_steps": 0,
    "train.weight_decay": 0.1,
    "train.beta1": 0.9,
    "train.beta2": 0.95,
    "train.adam_eps": 1e-3,
    "train.max_grad_norm": 0.5,
    "train.eval_every": 0,
    "train.async_save": False,
    "train.sample_tokens": 0,
    "data.seq_len": TOKENS,
    "data.documents": "joined",
    "data.eval_fraction": 0.2,
    "launch.device": "cpu",
    "launch.step_timeout_seconds": 30.0,
}
"""Keys of the configs of all cells. Adam's addition is large: where a gradient is zero but for
rounding, a step would else be as long as any other."""


def config_of(data: Path, keys: Mapping[str, Any]) -> Config:
    """The config of a cell.

    Args:
        data: Folder that `make_data` has made.
        keys: What it has besides `COMMON`.

    Raises:
        hp_base.errors.ConfigError: When hp-train refuses it.
    """
    given = {**COMMON, "data.tokenizer": str(data / TOKENIZER), **keys}
    shape = {key: value for key, value, _ in shape_of_folder(given)}
    config = build({**given, **shape})
    rules.check(config)
    return config


def make_data(folder: Path) -> None:
    """Make documents of random words, as tokens; none is one of those that models make special.

    Args:
        folder: Folder to be made.
    """
    folder.mkdir(parents=True)
    words = {f"w{word}": word for word in _WORDS}
    model = {"type": "WordLevel", "vocab": {**words, "</s>": _SEPARATOR}, "unk_token": "</s>"}
    content = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / TOKENIZER).write_text(json.dumps(content))
    random = Random(0)
    lengths = [random.randint(3, _LONGEST) for _ in range(_DOCUMENTS)]
    texts = [" ".join(random.choices(list(words), k=length)) for length in lengths]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    prepare(
        folder / "tokens",
        paths=[str(folder / "text.jsonl")],
        tokenizer=load_tokenizer(str(folder / TOKENIZER)),
        eval_fraction=COMMON["data.eval_fraction"],
    )


def dataset(data: Path, *, separate: bool) -> Dataset:
    """The sequences that training reads.

    Args:
        data: Folder that `make_data` has made.
        separate: Whether documents are kept apart.
    """
    return Dataset.open(data / "tokens", "train", seq_len=TOKENS, seed=0, separate=separate)
