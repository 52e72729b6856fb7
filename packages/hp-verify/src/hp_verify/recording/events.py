"""The lines of a recording: one file for each process of a job."""

import math
import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from hp_base.errors import DataError
from hp_base.folder import why_not

NUM_SIGNS = 4
TERMS = 1e-3
"""Ranks that differ by more may have terms of a sum, where that can be."""

INPUT, FORWARD, LOSS, BACKWARD = "input", "forward", "loss", "backward"
GRADIENT, NORM, CLIPPED, RATE, WEIGHT, MOMENT = (
    "gradient",
    "gradient norm",
    "clipped gradient",
    "learning rate",
    "weight",
    "optimizer state",
)
START, EVALUATION = "first weight", "evaluation"
REAL = "^"
"""Begins the name of a sample's part that is no padding, where it has padding."""
OWN = "own gradient"
"""A rank's gradient before it is reduced. It is not compared: a loss may be scaled, and ranks may
have terms. It tells a wrong backward from a wrong reduction."""
PHASES = (
    START,
    EVALUATION,
    INPUT,
    FORWARD,
    LOSS,
    BACKWARD,
    GRADIENT,
    NORM,
    CLIPPED,
    RATE,
    WEIGHT,
    MOMENT,
)
"""In the order in which a step computes them."""

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: first and last + 1 index of each dim."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor.

    Attributes:
        box: Place of the part in the whole tensor.
        sums: `NUM_SIGNS` sums of the values, each with other signs.
        norm: 2-norm of the values.
        row: Name of the batch's sample; empty: the tensor is not made of samples.
    """

    box: Box
    sums: tuple[float, ...]
    norm: float
    row: str = ""


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A tensor that a process has computed, or the part of it that this process has.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
        phase: One of `PHASES`.
        name: Module or parameter, as the reference calls it.
        shape: Shape of the whole; of a batch's tensor that of one sample.
        dtype: Its dtype, without ``torch.``.
        pieces: The parts that are here.
        call: Which call of the module in this step and process, counted from 0.
        note: Reason why the tensor cannot be compared; empty: it can be.
        may_add: Whether ranks may have terms of it, of which it is the sum: a product with a matrix
            whose columns are cut, the gradient of what ranks use in different ways.
    """

    step: int
    phase: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    pieces: tuple[Piece, ...] = ()
    call: int = 0
    note: str = ""
    may_add: bool = False


class Number(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A number that a process has computed.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
        phase: One of `PHASES`.
        name: Which of several.
        value: The number.
        dtype: Dtype that it was computed in, without ``torch.``.
    """

    step: int
    phase: str
    name: str
    value: float
    dtype: str = "float32"


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Samples that a call of a root module was given.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
        call: Which call of a root module in this step and process.
        rows: A name for each sample; that of its content where it is made of tokens, or is the
            reference's.
        tokens: The samples' tokens; empty: the input has none, or too many to be written down.
        phase: `FORWARD` or `EVALUATION`.
        has_tokens: Whether the input is made of tokens, and so no other stage's output.
        real: First and last + 1 token of each sample that is no padding; empty: there is none.
    """

    step: int
    call: int
    rows: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] = ()
    phase: str = FORWARD
    has_tokens: bool = False
    real: tuple[tuple[int, int], ...] = ()

    @property
    def has_names(self) -> bool:
        """Tell whether samples are named by their content, and not by their place in a call."""
        return not any("." in row for row in self.rows)


