"""One edge at work: runs the steps of a transfer on the groups that belong to the edge alone.

Note [By host]. A receive on a GPU is a kernel that waits for the sender's. The first launch of any
kernel loads its module, which waits for all that the device was given, and lets no other thread
launch meanwhile: with a receive on the device and the rank's own sends still to come from another
thread, two ranks can wait for each other for ever. So what a program does for the first time, it
does while messages go through the memory of the hosts: nothing on a device waits for another rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import Pending, irecv, isend, new_groups
from hp_vtp.messages import (
    HEADER_SIZE,
    Message,
    MessageStep,
    Workspace,
    pack,
    receive_buffer,
    text_of,
    to_header,
    unpack,
)
from hp_vtp.plan import StepKind
from hp_vtp.topology import Edge, PipelineLayout
from hp_vtp.transport.handles import TransferError

# Gloo matches by tag as well as by order; NCCL's control traffic has a group of its own.
_PAYLOAD, _HEADER = 0, 1


@dataclass(frozen=True, slots=True)
class EdgeGroups:
    """The process groups of one edge.

    Attributes:
        cross: Group for messages across the cut and within the source stage.
        local: Group for messages within the destination stage; `cross` itself on Gloo, which has no
            order between messages of different pairs of ranks.
        control: Group for headers in CPU tensors; `cross` itself on Gloo.
    """

    cross: ProcessGroup
    local: ProcessGroup | None
    control: ProcessGroup

    @property
    def distinct(self) -> list[ProcessGroup]:
        """Return each group once."""
        groups = [self.cross, self.local, self.control]
        return list({id(group): group for group in groups if group is not None}.values())


@dataclass(slots=True)
class _Arrival:
    """A message that is being received."""

    message: Message
    buffer: Tensor
    pending: Pending[Tensor]
    step: MessageStep
    is_here: bool = False


class Channel:
    """This rank's end of an edge. One thread uses it."""

    def __init__(self, edge: Edge, groups: EdgeGroups, *, rank: int) -> None:
        """Take the groups of the edge and the global rank of this process."""
        self.edge = edge
        self.groups = groups
        self.waiting_for: tuple[int, ...] = ()
        self._rank = rank

    def run(
        self,
        steps: Sequence[MessageStep],
        workspaces: Sequence[Workspace],
        *,
        header: str | None,
        where: str,
        by_host: bool = False,
    ) -> None:
        """Run this rank's part of a transfer; on a CPU it is done on return, on CUDA issued.

        Args:
            steps: Steps of the transfer, the same on every rank of the edge.
            workspaces: Workspace of each tensor; read by a sender, filled by a receiver.
            header: Text that is shown to the other end first; None if they have agreed before.
            where: Beginning of the messages of errors.
            by_host: Whether messages go through the memory of the hosts (Note [By host]).

        Raises:
            TransferError: If a peer is lost or late, or describes the transfer differently.
        """
        if header is not None:
            self.agree(header, where)
        arrivals: list[_Arrival] = []
        sends: list[tuple[int, Pending[None]]] = []
        # All receives over the cut are under way before the first wait, so that later chunks cross
        # while earlier ones are spread.
        for step in sorted(steps, key=lambda step: step.kind == StepKind.SPREAD):
            for message in step.messages:  # in one order on all ranks; see MessageStep
                if message.sender == self._rank:
                    needed = [a for a in arrivals if _overlap(message, a.message)]
                    self._complete(needed, workspaces, where)
                    payload, to = pack(message, workspaces), message.receiver
                    payload = payload.cpu() if by_host else payload
                    group = self._group(step, by_host=by_host)
                    pending = isend(payload, to, group=group, tag=_PAYLOAD)
                    sends.append((to, pending))
                elif message.receiver == self._rank:
                    buffer, sender = receive_buffer(message, workspaces), message.sender
                    buffer = torch.empty_like(buffer, device="cpu") if by_host else buffer
                    group = self._group(step, by_host=by_host)
                    coming = irecv(buffer, sender, group=group, tag=_PAYLOAD)
                    arrivals.append(_Arrival(message, buffer, coming, step))
        self._complete(arrivals, workspaces, where)
        self._wait(sends, f"{where}, sending")

    def agree(self, header: str, where: str) -> None:
        """Exchange headers of this text with ranks at the other end.

        Gloo takes a message of a wrong type without a word and ends the process if one is too long.
        So no byte of a tensor moves before both ends have shown each other what they are about to
        transfer. A rank shows it to few others, but the pairs connect all ranks of the edge: if any
        two disagree, so do the two ends of some pair, and both of those raise.

        The peers depend on the edge alone, since ranks that disagree about the tensors may plan
        different messages.

        Raises:
            TransferError: If a peer is lost or late, or shows another header.
        """
        mine = to_header(header)
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        peers, group = header_peers(self.edge, self._rank), self.groups.control
        sends = [(peer, isend(data, peer, group=group, tag=_HEADER)) for peer in peers]
        buffers = [torch.empty(HEADER_SIZE, dtype=torch.uint8) for _ in peers]
        arriving = [
            (peer, irecv(buffer, peer, group=group, tag=_HEADER))
            for peer, buffer in zip(peers, buffers, strict=True)
        ]
        self._wait(arriving, f"{where}, header")
        self._wait(sends, f"{where}, header")
        theirs = [bytes(buffer.tolist()) for buffer in buffers]
        wrong = {
            peer: text_of(their) for peer, their in zip(peers, theirs, strict=True) if their != mine
        }
        if wrong:
            raise TransferError(
                f"{where}: this rank's transfer ({header}) must equal that of ranks "
                f"{list(wrong)} ({next(iter(wrong.values()))})",
                edge=self.edge,
                peers=list(wrong),
            )

    def _group(self, step: MessageStep, *, by_host: bool) -> ProcessGroup:
        if by_host:
            return self.groups.control
        if step.kind == StepKind.SPREAD and self.groups.local is not None:
            return self.groups.local
        return self.groups.cross

    def _complete(
        self, arrivals: Sequence[_Arrival], workspaces: Sequence[Workspace], where: str
    ) -> None:
        """Wait for some messages and put them in their places."""
        missing = [arrival for arrival in arrivals if not arrival.is_here]
        peers = [arrival.message.sender for arrival in missing]
        for position, arrival in enumerate(missing):
            doing = f"{where}, {arrival.step}, receiving"
            self._wait_one(arrival.pending, peers[position:], doing)
            unpack(arrival.message, arrival.buffer, workspaces)
            arrival.is_here = True

    def _wait(
        self, waits: Sequence[tuple[int, Pending[None] | Pending[Tensor]]], doing: str
    ) -> None:
        peers = [peer for peer, _ in waits]
        for position, (_, pending) in enumerate(waits):
            self._wait_one(pending, peers[position:], doing)

    def _wait_one(
        self, pending: Pending[None] | Pending[Tensor], peers: Sequence[int], doing: str
    ) -> None:
        self.waiting_for = tuple(dict.fromkeys(peers))
        try:
            pending.wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise TransferError(
                f"{doing}: waiting for ranks {list(self.waiting_for)}: {cause}",
                edge=self.edge,
                peers=self.waiting_for,
            ) from error
        self.waiting_for = ()


