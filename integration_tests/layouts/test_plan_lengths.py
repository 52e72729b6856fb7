"""Steps of documents of many lengths: by packing, percentiles of their time and memory."""

import json
from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_packing.generators import drawn, stream
from hp_packing.lengths import (
    LengthPrices,
    percentile,
    typical_sequences,
    whole,
)
from hp_plan.costs.machine import MACHINES
from hp_plan.price.estimate import estimate
from hp_train.cli import main
from hp_trainer.config.options import resolve

CPU = MACHINES["cpu"]
KEYS = (
    ("data.seq_len", 1024),
    ("mesh.pp", 2),
    ("mesh.dp_replicate", 2),
    ("mesh.ep", 1),
    ("pipeline.stages_per_rank", 1),
    ("pipeline.schedule", "1f1b"),
    ("train.microbatch_size", 1),
    ("train.global_batch_size", 8),
)


def _prices() -> LengthPrices:
    config = resolve("", KEYS, env={}).config
    found = estimate(config, CPU, vocab_size=256)
    return LengthPrices(found.config, CPU, vocab_size=256)


def test_sequences_of_one_document_take_what_plan_says() -> None:
    prices = _prices()
    found = estimate(prices.config, CPU, vocab_size=256)
    steps = {each.packing: each for each in prices.steps([[1024] * 8] * 2)}
    for packing in ("stream", "best_fit"):
        assert steps[packing].seconds == pytest.approx([found.seconds] * 2)
        assert steps[packing].memory == (found.memory.total,) * 2
        assert steps[packing].tokens_per_second == pytest.approx(found.tokens_per_second)
    assert steps["planned"].tokens == (8192, 8192)
    assert max(steps["planned"].memory) <= CPU.memory


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_layouts_of_several_stages_on_a_rank_are_priced_without_planned_steps(
    schedule: str,
) -> None:
    keys = {**dict(KEYS), "pipeline.stages_per_rank": 2, "pipeline.schedule": schedule}
    found = estimate(resolve("", [*keys.items()], env={}).config, CPU, vocab_size=256)
    steps = LengthPrices(found.config, CPU, vocab_size=256).steps([[1024] * 8])
    assert [each.packing for each in steps] == ["stream", "best_fit"]
    assert steps[0].seconds == pytest.approx([found.seconds])


def test_short_documents_take_less_and_percentiles_rise() -> None:
    prices = _prices()
    batches = drawn("lognormal-2k", tokens=8192, longest=1024, number=3)
    batches.append([64] * 128)
    for steps in prices.steps(batches):
        seconds = steps.percentiles()["seconds"]
        assert 0 < seconds["p50"] <= seconds["p90"] <= seconds["p99"] == max(steps.seconds)
    full, short = (prices.steps([batch])[0].seconds[0] for batch in ([1024] * 8, [64] * 128))
    assert short < full


def test_documents_are_packed_as_a_run_packs_them() -> None:
    assert stream([5, 3, 9, 1], seq_len=6) == [[5, 1], [2, 4], [5, 1]]
    assert stream([5], seq_len=6) == [[5]]
    packed = whole([5, 3, 9, 1, 3], seq_len=6)
    assert sorted(length for each in packed for length in each) == [1, 3, 3, 3, 5, 6]
    assert all(sum(each) <= 6 for each in packed)


def test_percentiles_are_values_that_were_there() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, at) for at in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert percentile([3.0], 99) == 3.0


def test_lengths_come_from_a_file_or_a_distribution(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("500 700 900 1500")
    assert drawn(str(path), tokens=1000, longest=1024, number=9) == [
        [500, 500],
        [200, 800],
        [100, 900],
    ]
    with pytest.raises(ConfigError, match="must have at least 10000 tokens"):
        drawn(str(path), tokens=10_000, longest=1024, number=9)
    found = typical_sequences("lognormal-2k", seq_len=8192)
    assert {name: sum(lengths) for name, lengths in found.items()} == {"p50": 8192, "p99": 8192}
    assert sum(n * n for n in found["p50"]) < sum(n * n for n in found["p99"])


def test_plan_shows_and_writes_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{key}={value}" for key, value in KEYS]
    flags = ["--machine", "cpu", "--lengths", "mock", "--batches", "2", "--vocab-size", "256"]
    assert main(["plan", *flags, *given]) == 0
    shown = capsys.readouterr().out
    assert "2 steps of mock" in shown
    for packing in ("stream", "best_fit", "planned"):
        assert packing in shown
    assert main(["plan", *flags, "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)["lengths"]
    assert found["planned"]["seconds"]["p50"] <= found["planned"]["seconds"]["p99"]
    assert main(["plan", "--lengths", "nowhere", *given]) != 0
