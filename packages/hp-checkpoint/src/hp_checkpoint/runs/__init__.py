"""The checkpoints of a run, in directories such as `step-00000010`: saved, verified, loaded."""

from hp_checkpoint.runs.directory import newest_checkpoint
from hp_checkpoint.runs.load import Loaded, load_latest, open_checkpoint, verify_checkpoint
from hp_checkpoint.runs.save import BackgroundSaver, save_checkpoint

__all__ = [
    "BackgroundSaver",
    "Loaded",
    "load_latest",
    "newest_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