def header_peers(edge: Edge, rank: int) -> list[int]:
    """Return the ranks at the other end of an edge that a rank sends headers to; at least one.

    Source i stands for [i / a, (i + 1) / a], destination j for [j / b, (j + 1) / b]. Walking along
    both, neighbours exchange: a + b - 1 pairs that connect all ranks.
    """
    sources, destinations = edge.source_ranks, edge.destination_ranks
    a, b = len(sources), len(destinations)
    i = j = 0
    pairs = [(sources[0], destinations[0])]
    while (i, j) != (a - 1, b - 1):
        if j == b - 1 or (i < a - 1 and (i + 1) * b <= (j + 1) * a):
            i += 1
        else:
            j += 1
        pairs.append((sources[i], destinations[j]))
    return sorted(pair[1] if pair[0] == rank else pair[0] for pair in pairs if rank in pair)


def _overlap(message: Message, arrival: Message) -> bool:
    """Tell whether a message passes on units that another one brings."""
    return any(
        piece.tensor == other.tensor and piece.start < other.stop and other.start < piece.stop
        for piece in message.pieces
        for other in arrival.pieces
    )


def build_edge_groups(
    layout: PipelineLayout,
    *,
    name: str,
    backend: str,
    timeout: timedelta | None = None,
) -> dict[Edge, EdgeGroups]:
    """Create and connect the groups of all edges; return those of this rank's edges.

    Every rank of the world calls this with the same arguments, whether it has an edge or not: torch
    lets no rank skip the creation of a group, and a group that is connected late may connect while
    others wait for it.

    Args:
        layout: Layout whose edges get groups.
        name: Beginning of the names of all groups.
        backend: Backend of the groups that carry tensors.
        timeout: Time-out of each operation; by default that of the default group.
    """
    names = _names(layout, name)

    def lists(ending: str, ranks_of: Callable[[Edge], Sequence[int]]) -> dict[str, list[list[int]]]:
        """Return the ranks of all groups of a name, which have no rank in common."""
        found: dict[str, list[list[int]]] = {}
        for edge in layout.edges:
            if len(ranks := ranks_of(edge)) > 1:
                found.setdefault(names[edge] + ending, []).append([*ranks])
        return found

    cross = new_groups(lists("", lambda edge: edge.ranks), backend=backend, timeout=timeout)
    mine = [edge for edge in layout.edges if dist.get_rank() in edge.ranks]
    if backend == "gloo":
        return {edge: EdgeGroups(*[cross[names[edge]]] * 3) for edge in mine}
    control = new_groups(
        lists("/control", lambda edge: edge.ranks), backend="gloo", timeout=timeout
    )
    local = new_groups(
        lists("/local", lambda edge: sorted(edge.destination_ranks)),
        backend=backend,
        timeout=timeout,
    )
    return {
        edge: EdgeGroups(
            cross[names[edge]],
            local.get(f"{names[edge]}/local"),
            control[f"{names[edge]}/control"],
        )
        for edge in mine
    }


def _names(layout: PipelineLayout, name: str) -> dict[Edge, str]:
    """Name edges; edges of one purpose with different ranks share a name over all domains."""
    found: dict[Edge, str] = {}
    taken: dict[str, set[int]] = {}
    for edge in layout.edges:
        numbered = (f"{name}/{edge.source}-{edge.destination}/{number}" for number in count())
        found[edge] = next(x for x in numbered if taken.get(x, set()).isdisjoint(edge.ranks))
        taken.setdefault(found[edge], set()).update(edge.ranks)
    return found
