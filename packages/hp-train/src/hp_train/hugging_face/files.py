"""Which files a folder of Hugging Face has its weights in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hp_platform import store
from hp_platform.store.safetensors import INDEX, MAX_HEADER_BYTES, FileTensor, opened_tensors
from hp_train.config.schema import shown
from hp_train.errors import ConfigError
from hp_train.hugging_face.json_file import read_json

_SINGLE = "model.safetensors"


@contextmanager
def opened_files(folder: Path) -> Iterator[dict[str, FileTensor]]:
    """Open the files of a model and give their tensors by name; only headers are read.

    Raises:
        ConfigError: When files are missing, damaged, become shorter, or not what the index says.
    """
    try:
        with opened_tensors(folder / name for name in _file_names(folder)) as files:
            yield files
    except store.CheckpointError as error:
        raise ConfigError(str(error)) from None


def _file_names(folder: Path) -> list[str]:
    if not os.path.lexists(folder / INDEX):
        return [_SINGLE]
    index = read_json(folder / INDEX, most_bytes=MAX_HEADER_BYTES)
    listed = index.get("weight_map")
    if not isinstance(listed, dict):
        raise ConfigError(f"{INDEX}: weight_map ({shown(listed)}) must be an object")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{INDEX}: file ({shown(name)}) must be a name in the folder")
    return sorted(set(listed.values()))
