"""Begins a recording as soon as a program of the job has imported torch.

Python imports a module of this name at its start when its folder is on ``PYTHONPATH``, which is how
`hp-verify` reaches a program without changing it. The ``sitecustomize`` that it hides is run too.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - nothing is imported in vain


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that the program would have had."""
    elsewhere = [path for path in sys.path if os.path.realpath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _after_torch(_module: ModuleType) -> None:
    from importlib.metadata import entry_points  # noqa: PLC0415 - nothing is imported in vain

    from hp_verify.recording import begin, request  # noqa: PLC0415 - needs torch

    recorder = begin.begin(request.requested())
    for point in entry_points(group="hp_verify.trainers"):
        sys.meta_path.insert(0, _After(point.name, functools.partial(_listen, recorder, point)))


def _listen(recorder: Any, point: Any, module: ModuleType) -> None:
    """Hand the recording over to the recorder that a trainer brings, by its entry point."""
    point.load()(module, recorder.leave())


class _After(importlib.abc.MetaPathFinder):
    """Finds one module like anybody, and has something done once it is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_then(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            self._then(module)

        spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec


if "HP_VERIFY_JOB" in os.environ:
    if "torch" in sys.modules:  # by a .pth file, which comes before
        _after_torch(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _After("torch", _after_torch))
_run_hidden()
