"""From text to batches: corpus, tokenizer, and sequences in an order fixed by the seed."""

from hp_train.data.dataset import Dataset, prepare
from hp_train.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Dataset", "Tokenizer", "load_tokenizer", "prepare"]
