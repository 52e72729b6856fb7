"""Adapters of libraries that hide tensors from hooks of torch, one short file for each library.

An adapter says which values of which parameters its flat tensors hold, and tells of its own
clipping. Where a tensor is a view of another, or has values of the reference's parameters, nothing
need be said.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from hp_verify.recording.slices import Run

_LIBRARIES = {
    "fsdp1": "torch.distributed.fsdp._flat_param",
    "deepspeed": "deepspeed.runtime.engine",
    "megatron": "megatron.core.optimizer",
}

Held = tuple[Tensor, list[Run]]
"""Take in a flat tensor and the runs of parameters in it."""


class Listener(Protocol):
    """Calls by which an adapter tells the recorder of tensors and norms."""

    def hold(self, tensor: Tensor, runs: list[Run]) -> None:
        """Take in a flat tensor and the runs of parameters in it."""

    def before_clipping(self, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Take in parameters or flat tensors with their gradients, before these are clipped."""

    def clipped(self, norm: Tensor | float) -> None:
        """Take in the norm by which gradients were clipped."""

    def name_of(self, parameter: Tensor) -> str | None:
        """Return what the model calls a parameter; None: it is of no model that was called."""


class Adapter(Protocol):
    """A module of this package."""

    @staticmethod
    def held(root: nn.Module, named: Mapping[str, Tensor]) -> Iterator[Held]:
        """Yield the flat tensors of a model, of its optimizer too where that can be seen.

        Args:
            root: A root module, before it is called.
            named: Parameters of `root` by the names that their model gave them.
        """

    @staticmethod
    def listen(listener: Listener) -> None:
        """Tell of what torch has no hooks for, from now on."""


def adapters() -> "dict[str, Adapter]":
    """Return the adapters of libraries that this process has imported, by name.

    One whose library is of a version that it does not know is left out: tensors that nobody tells
    of are looked for by their values, or listed.
    """
    found: dict[str, Adapter] = {}
    for name, library in _LIBRARIES.items():
        if library in sys.modules:
            with contextlib.suppress(ImportError):
                found[name] = importlib.import_module(f"{__name__}.{name}")  # type: ignore[assignment]
    return found
