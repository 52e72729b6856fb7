"""Comparison of the operations of all members of each communicator, to the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from hp_dry.proof.symmetry import Symmetry, family_of
from hp_dry.trace import Collective, HostMessage, Shapes

Operation = Collective | HostMessage
_MAKING = ("new_group", "split_group")


@dataclass(frozen=True, slots=True)
class Problem:
    """Mistake in the operations of several ranks.

    Attributes:
        kind: Kind of the problem: `"missing"`, `"operation"`, `"shape"`, `"dtype"`, `"splits"`,
            `"reduction"`, `"message"`, `"groups"`, `"deadlock"`, `"module load"` or
            `"launch order"`.
        ranks: Global ranks that differ, or that wait for each other.
        at: `file:line` of each of these ranks, in the same order; "" where there is none.
        text: Description of the problem.
        is_warning: Whether its effect depends on the machine.
    """

    kind: str
    ranks: tuple[int, ...]
    at: tuple[str, ...]
    text: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{'warning: ' if self.is_warning else ''}{self.kind}: {self.text}"


def channel_of(event: Operation) -> str:
    """Return the channel of a communicator in whose order an operation runs."""
    if isinstance(event, Collective):
        return "device"
    if event.op in _MAKING:
        return "making"
    return "connecting" if event.op == "connect" else "host"


def described(event: Operation) -> str:
    """Describe an operation with its line."""
    listed = " ".join(f"{dtype}{list(shape)}" for shape, dtype in _given(event)[:3])
    words = [event.op, listed, event.detail]
    if event.peer >= 0:
        words.append(f"{'to' if event.op == 'send' else 'from'} rank {event.peer}")
    place = f" ({event.place})" if event.place else ""
    return " ".join(filter(None, words)) + f" at {event.at}{place}"


class Sequences:
    """Operations of all representatives by communicator.

    Attributes:
        collectives: Collective operations, by representative, channel and family.
        messages: Messages, by representative, channel, family, whether it sends, distance and tag.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.collectives: dict[tuple[int, str, str], list[Operation]] = {}
        self.messages: dict[tuple[int, str, str, bool, int, str], list[Operation]] = {}
        for rank in symmetry.classes.members:
            for event in symmetry.traces[rank].events:
                if not isinstance(event, Collective | HostMessage):
                    continue
                channel, family = channel_of(event), family_of(event.group)
                if event.peer < 0:
                    self.collectives.setdefault((rank, channel, family), []).append(event)
                    continue
                distance = symmetry.distance(event, rank)
                tag = "" if channel == "device" else event.detail
                message = (rank, channel, family, event.op == "send", distance, tag)
                self.messages.setdefault(message, []).append(event)


def mismatches(symmetry: Symmetry, sequences: Sequences) -> Iterator[Problem]:
    """Yield the first difference in every communicator; equal communicators are compared once."""
    yield from _other_groups(symmetry)
    yield from _collectives(symmetry, sequences)
    yield from _messages(symmetry, sequences)


def _other_groups(symmetry: Symmetry) -> Iterator[Problem]:
    for name, ranks in {
        (name, ranks)
        for trace in symmetry.traces.values()
        for name, ranks in trace.groups.items()
        if "pair[" not in name
    }:
        family = family_of(name)
        for rank in ranks:
            if not symmetry.is_known(family, rank) or symmetry.ranks(family, rank) != ranks:
                text = f"rank {rank} is in no group {name}, as rank {ranks[0]} believes"
                yield Problem("groups", (ranks[0], rank), ("", ""), text)
                break


def _collectives(symmetry: Symmetry, sequences: Sequences) -> Iterator[Problem]:
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    representative = symmetry.classes.representative
    for rank in symmetry.example.values():
        for traced, channel, family in sequences.collectives:
            if traced != representative[rank]:
                continue
            ranks = symmetry.ranks(family, rank)
            pattern = (channel, family, tuple(representative[other] for other in ranks))
            if pattern in seen:
                continue
            seen.add(pattern)
            if problem := _first_difference(sequences, symmetry, ranks, channel, family):
                yield problem


def _first_difference(
    sequences: Sequences, symmetry: Symmetry, ranks: Sequence[int], channel: str, family: str
) -> Problem | None:
    """Return the first difference between the operations of the members, in order."""
    representative = symmetry.classes.representative
    by_traced = {representative[rank]: rank for rank in reversed(ranks)}
    lists = {
        traced: sequences.collectives.get((traced, channel, family), []) for traced in by_traced
    }
    first = representative[ranks[0]]
    for number in range(max(map(len, lists.values()))):
        mine = lists[first][number] if number < len(lists[first]) else None
        for traced, member in by_traced.items():
            other = lists[traced][number] if number < len(lists[traced]) else None
            if other is not mine and (found := _differ(mine, other)):
                pair = ((ranks[0], mine), (member, other))
                return _difference(found, family, number, pair, symmetry)
        events = {rank: lists[representative[rank]][number] for rank in ranks}
        if problem := _splits_differ(events, ranks, family, number):
            return problem
    return None


