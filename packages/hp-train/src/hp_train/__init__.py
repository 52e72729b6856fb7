"""Distributed training of mixture-of-experts transformers, from a laptop to many GPUs."""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_train.verify.compare_values import RunComparison, compare_runs

__all__ = ["RunComparison", "__version__", "compare_runs"]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "RunComparison": "hp_train.verify.compare_values",
        "compare_runs": "hp_train.verify.compare_values",
    },
)
