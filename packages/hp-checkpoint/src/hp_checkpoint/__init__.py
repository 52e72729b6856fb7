"""Sharded checkpoints that are verified before they are used, and can be read in any layout.

A checkpoint is a directory with one safetensors file per rank, `manifest.json` (names, shapes,
dtypes, boxes, SHA-256 of every chunk) and `manifest.sha256`. It appears by a rename, complete or
not at all. Nothing read from storage is ever unpickled.

`save_checkpoint` and `load_latest` keep the checkpoints of a run, step by step. They use `save` and
`load`, which are for one checkpoint under any name, of boxes of tensors that need not be in memory.
"""

from hp_checkpoint.boxes import Box, Part, coverage_error
from hp_checkpoint.checkpoint import Checkpoint
from hp_checkpoint.collective import OnProgress
from hp_checkpoint.files import rename
from hp_checkpoint.json_file import decode_extra, encode_extra
from hp_checkpoint.load import load
from hp_checkpoint.runs import (
    BackgroundSaver,
    Loaded,
    load_latest,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from hp_checkpoint.save import Source, parts_of, save, sources_of

__all__ = [
    "BackgroundSaver",
    "Box",
    "Checkpoint",
    "Loaded",
    "OnProgress",
    "Part",
    "Source",
    "__version__",
    "coverage_error",
    "decode_extra",
    "encode_extra",
    "load",
    "load_latest",
    "newest_checkpoint",
    "open_checkpoint",
    "parts_of",
    "rename",
    "save",
    "save_checkpoint",
    "sources_of",
    "verify_checkpoint",
]
__version__ = "0.1.0"
