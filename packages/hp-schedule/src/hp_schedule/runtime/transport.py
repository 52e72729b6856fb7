"""Messages over torch.distributed: a process group of its own for every directed edge.

Operations on one process group run in one order. If both directions, or several neighbours, shared
a group, an early posted receive would hold up sends behind it, and ranks could wait for each other
although the schedule is sound. With a group per directed edge the only order is that of the
messages of the edge, which `validate` has checked; messages need no tags.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import (
    FailureNote,
    Pending,
    break_group,
    default_note,
    explained,
    first_failure,
    irecv,
    isend,
    new_groups,
)
from hp_platform.collectives.pending import release_completed
from hp_schedule.schedule import Schedule
from hp_schedule.transport import Message, MessageKind

Edge = tuple[int, int]
"""Ranks of the pipeline: source, destination."""

_serial = count()  # calls of build_edge_groups, which every rank makes in one order


class EdgeGroups:
    """The process groups of this rank's edges; nobody else refers to them, so `close` closes them.

    Args:
        groups: Process groups by edge.
        note: Note in which a rank that fails leaves its reason.
    """

    def __init__(
        self, groups: Mapping[Edge, ProcessGroup], *, note: FailureNote | None = None
    ) -> None:
        self.note = FailureNote(None, "") if note is None else note
        self._groups = dict(groups)
        self._closed = False

    def __getitem__(self, edge: Edge) -> ProcessGroup:
        if self._closed:
            raise RuntimeError("edge groups must be open: they were closed after an error")
        return self._groups[edge]

    def __contains__(self, edge: object) -> bool:
        return edge in self._groups

    def close(self) -> None:
        """Close the connections of this rank; whoever waits at the other end fails."""
        self._closed = True
        while self._groups:
            close_group(self._groups.popitem()[1])


def close_group(group: ProcessGroup) -> None:
    """Close this rank's connections of a group; whoever waits at their other ends fails."""
    break_group(group)
    if not _uses_nccl(group):
        dist.destroy_process_group(group)


