"""Checkpoints that are verified before they are used, and can be loaded under another layout.

A checkpoint is a directory `step-00000010` with one safetensors file per rank, `manifest.json`
(names, shapes, dtypes, slices, SHA-256 of every chunk) and `manifest.sha256`. It appears by a
rename, complete or not at all. Nothing read from storage is ever unpickled.
"""

from hp_checkpoint.runs.background import BackgroundSaver
from hp_checkpoint.runs.directory import newest_checkpoint
from hp_checkpoint.runs.load import Loaded, load_latest
from hp_checkpoint.runs.save import save_checkpoint
from hp_checkpoint.runs.verify import open_checkpoint, verify_checkpoint

__all__ = [
    "BackgroundSaver",
    "Loaded",
    "load_latest",
    "newest_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
