"""Refusals of a start, found before any process is started."""

import tempfile
from pathlib import Path

from hp_data.corpus import find_sources, look_at
from hp_data.preparation import prepare
from hp_data.tokenizer import Tokenizer, load_tokenizer, vocab_size_of
from hp_data.tokens import SPLITS, Index, read_index, require_sequence
from hp_trainer.config import Config, rules
from hp_trainer.plugins import weights_of

_LITTLE = 1 << 20
"""Bytes of text that are turned into tokens to see whether there are enough of them."""


def refuse_beforehand(config: Config, *, weights: bool) -> None:
    """Look at text, tokenizer and weights as a start will, as far as that takes no time.

    Weights are looked at by their headers. Text that is longer than a MiB is left to the ranks: it
    takes longer, and hardly ever has no sequence.

    Args:
        config: Validated.
        weights: Whether to look at weights, too, which ranks do themselves.

    Raises:
        ConfigError: When weights or the tokenizer do not fit the model.
        DataError: When there is not enough text, it cannot be read, or the tokenizer has more
            tokens than the model.
    """
    if rules.has_tokens(config.run.resume):
        return
    if config.data.paths:
        look_at(config.data.paths, config.data.field)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
    vocab_size = vocab_size_of(tokenizer, config.model.vocab_size)
    found = find_sources(config.data.paths, config.data.field) if config.data.paths else ()
    if found and sum(source.size for source in found) <= _LITTLE:
        _require_tokens(config, tokenizer)
    if weights and config.run.init_from and not config.run.resume:
        weights_of(config.run.init_from).require_fit(
            Path(config.run.init_from), config.model, vocab_size
        )


def _require_tokens(config: Config, tokenizer: Tokenizer) -> None:
    """Turn little text into tokens, and see whether each split has a sequence."""
    data = config.data
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "data"
        prepare(
            made,
            paths=data.paths,
            field=data.field,
            tokenizer=tokenizer,
            eval_fraction=data.eval_fraction,
        )
        index = read_index(made)
        assert isinstance(index, Index), "it was made just now"
        for split in SPLITS:
            size = getattr(index, split).tokens
            where = f"data.paths ({', '.join(data.paths)}), {split}"
            require_sequence(size, split, seq_len=data.seq_len, where=where)
