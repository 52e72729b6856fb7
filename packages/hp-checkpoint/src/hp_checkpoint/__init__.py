"""One store of tensors: boxes of them that ranks have, saved, verified, and loaded in other boxes.

A checkpoint is a directory with one safetensors file per rank, `manifest.json` (names, shapes,
dtypes, boxes, SHA-256 of every chunk) and `manifest.sha256`. It appears by a rename, complete or
not at all. Nothing read from storage is ever unpickled.
"""

from hp_checkpoint.boxes import Box, Part, coverage_error
from hp_checkpoint.checkpoint import Checkpoint
from hp_checkpoint.collective import OnProgress
from hp_checkpoint.extra import decode_extra, encode_extra
from hp_checkpoint.files import rename
from hp_checkpoint.load import load
from hp_checkpoint.save import Source, parts_of, save, sources_of

__all__ = [
    "Box",
    "Checkpoint",
    "OnProgress",
    "Part",
    "Source",
    "__version__",
    "coverage_error",
    "decode_extra",
    "encode_extra",
    "load",
    "parts_of",
    "rename",
    "save",
    "sources_of",
]
__version__ = "0.1.0"
