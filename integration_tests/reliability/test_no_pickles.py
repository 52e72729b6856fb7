"""Nothing of another process or a file is unpickled: `hp_platform.failures.messages`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hp_checkpoint.runs import BackgroundSaver, load_latest, save_checkpoint
from hp_platform.testing import run_distributed

_ROOT = Path(__file__).resolve().parents[2]
_EXECUTES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_OBJECTS = {
    "all_gather_object",
    "batch_isend_irecv_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
# What torch's checkpoints pass between ranks as pickles, or read from files as such.
_CHECKPOINTS = {"FileSystemReader", "async_save", "load", "save"}
_ALLOWED = {
    # What a process pickles for its own child, through a pipe that nobody else can open.
    "hp_platform/testing/child.py: pickle",
    # What torch's object collectives pickle, between processes that were forked for one dry run.
    "hp_dry/world/objects.py: pickle",
    "hp_platform/testing/processes.py: pickle",
}


def _sources() -> list[Path]:
    return sorted(_ROOT.glob("packages/*/src/**/*.py"))


def _found(tree: ast.AST) -> Iterator[str]:
    """What in a module unpickles: by import, by name, or `torch.load` without `weights_only`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            yield from {module for module in modules if module.partition(".")[0] in _EXECUTES}
            yield from _OBJECTS.intersection(names)
            if modules[0].startswith("torch.distributed.checkpoint"):
                yield from _CHECKPOINTS.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr in _OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if given.get("weights_only") != "True":
                yield "torch.load without weights_only=True"


def test_no_source_unpickles_what_is_not_its_own() -> None:
    found = {
        f"{path.as_posix().rpartition('/src/')[2]}: {what}"
        for path in _sources()
        for what in _found(ast.parse(path.read_text()))
    }
    assert found == _ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "from torch.distributed import scatter_object_list",
        "import torch; torch.load(path)",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch; torch.load(path, weights_only=False)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(_found(ast.parse(line)))


def _save_and_load(folder: Path) -> list[str]:
    """Return what a rank would have unpickled while it saved, in both ways, and loaded."""
    found: list[str] = []

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            found.append(".".join(map(str, args)))

    mesh = init_device_mesh("cpu", (2,))
    group = dist.group.WORLD
    assert group is not None
    local = torch.full((2, 3), float(dist.get_rank()))
    tensors = {"all": torch.arange(4.0), "cut": DTensor.from_local(local, mesh, [Shard(0)])}
    sys.addaudithook(heard)
    save_checkpoint(folder, step=1, tensors=tensors, extra={}, group=group, keep=2)
    background = BackgroundSaver(folder, group=group, keep=2)
    background.start(step=2, tensors=tensors, extra={})
    background.finish()
    for tensor in tensors.values():
        tensor.zero_()
    loaded = load_latest(folder, tensors=tensors, group=group)
    assert loaded is not None
    assert loaded.step == 2
    cut = tensors["cut"]
    assert isinstance(cut, DTensor)
    assert torch.equal(cut.to_local(), torch.full((2, 3), float(dist.get_rank())))
    assert torch.equal(tensors["all"], torch.arange(4.0))
    return found


def test_ranks_that_save_and_load_unpickle_nothing(tmp_path: Path) -> None:
    assert run_distributed(_save_and_load, tmp_path, world_size=2, timeout=60) == [[], []]