class Randomness(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Random numbers of a process.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
        states: Generator -> name of its state when the step began.
        drawn: Generators that calls of root modules with gradients used.
        first: First module that had an output after torch's generator was used; empty: none.
    """

    step: int
    states: dict[str, str]
    drawn: tuple[str, ...] = ()
    first: str = ""


class Choice(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Choices of a module that gives indices beside scores, of consecutive tokens of a sample.

    Attributes:
        step: Number of the next update of the weights, counted from 1.
        name: Module, as the reference calls it.
        call: Call of a root module in this step and process, counted from 0.
        row: Name of the sample.
        first: First of the tokens.
        dtype: Dtype of the scores, without ``torch.``.
        place: Place of the scores among what the module gives.
        width: Number of choices of each token, K.
        chosen: Indices `[tokens, K]` int32, sorted.
        num_scored: Number of indices of each token whose scores are known, N.
        scored: These, int32 `[tokens, N]`: those chosen, and the next best.
        scores: Their scores, float64 `[tokens, N]`.
    """

    step: int
    name: str
    call: int
    row: str
    first: int
    dtype: str
    place: str
    width: int
    chosen: bytes
    num_scored: int
    scored: bytes
    scores: bytes


Line: TypeAlias = Event | Number | Rows | Randomness | Choice | dict[str, str]
"""A line of a recording; a dict holds facts about the process."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Line] = msgspec.msgpack.Decoder(Line)
_LENGTH = struct.Struct("<Q")


BATCHES, TENSORS = "batches", "rank"
"""How files begin that hold `Rows`, and all other lines."""
COUNTS = "alive"
"""How files begin that hold the number of updates which a process has made."""
SUFFIX = ".msgpack"
"""How they end: unlike JSON it has numbers that are not finite."""


_FIRST, _OTHERS, _LAST = 16, 8, 3
"""Steps that are kept of a long job: the first, most of those between, the last."""


class Steps:
    """Tells which steps of a job are written down, and which of these are kept.

    Nobody knows beforehand how many updates a job makes. So, unless a number is given, the first
    run of a reference writes every step down, each into files of its own, and removes some again:
    of the steps after the first 16 only multiples of a power of two stay, which doubles whenever
    more than 8 of them are there, and the last three. All other runs, and the job, write the steps
    that they find there, and one more, to see an update that the reference does not make.

    Args:
        most: Last step that is written down; 0: there is none.
        chosen: Steps that are written down; empty: all.
    """

    def __init__(self, most: int = 0, chosen: Collection[int] = ()) -> None:
        self._chosen, self._are_all = chosen, not most and not chosen
        self._most: float = most or max(chosen, default=math.inf)

    def stop(self) -> None:
        """Write nothing more down."""
        self._most = -1

    def are_over(self, step: int) -> bool:
        """Tell whether nothing of a step, or of any after it, is written down."""
        return step > self._most

    def has(self, step: int) -> bool:
        """Tell whether a step is written down, if it is not too late."""
        return not self._chosen or step in self._chosen

    def are_gone(self, step: int, newest: int) -> bool:
        """Tell whether a step is kept no longer once the job has come to a newer one."""
        stride = 1
        while newest // stride - _FIRST // stride > _OTHERS:
            stride *= 2
        is_between = _FIRST < step <= newest - _LAST
        return self._are_all and is_between and step % stride != 0


class Log:
    """Writes the lines of one process, each step into files of its own.

    Args:
        folder: The same for all processes of a job.
        process: Name of this one.
        steps: Steps to write.
    """

    def __init__(self, folder: Path, process: str, steps: Steps | None = None) -> None:
        self._folder, self._process, self._steps = folder, process, steps or Steps()
        self._lines: list[Line] = []

    def add(self, line: Line) -> None:
        """Note a line down; it is written with the others at `flush`."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write what was noted down, and remove steps that are kept no longer."""
        texts: dict[str, bytearray] = {}
        newest = 0
        for line in self._lines:
            step = 0 if isinstance(line, dict) else line.step
            newest = max(step, newest)
            if not step or self._steps.has(step):
                kind, text = BATCHES if isinstance(line, Rows) else TENSORS, _ENCODER.encode(line)
                name = f"{kind}-{self._process}-{step:06d}{SUFFIX}"
                texts.setdefault(name, bytearray()).extend(_LENGTH.pack(len(text)) + text)
        for name, some in texts.items():
            with (self._folder / name).open("ab") as file:
                file.write(some)
        self._lines.clear()
        rank = self._process.partition("-")[0]  # in whichever launch of the job
        for path in self._folder.glob(f"*-{rank}-*{SUFFIX}") if newest > _FIRST else ():
            if self._steps.are_gone(_step_of(path), newest):
                path.unlink(missing_ok=True)


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def process_of(path: Path) -> str:
    """Return the name of the process that has written a file of lines."""
    return path.stem.rpartition("-")[0].replace(BATCHES, TENSORS)


def steps_in(folder: Path) -> set[int]:
    """Return the steps of a recording, an evaluation after the last update among them."""
    return {_step_of(path) for path in folder.glob(f"{TENSORS}-*{SUFFIX}")} - {0}


def batches(folder: Path) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return samples of a recording: step -> sample -> its tokens, if they were written down.

    Of those that are padded the part that is not is there as well, by a name of its own.
    """
    known: dict[int, dict[str, tuple[int, ...]]] = {}
    for _, batch in rows_in(folder):
        tokens = batch.tokens or ((),) * len(batch.rows)
        here = known.setdefault(batch.step, {})
        here.update(zip(batch.rows, tokens, strict=True))
        for row, given, (first, last) in zip(batch.rows, tokens, batch.real, strict=False):
            if 0 < last - first < len(given):
                here[REAL + row] = given[first:last]
    return known


def rows_in(folder: Path) -> list[tuple[str, Rows]]:
    """Return what root modules of a job were given: process, samples."""
    return [
        (process_of(path), line)
        for path in sorted(folder.glob(f"{BATCHES}-*{SUFFIX}"))
        for line in read(path)
        if isinstance(line, Rows)
    ]


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a process.

    A line that is not whole ends them: the process was killed while it wrote.

    Raises:
        DataError: When the file is no recording.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > size - file.tell():
                return
            try:
                yield _DECODER.decode(file.read(length))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} must be a recording: {why_not(error)}") from None
