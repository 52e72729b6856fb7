"""Checkpoints that are verified before they are used, and can be loaded under another layout.

A checkpoint is a directory `step-00000010` with one safetensors file per rank, `manifest.json`
(names, shapes, dtypes, slices, SHA-256 of every chunk) and `manifest.sha256`. It appears by a
rename, complete or not at all. Nothing read from storage is ever unpickled.
"""

from hp_train.checkpoint.background import BackgroundSaver
from hp_train.checkpoint.load import Loaded, load_latest
from hp_train.checkpoint.save import save_checkpoint
from hp_train.checkpoint.verify import verify_checkpoint

__all__ = [
    "BackgroundSaver",
    "Loaded",
    "load_latest",
    "save_checkpoint",
    "verify_checkpoint",
]
