"""Begins a recording as soon as a program of the job has imported torch.

Python imports a module of this name at its start when its folder is on ``PYTHONPATH``, which is how
`hp verify` reaches a program without changing it. The ``sitecustomize`` that it hides is run too.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - nothing is imported in vain


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that the program would have had."""
    elsewhere = [path for path in sys.path if os.path.realpath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _AfterTorch(importlib.machinery.PathFinder):
    """Finds torch like anybody, and has the recorder begin once it is imported."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_begin(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(cls)
            from hp_train.jobs.recorder import begin  # noqa: PLC0415 - needs torch

            begin()

        spec.loader.exec_module = then_begin  # type: ignore[method-assign]
        return spec


if "HP_VERIFY_JOB" in os.environ:
    sys.meta_path.insert(0, _AfterTorch)
_run_hidden()
