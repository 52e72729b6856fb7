"""Steps of documents of many lengths, for the command: percentiles by packing, and as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from hp_packing.percentiles import LengthPrices, Steps, drawn, typical_sequences
from hp_plan.costs.machine import Machine
from hp_plan.layouts.report import in_bytes, in_seconds
from hp_trainer.config import Config

__all__ = ["steps_as_dict", "steps_of", "table_of", "typical_sequences"]


def steps_of(
    config: Config, machine: Machine, *, vocab_size: int, source: str, number: int
) -> list[Steps]:
    """Steps of a layout, by packing.

    Args:
        config: Configuration of the layout, decided.
        machine: Its machine.
        vocab_size: Tokens of the vocabulary.
        source: A distribution's name, or a file of lengths.
        number: Steps, at most.

    Raises:
        ConfigError: The file cannot be read or has too little, or planned steps do not fit.
    """
    seq_len = config.data.seq_len
    tokens = config.train.global_batch_size * seq_len
    batches = drawn(source, tokens=tokens, longest=seq_len, number=number)
    return LengthPrices(config, machine, vocab_size=vocab_size).steps(batches)


def table_of(steps: Sequence[Steps]) -> list[str]:
    """One line for each packing: seconds and bytes of steps by percentile."""
    found = [each.percentiles() for each in steps]
    percents = list(found[0]["seconds"])
    head = "".join(f"{f'step {percent}':>10}" for percent in percents)
    head += "".join(f"{f'memory {percent}':>12}" for percent in percents)
    lines = [f"{'packing':10}{head}{'tokens/s':>11}"]
    for each, values in zip(steps, found, strict=True):
        line = "".join(f"{in_seconds(values['seconds'][percent]):>10}" for percent in percents)
        line += "".join(f"{in_bytes(values['memory'][percent]):>12}" for percent in percents)
        lines.append(f"{each.packing:10}{line}{each.tokens_per_second:11,.0f}")
    return lines


def steps_as_dict(steps: Sequence[Steps]) -> Mapping[str, Any]:
    """The same for programs, by packing."""
    return {
        each.packing: {**each.percentiles(), "tokens_per_second": each.tokens_per_second}
        for each in steps
    }
