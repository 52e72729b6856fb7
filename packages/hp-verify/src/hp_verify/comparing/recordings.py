"""A job's recording, put together from those of its processes: each step by phase and name.

Where a job calls a module more often than its reference, `matched` tells which calls are the same.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from hp_base.errors import NotComparableError
from hp_verify.recording.events import (
    BACKWARD,
    COUNTS,
    EVALUATION,
    FORWARD,
    NUM_SIGNS,
    REAL,
    START,
    SUFFIX,
    TENSORS,
    TERMS,
    WEIGHT,
    Box,
    Choice,
    Event,
    Line,
    Number,
    Piece,
    Randomness,
    Rows,
    process_of,
    read,
    rows_in,
)

CUT = "cut"
"""Name of a file in the folder of a run that was ended before its own end."""


@dataclass(slots=True)
class Digests:
    """A tensor put together: digests of what it is made of.

    Attributes:
        shape: Shape of it, or of one sample of it.
        dtype: Dtype of the tensor.
        rows: Sample -> sums with signs and norm; "" where it is not made of samples.
        disagree: Largest distance of ranks that hold the same part, relative to the norm.
        others: Sum of the squares of a part on ranks that hold other numbers of it than the first.
        who: Processes that hold this part.
        is_sum: Whether parts of several ranks were added up because they were not the same.
        problem: Reason why the tensor could not be put together; empty: it was.
        lost: Reason why results of some calls are missing; empty: none is.
        shapes: Sample -> its shape, of samples that have others than `shape`.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: dict[str, tuple[tuple[float, ...], float]] = field(default_factory=dict)
    disagree: float = 0.0
    others: float = 0.0
    who: str = ""
    is_sum: bool = False
    problem: str = ""
    lost: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """Return the 2-norm; where not all values are finite, that of what stands in for them."""
        return math.sqrt(sum(size_of(sums, norm) ** 2 for sums, norm in self.rows.values()))

    @property
    def total(self) -> float:
        """Return the 2-norm of all that ranks hold, where it is not the same."""
        return math.sqrt(self.norm**2 + self.others)

    @property
    def is_finite(self) -> bool:
        """Tell whether all of its numbers are."""
        return all(math.isfinite(norm) for _, norm in self.rows.values())

    def shape_of(self, row: str) -> tuple[int, ...]:
        """Return the shape of a sample."""
        return self.shapes.get(row, self.shape)

    def beside(self, reference: "Digests") -> "Digests":
        """Leave samples out of which both have the part that is no padding by itself."""
        both = self.rows.keys() & reference.rows.keys()
        return replace(self, rows={r: s for r, s in self.rows.items() if REAL + r not in both})

    def scaled(self, factors: Mapping[str, float]) -> "Digests":
        """Multiply samples by factors; a sample without one keeps its values."""
        if not factors:
            return self
        rows = {
            row: (tuple(factors.get(row, 1.0) * x for x in sums), factors.get(row, 1.0) * norm)
            for row, (sums, norm) in self.rows.items()
        }
        return replace(self, rows=rows)


@dataclass(slots=True)
class Step:
    """One step of a job.

    Attributes:
        tensors: Phase -> name -> tensor, in the order of recording.
        numbers: Phase -> name -> process -> numbers.
        dtypes: Phase -> dtypes in which its numbers were computed.
        rows: Names of the samples of the step's forward.
        states: Process -> generator of random numbers -> name of its state when the step began.
        drawn: Generators that the model used.
        drawing: First modules with an output after that, of any process.
        updated: Processes that have weights after an update.
        choices: Module -> choices of its tokens, by sample and first token.
    """

    tensors: dict[str, dict[str, Digests]] = field(default_factory=dict)
    numbers: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    states: dict[str, Mapping[str, str]] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    drawing: set[str] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    choices: dict[str, dict[tuple[str, int], Choice]] = field(default_factory=dict)

    @property
    def is_update(self) -> bool:
        """Say if weights were updated; else it is what was evaluated after the last update."""
        return bool(self.rows or self.numbers or self.tensors.keys() - {EVALUATION})


