"""Entries that one process collects in a step before they are written."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from hp_base.dtypes import dtype_name
from hp_verify.recording import events as ev
from hp_verify.recording.digests import Digest, digest_of, sum_of_digests
from hp_verify.recording.events import Box, Event, Line, Log, Number, Piece, Steps
from hp_verify.recording.launches import rank_here, ranks_here
from hp_verify.recording.request import Request
from hp_verify.recording.values import Part, StepRecorder, parts_of


def log_of(folder: Path, rank: int, ranks: int, steps: Steps | None = None) -> Log:
    """Open the log of this process: it begins with facts, and versions of what is imported."""
    log = Log(folder, f"{rank:05d}-{os.getpid()}", steps)
    facts = {"rank": str(rank), "ranks": str(ranks), "program": " ".join(sys.argv)}
    versions = {
        name: str(text)
        for name, module in [*sys.modules.items()]
        if "." not in name
        and isinstance(text := getattr(module, "__dict__", {}).get("__version__"), str)
    }
    log.add({**versions, "Python": sys.version.split()[0], **facts})
    return log


class DigestRecorder(StepRecorder):
    """Writes down one rank's part of every step as digests, for a trainer that records itself.

    Args:
        request: Request to the job.
        rank: Rank of this process.
        ranks: Number of ranks.
        phases: Quantity -> phase, see `PHASES`, and how its names begin; others are left out.
        dtype: Dtype that numbers are computed in, without ``torch.``.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
    """

    def __init__(
        self,
        request: Request,
        rank: int,
        ranks: int,
        *,
        phases: Mapping[str, tuple[str, str]],
        dtype: str = "float32",
    ) -> None:
        self._steps = request.wanted()
        self._log = log_of(Path(request.folder), rank, ranks, self._steps)
        self._phases, self._dtype = phases, dtype
        self.step = 1

    def add(
        self,
        quantity: str,
        tensors: Mapping[str, Tensor | Part],
        *,
        in_every_step: bool = True,
    ) -> None:
        """See `StepRecorder`; all steps are kept."""
        del in_every_step
        for name, tensor in tensors.items() if quantity in self._phases else ():
            phase, begin = self._phases[quantity]
            for part in parts_of(tensor):
                self._tensor(phase, begin + name, part, dtype_name(part.values.dtype))

    def add_scalar(self, quantity: str, value: float) -> None:
        """See `StepRecorder`; a number that is not finite is left out."""
        phase, name = self._phases.get(quantity, ("", ""))
        if phase == ev.NORM:
            self.number(phase, name, value)
        elif phase and math.isfinite(value):
            number = torch.tensor(value, dtype=torch.float64)
            self._tensor(phase, name, Part(number, (), ()), self._dtype)

    def number(self, phase: str, name: str, value: float) -> None:
        """Note down a number that ranks have each of its own."""
        if not self._steps.are_over(self.step):
            self._log.add(Number(self.step, phase, name, value))

    def end_step(self) -> None:
        """Write what was noted down."""
        self._log.flush()

    def _tensor(self, phase: str, name: str, part: Part, dtype: str) -> None:
        is_over = self._steps.are_over(self.step - (phase == ev.EVALUATION))
        if part.values.numel() and not is_over and self._steps.has(self.step):
            is_float = part.values.is_floating_point()
            values = part.values if is_float else part.values.double()  # which has all integers
            pieces = digest_of(values, part.box).pieces()
            self._log.add(Event(self.step, phase, name, part.shape, dtype, pieces))


class Notes:
    """Collects the entries of a step and writes them.

    Args:
        folder: The same for all processes of a job.
        steps: Steps to write; others are dropped.
    """

    def __init__(self, folder: Path, steps: Steps | None = None) -> None:
        self._folder, self._steps = folder, steps
        self._log: Log | None = None
        self._tensors: list[tuple[Event, Sequence[Digest]]] = []
        self._own: dict[tuple[str, Box], tuple[tuple[int, ...], torch.dtype, list[Digest]]] = {}

    def add(self, event: Event, digests: Sequence[Digest] = ()) -> None:
        """Note a tensor down, to be written when the step ends.

        Args:
            event: The tensor, without its pieces.
            digests: Digests of the parts that are here; none where it could not be recorded.
        """
        self._tensors.append((event, digests))

    def forget(self, phase: str, name: str, box: Box) -> None:
        """Leave a part of a tensor out that was noted down and is not written yet."""
        self._tensors = [
            (event, digests)
            for event, digests in self._tensors
            if (event.phase, event.name) != (phase, name) or box not in [d.box for d in digests]
        ]

    def own(self, key: tuple[str, Box], like: tuple[tuple[int, ...], torch.dtype]) -> list[Digest]:
        """Return the list of a gradient's terms before its reduction, one a backward, to append to.

        Args:
            key: Parameter, and where the part is in it.
            like: Shape of the parameter, and dtype.
        """
        return self._own.setdefault(key, (*like, []))[-1]

    def write(self, line: Line) -> None:
        """Write a line at the next `flush`."""
        if self._log is None:
            self._log = log_of(self._folder, rank_here(), ranks_here(), self._steps)
        self._log.add(line)

    def flush(self, step: int) -> None:
        """Write all.

        Args:
            step: The step that gradients before their reduction are of.
        """
        for (name, _), (whole, dtype, terms) in self._own.items():
            own = Event(step, ev.OWN, name, whole, dtype_name(dtype), may_add=True)
            self.add(own, [sum_of_digests(terms)])
        for event, digests in self._tensors:
            by_shape: dict[tuple[int, ...], list[Piece]] = {}
            for digest in digests:
                by_shape.setdefault(digest.shape or event.shape, []).extend(digest.pieces())
            for shape, pieces in (by_shape or {event.shape: []}).items():
                self.write(replace(event, shape=shape, pieces=tuple(pieces)))
        self._tensors.clear()
        self._own.clear()
        if self._log is not None:
            self._log.flush()
