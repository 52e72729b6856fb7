"""From text to batches, every token compared with what was written before it is trained on.

`corpus` finds the text and cuts it into pieces, `tokenizer` turns text into ids, and `encode` does
so in as many processes as there are cores. `prepare` writes the ids of a run (`tokens`, and
`index`, which says what they are), of which `holdout` holds some out for evaluation; `cache` keeps
them for other runs, in `folders` that are there whole or not at all. `dataset` draws sequences from
them in an order fixed by the seed.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_data.dataset import Batch, Dataset
    from hp_data.preparation import prepare
    from hp_data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Dataset",
    "Tokenizer",
    "__version__",
    "load_tokenizer",
    "prepare",
]
__version__ = "0.1.0"

__getattr__ = lazily(
    __name__,
    {
        "Batch": "hp_data.dataset",
        "Dataset": "hp_data.dataset",
        "Tokenizer": "hp_data.tokenizer",
        "load_tokenizer": "hp_data.tokenizer",
        "prepare": "hp_data.preparation",
    },
)
