"""Begin a recording as soon as a program of the job has imported torch.

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

TYPE_CHECKING = False  # as typing's, which is not imported in vain
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from hp_verify.recording.recorder import Recorder
    from hp_verify.recording.request import Request

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - nothing is imported in vain


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that the program would have had."""
    elsewhere = [path for path in sys.path if os.path.realpath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _Recording:
    """Records from when torch is imported until a trainer that records itself is."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._request: Request | None = None
        self._trainers: list[tuple[EntryPoint, ModuleType]] = []

    def watch(self) -> None:
        """Wait for torch, and for the trainers that entry points name."""
        from importlib.metadata import entry_points  # noqa: PLC0415 - nothing is imported in vain

        # Before torch: the first line of a trainer may import that.
        for point in entry_points(group="hp_verify.trainers"):
            after = functools.partial(self._after_trainer, point)
            sys.meta_path.insert(0, _After(point.name, after))
        if "torch" in sys.modules:  # by a .pth file, which comes before
            self._after_torch(sys.modules["torch"])
        else:
            sys.meta_path.insert(0, _After("torch", self._after_torch))

    def _after_torch(self, _module: ModuleType) -> None:
        from hp_verify.recording import begin, request  # noqa: PLC0415 - needs torch

        self._recorder = begin.begin(request.requested())
        self._hand_over(self._recorder)

    def _after_trainer(self, point: "EntryPoint", module: ModuleType) -> None:
        self._trainers.append((point, module))
        if self._recorder is not None:
            self._hand_over(self._recorder)

    def _hand_over(self, recorder: "Recorder") -> None:
        """Let each trainer that has come record itself."""
        while self._trainers:
            self._request = self._request or recorder.leave()
            point, module = self._trainers.pop()
            point.load()(module, self._request)


class _After(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, and calls a function once it is imported."""

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


if "HP_VERIFY_OPENED" in os.environ:
    from hp_verify.recording import opened

    opened.watch(os.environ["HP_VERIFY_OPENED"])
if "HP_VERIFY_JOB" in os.environ:
    _Recording().watch()
_run_hidden()
