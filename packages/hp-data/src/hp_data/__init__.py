"""From text to batches of tokens, which are compared with their digests before training.

`corpus` finds the text and cuts it into pieces, `tokenizer` turns text into ids, and `encode` does
so in as many processes as there are cores. `prepare` writes the ids of a run (`tokens`), of which
some are held out for evaluation, and keeps them for other runs in a `Cache`. `dataset` draws
sequences from them in an order fixed by the seed.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_data.corpus import look_at
    from hp_data.dataset import Batch, Dataset, Piece
    from hp_data.preparation import Cache, is_prepared, prepare
    from hp_data.tokenizer import Tokenizer, load_tokenizer, vocab_size_of

__all__ = [
    "Batch",
    "Cache",
    "Dataset",
    "Piece",
    "Tokenizer",
    "__version__",
    "is_prepared",
    "load_tokenizer",
    "look_at",
    "prepare",
    "vocab_size_of",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Batch": "hp_data.dataset",
        "Cache": "hp_data.preparation",
        "Dataset": "hp_data.dataset",
        "Piece": "hp_data.dataset",
        "Tokenizer": "hp_data.tokenizer",
        "is_prepared": "hp_data.preparation",
        "load_tokenizer": "hp_data.tokenizer",
        "look_at": "hp_data.corpus",
        "prepare": "hp_data.preparation",
        "vocab_size_of": "hp_data.tokenizer",
    },
)
