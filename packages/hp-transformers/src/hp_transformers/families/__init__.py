"""Models of Hugging Face: their settings and weights, in and out.

Reading and writing is sharded: a rank reads the slices of its own tensors, and writes them to their
places in files that all ranks write together. No rank ever holds a whole model.
"""

from hp_transformers.families.config import hf_config, model_config, read_config
from hp_transformers.families.load import check_weights, load_weights, require_fit
from hp_transformers.families.save import save_weights

__all__ = [
    "check_weights",
    "hf_config",
    "load_weights",
    "model_config",
    "read_config",
    "require_fit",
    "save_weights",
]