def _difference(
    kind: str,
    family: str,
    number: int,
    pair: Sequence[tuple[int, Operation | None]],
    symmetry: Symmetry,
) -> Problem:
    words = []
    for rank, event in pair:
        last = next((e.at for e in reversed(symmetry.trace_of(rank).events) if e.at), "")
        nothing = f"nothing more, last seen at {last}" if last else "nothing more"
        words.append(f"rank {rank}: {nothing if event is None else described(event)}")
    what = f"operation {number + 1} of {family} differs: " + "; ".join(words)
    at = tuple("" if event is None else event.at for _, event in pair)
    return Problem(kind, tuple(rank for rank, _ in pair), at, what)


def _differ(mine: Operation | None, other: Operation | None) -> str | None:
    """Name the difference of the operations of two members; None if they match."""
    if mine is None or other is None:
        return "missing"
    if mine.op != other.op:
        return "operation"
    if mine.detail != other.detail:
        return "groups" if mine.op in _MAKING else "reduction"
    here, there = _given(mine), _given(other)
    if {dtype for _, dtype in here} != {dtype for _, dtype in there}:
        return "dtype"
    return None if _fit(mine, other, here, there) else "shape"


def _fit(mine: Operation, other: Operation, here: Shapes, there: Shapes) -> bool:
    """Tell whether the shapes of two members match for one operation."""
    if mine.op == "all_to_all":
        ends = {shape[1:] for shape, _ in (*here, *there)}
        return len(ends) == 1 or (isinstance(mine, Collective) and len(mine.inputs) > 1)
    if isinstance(mine, Collective) and isinstance(other, Collective):
        if mine.op == "scatter" or (mine.op == "all_gather" and len(mine.outputs) > 1):
            return mine.outputs == other.outputs
        return here == there
    return here == there or mine.op in ("scatter", "gather")


def _given(event: Operation) -> Shapes:
    return (event.inputs or event.outputs) if isinstance(event, Collective) else event.shapes


def _splits_differ(
    events: dict[int, Operation], ranks: Sequence[int], family: str, number: int
) -> Problem | None:
    """Return a problem if a member sends other rows than their receiver expects."""
    first = events[ranks[0]]
    if not isinstance(first, Collective) or first.op != "all_to_all":
        return None
    tables: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
    for event in events.values():
        assert isinstance(event, Collective)
        if id(event) not in tables:
            tables[id(event)] = (
                _rows(event.inputs, event.input_splits, event, len(ranks)),
                _rows(event.outputs, event.output_splits, event, len(ranks)),
            )
    if len({n for pair in tables.values() for side in pair for n in side}) == 1:
        return None
    for place, rank in enumerate(ranks):
        sent = tables[id(events[rank])][0]
        for other, receiver in enumerate(ranks):
            expected = tables[id(events[receiver])][1]
            if sent[other] != expected[place]:
                text = (
                    f"operation {number + 1} of {family}: rank {rank} sends rank {receiver} "
                    f"{sent[other]} rows, which expects {expected[place]}: rank {rank}: "
                    f"{described(events[rank])}; rank {receiver}: {described(events[receiver])}"
                )
                at = (events[rank].at, events[receiver].at)
                return Problem("splits", (rank, receiver), at, text)
    return None


def _rows(side: Shapes, splits: Sequence[int], event: Collective, size: int) -> Sequence[int]:
    if len(event.inputs) > 1:
        return [prod(shape) for shape, _ in side]
    return splits or [(side[0][0][0] if side and side[0][0] else 0) // size] * size


def _messages(symmetry: Symmetry, sequences: Sequences) -> Iterator[Problem]:
    representative = symmetry.classes.representative
    reported: set[frozenset[int]] = set()
    for rank in symmetry.example.values():
        for key, events in sequences.messages.items():
            traced, channel, family, sends, distance, tag = key
            if traced != representative[rank]:
                continue
            other = symmetry.at_distance(family, rank, distance if sends else -distance)
            others = sequences.messages.get(
                (representative[other], channel, family, not sends, distance, tag), []
            )
            pair = frozenset((rank, other))
            if pair not in reported and (
                problem := _unmatched((rank, events), (other, others), family)
            ):
                reported.add(pair)
                yield problem


def _unmatched(
    mine: tuple[int, Sequence[Operation]], theirs: tuple[int, Sequence[Operation]], family: str
) -> Problem | None:
    (rank, events), (other, others) = mine, theirs
    for number, event in enumerate(events):
        if number >= len(others):
            what = "send" if event.op == "recv" else "receive"
            text = (
                f"rank {rank}: {described(event)}: message {number + 1} in {family}; "
                f"rank {other} has no {what} for it"
            )
            return Problem("message", (rank, other), (event.at,), text)
        match = others[number]
        if _content(event) != _content(match):
            text = (
                f"message {number + 1} between ranks {rank} and {other} in {family} differs: "
                f"rank {rank}: {described(event)}; rank {other}: {described(match)}"
            )
            return Problem("message", (rank, other), (event.at, match.at), text)
    return None


def _content(event: Operation) -> tuple[tuple[int, str], ...]:
    """Return the numbers of elements and dtypes, since the shapes of a message may differ."""
    return tuple((prod(shape), dtype) for shape, dtype in _given(event))
