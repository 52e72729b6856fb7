"""Nothing that comes from another process or a file is unpickled: `hp_platform.messages`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
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
_ALLOWED = {
    # What a process pickles for its own child, through a pipe that nobody else can open.
    "hp_platform/testing/child.py: pickle",
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
        "import torch; torch.load(path, weights_only=False)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(_found(ast.parse(line)))
