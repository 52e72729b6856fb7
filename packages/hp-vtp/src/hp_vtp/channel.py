"""One edge at work: runs the steps of a transfer on the groups that belong to the edge alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import Pending, irecv, isend
from hp_vtp.bundle import Message, MessageStep
from hp_vtp.header import SIZE, Header
from hp_vtp.packing import Workspace, pack, receive_buffer, unpack
from hp_vtp.stages import Edge

# Gloo matches by tag as well as by order; NCCL's control traffic has a group of its own.
_PAYLOAD, _HEADER = 0, 1


class TransferError(RuntimeError):
    """A transfer failed, and the edge with it: its later transfers fail at once.

    Attributes:
        edge: Where.
        peers: Global ranks that this rank was waiting for.
    """

    def __init__(self, message: str, *, edge: Edge, peers: Sequence[int] = ()) -> None:
        """Take the message, which names the edge and the peers already."""
        super().__init__(message)
        self.edge = edge
        self.peers = tuple(peers)


class Channel:
    """This rank's end of an edge."""

    def __init__(
        self, edge: Edge, group: ProcessGroup, control: ProcessGroup, *, rank: int, check: bool
    ) -> None:
        """Take the groups of the edge.

        Args:
            edge: What the groups connect.
            group: Carries the payload.
            control: Carries headers in CPU tensors; may be `group` on gloo.
            rank: Global rank of this process.
            check: Exchange headers before each transfer.
        """
        self.edge = edge
        self._group = group
        self._control = control
        self._rank = rank
        self._check = check
        self._number = 0  # transfers so far: both ends count alike, or the headers differ
        self._failure: str | None = None

    def run(
        self, steps: Sequence[MessageStep], workspaces: Sequence[Workspace], description: str
    ) -> None:
        """Run this rank's part of a transfer and wait until it is done.

        Args:
            steps: Of the transfer, the same on every rank of the edge.
            workspaces: Of each tensor; read by a sender, filled by a receiver.
            description: Of the tensors; must be the same at both ends.

        Raises:
            TransferError: If a peer is lost or late, or describes the transfer differently.
        """
        if self._failure is not None:
            raise TransferError(f"{self._where()}: failed before: {self._failure}", edge=self.edge)
        header = Header.of(f"transfer {self._number}: {description}")
        self._number += 1
        try:
            if self._check:
                self._agree(header)
            sends = [
                send
                for step in steps
                if (mine := [m for m in step.messages if self._rank in (m.sender, m.receiver)])
                for send in self._run_step(step, mine, workspaces)
            ]
            self._wait(sends, "sending")
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise

    def close(self) -> None:
        """Destroy the groups, unless `destroy_process_group` has destroyed all groups already."""
        if not dist.is_initialized():
            return
        groups = [self._group] if self._control is self._group else [self._group, self._control]
        for group in groups:
            dist.destroy_process_group(group)

    def _run_step(
        self,
        step: MessageStep,
        mine: Sequence[Message],
        workspaces: Sequence[Workspace],
    ) -> list[tuple[int, Pending[Any]]]:
        """Complete what this rank receives in a step and return its sends under way."""
        sends: list[tuple[int, Pending[Any]]] = []
        arriving: list[tuple[int, Pending[Any]]] = []
        buffers: list[tuple[Message, Tensor]] = []
        for message in mine:  # the order that keeps blocking transfers free of deadlock
            peer = message.peer_of(self._rank)
            if message.sender == self._rank:
                payload = pack(message, workspaces)
                sends.append((peer, isend(payload, peer, group=self._group, tag=_PAYLOAD)))
            else:
                buffer = receive_buffer(message, workspaces)
                buffers.append((message, buffer))
                arriving.append((peer, irecv(buffer, peer, group=self._group, tag=_PAYLOAD)))
        self._wait(arriving, f"{step}, receiving")
        for message, buffer in buffers:
            unpack(message, buffer, workspaces)
        return sends

    def _agree(self, header: Header) -> None:
        """Exchange headers with the peers of this rank at the other end.

        The peers depend on the edge alone, since ranks that disagree about the tensors may plan
        different messages. Every rank has one at least, so both ends raise.
        """
        data = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
        peers = header_peers(self.edge, self._rank)
        sends: list[tuple[int, Pending[Any]]] = [
            (peer, isend(data, peer, group=self._control, tag=_HEADER)) for peer in peers
        ]
        buffers = [torch.empty(SIZE, dtype=torch.uint8) for _ in peers]
        arriving: list[tuple[int, Pending[Any]]] = [
            (peer, irecv(buffer, peer, group=self._control, tag=_HEADER))
            for peer, buffer in zip(peers, buffers, strict=True)
        ]
        self._wait(arriving, "header")
        self._wait(sends, "header")
        theirs = [Header.decode(bytes(buffer.tolist())) for buffer in buffers]
        wrong = {
            peer: their.text
            for peer, their in zip(peers, theirs, strict=True)
            if not their.matches(header)
        }
        if wrong:
            raise TransferError(
                f"{self._where()}: this rank's transfer ({header.text}) must equal that of ranks "
                f"{list(wrong)} ({next(iter(wrong.values()))})",
                edge=self.edge,
                peers=list(wrong),
            )

    def _wait(self, waits: Sequence[tuple[int, Pending[Any]]], doing: str) -> None:
        for position, (_, pending) in enumerate(waits):
            try:
                pending.wait()
            except RuntimeError as error:
                peers = [peer for peer, _ in waits[position:]]
                cause = str(error).splitlines()[0]
                raise TransferError(
                    f"{self._where()}, {doing}: waiting for ranks {peers}: {cause}",
                    edge=self.edge,
                    peers=peers,
                ) from error

    def _where(self) -> str:
        return f"rank {self._rank}, {self.edge}"


def header_peers(edge: Edge, rank: int) -> list[int]:
    """Ranks at the other end of an edge that a rank exchanges headers with; at least one."""
    sources, destinations = edge.source_ranks, edge.destination_ranks
    a, b = len(sources), len(destinations)
    pairs = {(sources[j * a // b], destinations[j]) for j in range(b)}
    pairs |= {(sources[i], destinations[i * b // a]) for i in range(a)}
    return sorted(pair[1] if pair[0] == rank else pair[0] for pair in pairs if rank in pair)
