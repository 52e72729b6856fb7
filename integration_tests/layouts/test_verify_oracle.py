"""One process of hp-train computes what the oracle of `hp verify` does, for every kind of block."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_train.verify.program import Program
from hp_train.verify.runs import Runs
from hp_train.verify.shrinking import shrink
from hp_trainer.config.options import checked_config, one_process, resolve
from integration_tests.runs import write_corpus

PROGRAM = Program(steps=4)
SOFTMAX_GROUPS = (
    "model.num_experts=8 model.num_expert_groups=4 model.num_limited_groups=2 model.top_k=3 "
    "model.correction_bias=true model.correction_rate=0.01 model.router_normalize=false "
    "model.router_scale=1.5 model.num_shared_experts=2"
)
CASES = {
    "debug-llama3": "model.dropout=0.2",
    "debug-qwen3": "data.documents=joined",
    "debug-qwen3-moe": SOFTMAX_GROUPS,
    "debug-mixtral": "model.sliding_window=5 train.max_grad_norm=0 train.warmup_steps=0",
    "debug-deepseek-v3": "model.num_mtp_modules=2 model.tie_embeddings=true model.dropout=0.1",
    "debug-gpt-oss": "model.sliding_window=6",
    "quickstart": "train.weight_decay=0.5",
}
"""Every family that comes along, and settings that none of them has."""


@pytest.mark.parametrize("name", CASES)
def test_a_family_computes_what_the_oracle_does(name: str, tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path))
    pairs = [setting.partition("=") for setting in CASES[name].split()]
    overrides: list[tuple[str, object]] = [(key, value) for key, _, value in pairs]
    # Weights large enough that everything matters.
    overrides += [
        ("data.paths", [corpus]),
        ("model.init_std", "0.2"),
        ("data.eval_fraction", "0.2"),
    ]
    [config] = shrink([one_process(resolve(name, overrides, env={}).config)])
    config = PROGRAM.applied_to(checked_config(config, dtype="float64"))
    scratch = tmp_path / "runs"
    scratch.mkdir()
    runs = Runs(scratch, base=config, program=PROGRAM)
    comparison = runs.compare(config, None)
    assert comparison.ok, str(comparison)
    assert comparison.bound == 1e-12
    assert not comparison.bitwise  # it is other code
    assert comparison.num_values > 100_000
