"""Proof that the operations of all ranks match and end: `prove`. No torch.

The traces of classes of ranks are extended to all ranks of the world (`hp_dry.proof.symmetry`).
Then the proof checks that all members of a communicator run the same operations in one order, that
every send has its receive, and that hosts, streams and communicators do not wait in a cycle by
NCCL's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hp_dry.cluster import Classes
from hp_dry.proof.matching import Problem, Sequences, described, mismatches
from hp_dry.proof.symmetry import Symmetry, family_of
from hp_dry.proof.waits import Waits
from hp_dry.trace import Collective, Event, HostMessage, Trace

_OWN = ("peer", "group", "at")
_MAKING = ("new_group", "split_group", "connect")


def prove(
    traces: Mapping[int, Trace] | Iterable[Trace],
    *,
    classes: Classes | Mapping[int, Sequence[int]] | None = None,
    launch_order_implicit: bool = False,
    eager_loading: bool = False,
) -> list[Problem]:
    """Find problems that prevent the ranks of a world from finishing.

    Args:
        traces: Traces of all representatives, by global rank or in any order.
        classes: Classes of the ranks, or the global ranks of each class by its representative;
            None: every rank has a trace.
        launch_order_implicit: Whether `NCCL_LAUNCH_ORDER_IMPLICIT` is set, so that NCCL runs
            operations of all communicators in the order of the host. If not, different orders on
            two ranks are a warning, since a GPU may have no room for both operations at a time.
        eager_loading: Whether `CUDA_MODULE_LOADING` is EAGER, so that torch's kernels are loaded
            before anything is launched. If not, the host waits for the device at the first launch
            of a kernel, as it always does for kernels of Triton.

    Returns:
        Problems, errors first; without problems, the recorded order of threads is proven to finish.
        Waits are checked only if there is no other problem, which would cause further ones.

    Raises:
        ValueError: If the traces and classes do not cover the world.
    """
    by_rank = dict(traces) if isinstance(traces, Mapping) else {t.rank: t for t in traces}
    if not by_rank:
        raise ValueError("traces must hold at least one")
    if not isinstance(classes, Classes):
        classes = Classes.of(classes, world_size=next(iter(by_rank.values())).world_size)
    symmetry = Symmetry(by_rank, classes)
    found = list(mismatches(symmetry, Sequences(symmetry)))
    if not found:
        waits = Waits(symmetry, in_launch_order=launch_order_implicit, eager=eager_loading)
        found += waits.problems()
    if not found and not launch_order_implicit:
        found += _launch_orders(symmetry)
    return found


def same_program(mine: Trace, other: Trace) -> str | None:
    """Compare the events of two ranks of a class, except for ranks, peers and groups.

    Returns:
        Description of the first difference; None if both ran the same program.
    """
    if _made(mine) != _made(other):
        return f"ranks {mine.rank} and {other.rank} make different groups"
    here, there = list(_comparable(mine)), list(_comparable(other))
    for number, (a, b) in enumerate(zip(here, there, strict=False)):
        if a[1] != b[1]:
            return (
                f"event {number + 1} differs: rank {mine.rank}: {_shown(a[0])}; "
                f"rank {other.rank}: {_shown(b[0])}"
            )
    if len(here) != len(there):
        return f"rank {mine.rank} has {len(here)} events, rank {other.rank} {len(there)}"
    return None


def _made(trace: Trace) -> list[str]:
    """List the groups in the order of their creation, without connections, which may differ."""
    making = (event for event in trace.events if isinstance(event, HostMessage))
    return [event.detail for event in making if event.op in _MAKING[:2]]


def _comparable(trace: Trace) -> Iterator[tuple[Event, tuple[object, ...]]]:
    for event in trace.events:
        if isinstance(event, HostMessage) and event.op in _MAKING:
            continue
        values = [getattr(event, name) for name in event.__struct_fields__ if name not in _OWN]
        if isinstance(event, Collective | HostMessage):
            values += (family_of(event.group), _distance(trace, event))
        yield event, (type(event).__name__, event.at.split(" < ")[0], *values)


def _distance(trace: Trace, event: Collective | HostMessage) -> int:
    ranks = trace.groups.get(event.group, ())
    if event.peer < 0 or event.peer not in ranks:
        return 0
    return (ranks.index(event.peer) - ranks.index(trace.rank)) % len(ranks)


def _shown(event: Event) -> str:
    if isinstance(event, Collective | HostMessage):
        return described(event)
    return f"{type(event).__name__} at {event.at}"


def _launch_orders(symmetry: Symmetry) -> Iterator[Problem]:
    """Yield the first two communicators whose operations two ranks launch in different orders."""
    launches = {
        rank: [event for event in symmetry.traces[rank].events if isinstance(event, Collective)]
        for rank in symmetry.classes.members
    }
    families = {rank: {family_of(e.group) for e in events} for rank, events in launches.items()}
    representative = symmetry.classes.representative
    seen: set[tuple[int, int, frozenset[str]]] = set()
    for rank in symmetry.example.values():
        mine = {family: symmetry.ranks(family, rank) for family in families[representative[rank]]}
        for other in sorted({other for ranks in mine.values() for other in ranks} - {rank}):
            shared = frozenset(f for f, ranks in mine.items() if other in ranks)
            pattern = (representative[rank], representative[other], shared)
            if len(shared) < 2 or representative[rank] == representative[other] or pattern in seen:
                continue
            seen.add(pattern)
            sides = [
                [
                    e
                    for e in launches[representative[each]]
                    if family_of(e.group) in shared and e.peer < 0
                ]
                for each in (rank, other)
            ]
            for a, b in zip(*sides, strict=False):
                if family_of(a.group) != family_of(b.group):
                    text = (
                        f"ranks {rank} and {other} launch operations of two communicators in "
                        f"different orders: rank {rank}: {described(a)} in {family_of(a.group)}; "
                        f"rank {other}: {described(b)} in {family_of(b.group)}"
                    )
                    yield Problem(
                        "launch order", (rank, other), (a.at, b.at), text, is_warning=True
                    )
                    return