def build_edge_groups(
    pipelines: Sequence[Sequence[int]],
    *,
    edges: Iterable[Edge] | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> EdgeGroups:
    """Create the groups that pipelines side by side need; every rank of the world calls this.

    One number has travelled along each edge when this returns: NCCL connects two ranks at their
    first message, both of them waiting for it, which in a schedule could be one for the other.

    Args:
        pipelines: For each pipeline the global ranks of its ranks in order; disjoint, of equal
            length, the same on every caller.
        edges: Directed pairs of pipeline ranks; default all neighbours in a ring, both ways,
            which loop and V placements need at most.
        backend: ``"gloo"`` or ``"nccl"``; default that of the default group.
        timeout: Time-out of each message; default that of the default group.

    Raises:
        ValueError: If the pipelines differ in length or an edge is out of range.
    """
    num_ranks = len(pipelines[0]) if pipelines else 0
    if num_ranks == 0 or any(len(ranks) != num_ranks for ranks in pipelines):
        lengths = [len(ranks) for ranks in pipelines]
        raise ValueError(f"lengths of pipelines ({lengths}) must be equal and >= 1")
    wanted = sorted(
        set(_ring(num_ranks) if edges is None else edges), key=lambda edge: (*sorted(edge), edge)
    )
    pairs: dict[Edge, list[list[int]]] = {}
    for edge in wanted:
        source, destination = edge
        if source == destination or not all(0 <= rank < num_ranks for rank in edge):
            raise ValueError(f"edge ({edge}) must join two of {num_ranks} ranks")
        pairs[edge] = [sorted((ranks[source], ranks[destination])) for ranks in pipelines]
    names = {edge: f"pipeline {edge[0]}->{edge[1]}" for edge in wanted}
    # Every other edge of a pipeline is made at once: as many calls as a rank has edges, no matter
    # how long the pipeline is; two more around a ring of an odd number of ranks.
    made = new_groups(
        {names[edge]: pairs[edge] for edge in wanted}, backend=backend, timeout=timeout
    )
    groups = {edge: made[names[edge]] for edge in wanted if names[edge] in made}
    for (source, _), group in groups.items():
        _connect(group, [ranks[source] for ranks in pipelines])
    return EdgeGroups(groups, note=default_note(_note_key(pipelines)))


def _note_key(pipelines: Sequence[Sequence[int]]) -> str:
    """Return a key of this rank's pipeline and of this call, the same on all its ranks."""
    me = dist.get_rank() if dist.is_initialized() else 0
    mine = next((ranks for ranks in pipelines if me in ranks), ())
    return f"hp_schedule/failure/{next(_serial)}/{'-'.join(map(str, mine))}"


def _connect(group: ProcessGroup, sources: Sequence[int]) -> None:
    """Send a number from the rank of a pair that is among the sources to the other one."""
    me = dist.get_rank()
    (other,) = (rank for rank in dist.get_process_group_ranks(group) if rank != me)
    on_cuda = _uses_nccl(group)
    number = torch.zeros(1, device=torch.cuda.current_device() if on_cuda else "cpu")
    if me in sources:
        isend(number, other, group=group).wait()
    else:
        irecv(number, other, group=group).wait()
    if on_cuda:
        torch.cuda.synchronize()


def _uses_nccl(group: ProcessGroup) -> bool:
    return "nccl" in dist.get_backend(group)


def _ring(num_ranks: int) -> set[Edge]:
    pairs = {(rank, (rank + 1) % num_ranks) for rank in range(num_ranks if num_ranks > 1 else 0)}
    return pairs | {(b, a) for a, b in pairs}


class TorchTransport:
    """A `hp_schedule.transport.Transport` of tuples of tensors over process groups.

    Args:
        schedule: Schedule whose messages are to be moved.
        rank_of: The global rank of each rank of the pipeline.
        groups: Process groups of the edges, from `build_edge_groups`; may serve several transports
            in turn.
        max_sends_in_flight: A send of an edge waits for the one that many before it, which bounds
            the memory of sent values; with 0 for itself. Safe for every schedule that `validate`
            accepts; without effect on edges whose shapes are told in headers, where values live
            until a gradient comes back for them or the run ends.

    Raises:
        ValueError: If the pipeline has another size than the schedule, or a group is missing.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank_of: Sequence[int],
        groups: EdgeGroups,
        max_sends_in_flight: int = 8,
    ) -> None:
        if len(rank_of) != schedule.num_ranks:
            raise ValueError(
                f"len(rank_of) ({len(rank_of)}) must equal num_ranks ({schedule.num_ranks})"
            )
        if max_sends_in_flight < 0:
            raise ValueError(f"max_sends_in_flight ({max_sends_in_flight}) must be >= 0")
        me = dist.get_rank() if schedule.edges else None
        for edge in schedule.edges:
            if me in {rank_of[rank] for rank in edge} and edge not in groups:
                raise ValueError(f"edge ({edge}) of the schedule must have a group")
        self._rank_of = tuple(rank_of)
        self._groups = groups
        self._max_sends = max_sends_in_flight
        self._receives: dict[Message, list[Pending[Tensor]]] = {}
        self._sends = defaultdict[Edge, deque[tuple[Message, list[Pending[None]]]]](deque)
        self._unbounded: set[Edge] = set()

    def send(self, message: Message, value: Sequence[Tensor]) -> None:
        """Start to send tensors; they are kept alive until they have arrived."""
        edge = message.edge
        queue = self._sends[edge]
        if message.kind is MessageKind.HEADER:
            # What follows a header is asked for when it is needed, not where the schedule posts
            # it, so waiting for it here might never end.
            self._unbounded.add(edge)
        group, peer = self._groups[edge], self._rank_of[message.destination]
        queue.append((message, [isend(x, peer, group=group) for x in value if x.numel()]))
        if message.kind is MessageKind.REQUEST:
            return  # answered by a later message, so nobody may be there yet
        while len(queue) > self._max_sends and edge not in self._unbounded:
            _wait_all(queue.popleft()[1])

    def post_receive(self, message: Message, buffer: Sequence[Tensor]) -> None:
        """Start to receive into contiguous tensors of the sender's shapes and dtypes."""
        group, source = self._groups[message.edge], self._rank_of[message.source]
        self._receives[message] = [
            irecv(x, source, group=group) if x.numel() else Pending(x) for x in buffer
        ]

    def wait_receive(self, message: Message) -> tuple[Tensor, ...]:
        """Return the buffers of a posted receive, filled."""
        return tuple(pending.wait() for pending in self._receives.pop(message))

    def release_send(self, message: Message) -> None:
        """Let go of a message and those before it on its edge: they are known to have arrived."""
        queue = self._sends[message.edge]
        if any(message == sent for sent, _ in queue):
            while queue:
                sent, pending = queue.popleft()
                _wait_all(pending)
                if sent == message:
                    break

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for queue in self._sends.values():
            while queue:
                _wait_all(queue.popleft()[1])

    def abort(self, error: BaseException) -> BaseException:
        """Close this rank's connections: peers that wait for it fail within seconds."""
        first = first_failure(error, [self._groups.note])
        self._receives.clear()
        self._sends.clear()
        # Operations under way keep Gloo's connections open for as long as anything refers to them.
        release_completed(everything=True)
        self._groups.close()
        return explained(error, first)


def _wait_all(pendings: Sequence[Pending[None]]) -> None:
    for pending in pendings:
        pending.wait()