@dataclass(slots=True)
class Recording:
    """A job's recording.

    Attributes:
        steps: By index, from 1.
        facts: Rank and number of ranks, of each process.
        num_made: Updates that the job has made, recorded or not; 0: nobody counted them.
        end: Last step that may be compared, where the run was ended before its own end.
    """

    steps: dict[int, Step]
    facts: Sequence[Mapping[str, str]]
    num_made: int = 0
    end: float = math.inf

    @property
    def num_ranks(self) -> int:
        """Count ranks that have recorded something, in whichever launch of the job."""
        return len({facts["rank"] for facts in self.facts})

    @property
    def last(self) -> int:
        """Return the last step that was recorded, evaluation after it aside; 0: there is none."""
        return max((index for index, step in self.steps.items() if step.is_update), default=0)

    @property
    def num_steps(self) -> int:
        """Count updates of the weights, recorded or not."""
        return max(self.num_made, self.last)

    @property
    def updates(self) -> set[int]:
        """Return the steps whose weights after the update were recorded."""
        steps = self.steps.items()
        return {index for index, step in steps if step.is_update and WEIGHT in step.tensors}

    def is_whole(self, step: int) -> bool:
        """Tell whether every rank has recorded a step up to its update."""
        ranks = max((int(facts["ranks"]) for facts in self.facts), default=1)
        found = self.steps.get(step)
        return found is not None and len(found.updated) >= ranks

    def before_failing(self) -> "Recording":
        """Return the part before a failure: steps whose updates are whole."""
        done = {index: step for index, step in self.steps.items() if self.is_whole(index)}
        return Recording(done, self.facts, self.num_made, end=max(done, default=0))


class NothingRecordedError(NotComparableError):
    """No process of a job has trained anything under the recorder."""


def join(folder: Path) -> Recording:
    """Put a job's recording together.

    Args:
        folder: Folder that its processes wrote.

    Raises:
        NothingRecordedError: When none has.
    """
    files = sorted(folder.glob(f"{TENSORS}-*{SUFFIX}"))
    if not files:
        raise NothingRecordedError(
            f"no process of {folder} imported torch and called a module with parameters; "
            "is it Python that reads PYTHONPATH (no -I, -E or -S, and no job that "
            "sets it anew), with hp-verify installed? Updates by hand inside of a graph of "
            "torch.compile are not seen"
        )
    rows = rows_in(folder)
    steps: dict[int, Step] = defaultdict(Step)
    lines = [(process_of(path), line) for path in files for line in read(path)]
    held: dict[str, set[str]] = defaultdict(set)
    for who, line in lines:
        if isinstance(line, Event) and line.phase == START:
            held[who].add(line.name)
    names = sample_names(rows, held)
    for who, row in rows:
        if row.phase == FORWARD:
            steps[row.step].rows.update(
                names.get((who, row.step, row.call, r), r).removeprefix(REAL) for r in row.rows
            )
    facts: list[Mapping[str, str]] = []
    events: list[tuple[str, Event]] = []
    for who, line in lines:
        if isinstance(line, dict):
            facts.append(line)
            continue
        if isinstance(line, Event):
            events.append((who, line))
        _add_line(steps[line.step], who, line, names)
    _add_tensors(steps, events, names)
    counts = (int(path.read_bytes() or 0) for path in folder.glob(f"{COUNTS}-*.count"))
    found = Recording(dict(sorted(steps.items())), facts, max(counts, default=0))
    return found.before_failing() if (folder / CUT).exists() else found


def _add_line(step: Step, who: str, line: Line, names: "Mapping[Sample, str]") -> None:
    """Take in what a line tells of its step, but for the values of tensors."""
    match line:
        case Event(phase=phase) if phase == WEIGHT:
            step.updated.add(who)
        case Choice():
            sample = names.get((who, line.step, line.call, line.row), line.row)
            step.choices.setdefault(line.name, {}).setdefault((sample, line.first), line)
        case Number():
            by_name = step.numbers.setdefault(line.phase, {})
            by_name.setdefault(line.name, {}).setdefault(who, []).append(line.value)
            step.dtypes.setdefault(line.phase, set()).add(line.dtype)
        case Randomness():
            step.states[who] = line.states
            step.drawn.update(line.drawn)
            step.drawing.add(line.first)


