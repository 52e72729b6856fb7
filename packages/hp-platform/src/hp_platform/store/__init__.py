"""One store of tensors: boxes of them that ranks have, saved, verified, and loaded in other boxes.

A checkpoint is a directory with one safetensors file per rank, `manifest.json` (names, shapes,
dtypes, boxes, SHA-256 of every chunk) and `manifest.sha256`. It appears by a rename, complete or
not at all. Nothing read from storage is ever unpickled.
"""

from hp_platform.store.boxes import Box, Part, coverage_error
from hp_platform.store.checkpoint import Checkpoint
from hp_platform.store.collective import OnProgress
from hp_platform.store.extra import decode_extra, encode_extra
from hp_platform.store.files import CheckpointError, rename
from hp_platform.store.load import load
from hp_platform.store.save import Source, parts_of, save, sources_of

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointError",
    "OnProgress",
    "Part",
    "Source",
    "coverage_error",
    "decode_extra",
    "encode_extra",
    "load",
    "parts_of",
    "rename",
    "save",
    "sources_of",
]