Sample = tuple[str, int, int, str]
"""Process, step, call, name of a sample there."""


def sample_names(
    rows: Sequence[tuple[str, Rows]], held: Mapping[str, Collection[str]]
) -> dict[Sample, str]:
    """Name samples of later pipeline stages, which are given no tokens, and those of another input.

    Where a process that holds the same parameters is given what the reference saw in a call, others
    are given something else there, and not the same in another form: they have names of their own.

    Calls of a stage come in the order of those of the first one: the processes that saw tokens, or
    where nobody does what the reference saw, and the others of a stage, follow each other in the
    same order.

    Args:
        rows: Samples of calls, by process.
        held: Parameters of processes; those that have the same ones are no stages of each other.
    """
    names: dict[Sample, str] = {}
    for step in {row.step for _, row in rows}:
        first: dict[str, dict[int, Rows]] = {}
        later: dict[str, list[Rows]] = {}
        has_tokens = any(row.has_tokens for _, row in rows if row.step == step)
        for who, row in rows:
            if row.step == step and row.has_names and row.has_tokens == has_tokens:
                first.setdefault(who, {})[row.call] = row
            elif row.step == step:
                later.setdefault(who, []).append(row)
        calls = list(first.items())
        for index, (who, given) in enumerate(later.items()):
            for row in given if calls else []:
                other, some = calls[index % len(calls)]
                theirs = some.get(row.call)
                if theirs is not None and held.get(who) == held.get(other, ()):
                    own = ((mine, f"{who} {mine.replace('.', ' ')}") for mine in row.rows)
                    names |= {(who, step, row.call, mine): name for mine, name in own}
                elif theirs is not None and len(theirs.rows) == len(row.rows):
                    pairs = zip(row.rows, theirs.rows, strict=True)
                    names |= {(who, step, row.call, mine): other for mine, other in pairs}
    return names


def _add_tensors(
    steps: Mapping[int, Step],
    events: Iterable[tuple[str, Event]],
    names: Mapping[Sample, str],
) -> None:
    parts: dict[tuple[int, str, str], _Parts] = {}
    for who, event in events:
        key = event.step, event.phase, event.name
        if key not in parts:
            parts[key] = _Parts(event.shape, event.dtype)
        renamed = [
            (names.get((who, event.step, event.call, p.row), p.row) if p.row else "", p)
            for p in event.pieces
        ]
        is_lost = any("." in row for row, _ in renamed)
        told = structs.replace(event, note="its samples could not be told apart")
        parts[key].add(who, told if is_lost else event, renamed)
    for (step, phase, name), some in parts.items():
        steps[step].tensors.setdefault(phase, {})[name] = some.joined()


class _Parts:
    """A tensor while parts of it arrive."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._result = Digests(shape, dtype)
        self._pieces: dict[str, dict[Box, tuple[str, Piece]]] = defaultdict(dict)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, who: str, event: Event, pieces: Iterable[tuple[str, Piece]]) -> None:
        result = self._result
        if event.note:
            result.lost = result.lost or event.note
            return
        for row, piece in pieces:
            if event.shape != self._shapes.setdefault(row, event.shape):
                result.problem = f"shape {event.shape} of {who} is not {self._shapes[row]}"
                return
            boxes = self._pieces[row]
            if piece.box not in boxes:
                boxes[piece.box] = who, piece
                continue
            other, held = boxes[piece.box]
            sizes = (size_of(p.sums, p.norm) for p in (piece, held))
            apart = distance(piece.sums, held.sums) / max(*sizes, 1e-300)
            if event.may_add and apart > TERMS:
                boxes[piece.box] = who, _sum(piece, held)
                result.is_sum = True
                continue
            result.others += piece.norm**2 if apart > TERMS else 0.0
            if not apart <= result.disagree:  # NaN is the farthest
                result.disagree = apart
                result.who = f"{other.rpartition('-')[0]} and {who.rpartition('-')[0]}"

    def joined(self) -> Digests:
        result = self._result
        if not self._pieces:
            result.problem = result.problem or result.lost
        if result.problem:
            return result
        result.shapes = {row: own for row, own in self._shapes.items() if own != result.shape}
        for row, boxes in self._pieces.items():
            size = math.prod(self._shapes[row])
            here = sum(math.prod(end - begin for begin, end in box) for box in boxes)
            if here != size:
                result.problem = f"{here} of {size} values are on a rank, counted once each"
                return result
            pieces = [piece for _, piece in boxes.values()]
            sums = tuple(math.fsum(p.sums[k] for p in pieces) for k in range(NUM_SIGNS))
            result.rows[row] = sums, math.sqrt(math.fsum(piece.norm**2 for piece in pieces))
        return result


def _sum(piece: Piece, other: Piece) -> Piece:
    """Return what two terms of a sum add up to; its norm is what its sums with signs tell."""
    sums = tuple(x + y for x, y in zip(piece.sums, other.sums, strict=True))
    return Piece(piece.box, sums, math.sqrt(math.fsum(x * x for x in sums) / NUM_SIGNS), piece.row)


def size_of(sums: Sequence[float], norm: float) -> float:
    """Return the norm of a tensor; where it is not finite, the estimate by sums with signs."""
    return norm if math.isfinite(norm) else math.sqrt(math.fsum(x * x for x in sums) / NUM_SIGNS)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the norm of the difference of two tensors, estimated by their sums with signs."""
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / NUM_SIGNS)


def numbers_of(step: Step, phase: str, name: str = "") -> list[float]:
    """Return all numbers of a kind, of all processes."""
    return [value for some in step.numbers.get(phase, {}).get(name, {}).values() for value in some]


Apart = Callable[[Digests, Digests], float]
"""Relative distance of a tensor from the reference's; NaN: they cannot be compared."""


def matched(mine: Step, theirs: Step, apart: Apart) -> dict[str, int]:
    """Call the job's outputs as the reference does, where the job calls a module more often.

    Of calls of a module in one of the model the first is named as the module, others as ``#1`` and
    so on: one more shifts those after it.

    Args:
        mine: A step of the job, whose names are changed.
        theirs: The same of the reference.
        apart: Distance of two tensors.

    Returns:
        Output of a module -> how often more often than in the reference it was computed.
    """
    more: dict[str, int] = {}
    for phase, others in ((FORWARD, (FORWARD, BACKWARD)), (EVALUATION, ())):
        ours, expected = mine.tensors.get(phase, {}), theirs.tensors.get(phase, {})
        ours_by_base, by_base = _by_base(ours), _by_base(expected)
        for base, names in by_base.items():
            calls = ours_by_base.get(base, [])
            if len(calls) <= len(names):
                continue
            more[base] = len(calls) - len(names)
            chosen = _chosen(calls, names, lambda a, b: apart(ours[a], expected[b]))  # noqa: B023
            if [*chosen] != calls[: len(names)]:
                rest = [name for name in calls if name not in chosen]
                renamed = dict(zip([*chosen, *rest], calls, strict=True))
                for kind in others or (phase,):
                    _rename(mine.tensors.get(kind, {}), renamed)
    return more


def _by_base(names: Mapping[str, Digests]) -> dict[str, list[str]]:
    """Group names of calls by the output of a module, the first call first."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.partition("#")[0]].append(name)
    return {
        base: sorted(calls, key=lambda name: int(name.partition("#")[2] or 0))
        for base, calls in found.items()
    }


def _chosen(calls: list[str], names: list[str], apart: Callable[[str, str], float]) -> list[str]:
    """Return the job's calls that match the reference's, in order; else the first ones."""
    first, found = 0, []
    for index, name in enumerate(names):
        most = len(calls) - len(names) + index + 1
        near = [at for at in range(first, most) if apart(calls[at], name) <= TERMS]
        if not near:
            return calls[: len(names)]
        found.append(calls[near[0]])
        first = near[0] + 1
    return found


def _rename(tensors: dict[str, Digests], renamed: Mapping[str, str]) -> None:
    taken = {name: tensors.pop(name) for name in renamed if name in tensors}
    tensors.update({renamed[name]: tensor for name, tensor in taken.items()})
