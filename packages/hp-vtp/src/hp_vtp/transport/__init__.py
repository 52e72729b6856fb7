"""Move tensors between the stages of a layout, asynchronously, each edge on groups of its own."""

from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import break_group, explained
from hp_vtp.messages import TensorMeta, Workspace, bundle, describe, own_metas, require_parts
from hp_vtp.plan import Algorithm, Links, TransferPlan
from hp_vtp.plan.planner import plan_edge
from hp_vtp.policy import EdgePolicy, Payload
from hp_vtp.topology import Edge, PipelineLayout
from hp_vtp.transport.channel import build_edge_groups
from hp_vtp.transport.engine import EdgeEnd
from hp_vtp.transport.handles import (
    Failure,
    Handle,
    TransferError,
    TransferTimeoutError,
    parse_reason,
)

__all__ = ["Handle", "TensorMeta", "TransferError", "TransferTimeoutError", "Transport"]


class Transport:
    """Moves tensors between the stages of a layout.

    All ranks of the default process group construct it at the same point with the same arguments,
    which creates the groups of every edge in one order. Every rank of the source stage then calls
    `send`, every rank of the destination stage `receive`; the transfers of one edge match in the
    order of these calls, which may come from any thread. Gradients go the same way over the edge in
    the other direction. All ranks call `close`, or use it as a context manager.

    Attributes:
        layout: Layout of the stages.
        rank: Global rank of this process.
        device: Device of received tensors.
        timeout: Time-out of each operation on a group, None if that of the default group.
        has_run: Forms of runs that were done once, the first time `by_host`.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        *,
        name: str = "vtp",
        backend: str | None = None,
        timeout: timedelta | None = None,
        algorithm: Algorithm = "auto",
        links: Links = Links(),  # noqa: B008 (frozen)
        check: Literal["each", "once"] = "each",
        device: torch.device | None = None,
        policy: EdgePolicy | None = None,
    ) -> None:
        """Create and connect the groups of all edges.

        Args:
            layout: Its ranks are those of the default process group.
            name: Beginning of the names of the groups.
            backend: Backend of the groups; by default that of the default process group.
            timeout: Time-out of each operation of a transfer; by default that of the default
                process group.
            algorithm: Algorithm of every plan.
            links: Speeds by which `"auto"` decides.
            check: Both ends show each other what they are about to transfer (shapes, dtypes,
                placements, plan, microbatch, running number) before any of it moves: before
                `"each"` transfer, which costs a latency, or `"once"`: the first transfer of an edge
                then fixes what all later ones carry, and microbatches are not compared.
            device: Device of received tensors; by default the current CUDA device with NCCL and the
                CPU otherwise.
            policy: Policy of tensors that pass between trusted stages and others; by default all
                may.

        Raises:
            ValueError: If the layout does not have as many ranks as the default process group.
        """
        if layout.world_size != dist.get_world_size():
            raise ValueError(
                f"layout.world_size ({layout.world_size}) must equal the size of the default "
                f"process group ({dist.get_world_size()})"
            )
        if check not in ("each", "once"):
            raise ValueError(f"check ({check}) must be each or once")
        self.layout = layout
        self.rank = dist.get_rank()
        self.timeout = timeout
        self._algorithm: Algorithm = algorithm
        self._links = links
        self._policy = policy
        backend = backend or str(dist.get_backend())
        self.device = device or _default_device(backend)
        self.has_run: set[Hashable] = set()
        self._failure = Failure(name)
        groups = build_edge_groups(layout, name=name, backend=backend, timeout=timeout)
        self._ends = {
            edge: EdgeEnd(
                edge,
                parts,
                rank=self.rank,
                device=self.device,
                failure=self._failure,
                check_each=check == "each",
            )
            for edge, parts in groups.items()
        }
        self._failure.acts = [
            partial(break_group, group) for parts in groups.values() for group in parts.distinct
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failure.report(error)
            self._failure.is_known = True
        self.close()

    def send(
        self,
        tensors: Sequence[Tensor],
        *,
        source: int,
        destination: int,
        domain: int = 0,
        metas: Sequence[TensorMeta] | None = None,
        microbatch: int | None = None,
        payload: Payload | None = None,
        by_host: bool = False,
    ) -> Handle[None]:
        """Start to send this rank's parts of some tensors to the neighbouring stage.

        The tensors must not be changed in place before the transfer is done; on a CPU that is
        detected as an error. The handle may be dropped by callers that need not know the end.

        Args:
            tensors: This rank's part of each tensor: all of it if the stage's boundary is
                replicated, its slice if it is sharded. Need not be contiguous.
            source: Logical stage of this rank.
            destination: Logical stage that receives.
            domain: Data-parallel pipeline.
            metas: Global shape and dtype of each tensor. By default those of the tensors, which
                works where the boundary of this stage is replicated.
            microbatch: Name of the microbatch for errors, compared with the other end's.
            payload: Content of the transfer, for the policy; by default activations go forward and
                gradients back.
            by_host: Whether the tensors go through the memory of hosts, so that no device waits
                for another rank (Note [By host]); the same at both ends.

        Raises:
            ValueError: If this rank is not of the source stage, or a tensor is not what its meta
                says.
            PolicyError: If the tensors may not cross.
            TransferError: If the transport has failed.
        """
        edge = self.layout.edge(source, destination, domain=domain)
        end, index = self._find(edge, edge.source_ranks, "source")
        where = end.where(microbatch)
        metas = own_metas(edge, tensors, where=where) if metas is None else tuple(metas)
        plans = self.plan(edge, metas)
        require_parts(tensors, metas, plans, index=index, where=where)
        if self._policy is not None:
            payload = payload or (Payload.ACTIVATION if edge.is_forward else Payload.GRADIENT)
            tensors = self._policy.apply(
                tensors,
                edge=edge,
                chain=self.layout.chain,
                payload=payload,
                microbatch=microbatch,
                metas=metas,
                where=where,
            )
        return end.send(
            bundle(plans, edge),
            tensors,
            [
                Workspace.of_source(plan, index, tensor.detach().contiguous())
                for plan, tensor in zip(plans, tensors, strict=True)
            ],
            description=describe(plans, metas),
            microbatch=microbatch,
            by_host=by_host,
        )

    def receive(
        self,
        metas: Sequence[TensorMeta],
        *,
        source: int,
        destination: int,
        domain: int = 0,
        microbatch: int | None = None,
        into: Sequence[Tensor] | None = None,
        by_host: bool = False,
    ) -> Handle[tuple[Tensor, ...]]:
        """Start to receive this rank's parts of some tensors from the neighbouring stage.

        Args:
            metas: Global shape and dtype of each tensor.
            source: Logical stage that sends.
            destination: Logical stage of this rank.
            domain: Data-parallel pipeline.
            microbatch: Name of the microbatch for errors, compared with the other end's.
            into: Memory for the received tensors, one contiguous tensor per meta; by default new
                memory. A plan by a leader may use other memory.
            by_host: See `send`.

        Returns:
            A handle whose `wait` returns for each tensor all of it if this stage's boundary is
            replicated, this rank's slice if it is sharded. Activations are leaves that require grad
            from then on, see `TensorMeta.requires_grad`; before, there is no tensor to misuse.

        Raises:
            ValueError: If this rank is not of the destination stage.
            TransferError: If the transport has failed.
        """
        edge = self.layout.edge(source, destination, domain=domain)
        end, index = self._find(edge, edge.destination_ranks, "destination")
        metas = tuple(metas)
        plans = self.plan(edge, metas)
        given = [None] * len(metas) if into is None else list(into)

        def make_room() -> list[Workspace]:
            return [
                Workspace.of_destination(
                    plan, index, dtype=meta.dtype, device=self.device, into=buffer
                )
                for plan, meta, buffer in zip(plans, metas, given, strict=True)
            ]

        return end.receive(
            bundle(plans, edge),
            make_room,
            index=index,
            leaves=[meta.is_leaf_on(edge) for meta in metas],
            description=describe(plans, metas),
            microbatch=microbatch,
            by_host=by_host,
        )

    def plan(self, edge: Edge, metas: Sequence[TensorMeta]) -> tuple[TransferPlan, ...]:
        """Return the plans by which tensors cross an edge, for example to `explain` them."""
        return tuple(
            plan_edge(
                edge,
                meta.shape,
                itemsize=meta.dtype.itemsize,
                replicated=meta.replicated,
                algorithm=self._algorithm,
                links=self._links,
            )
            for meta in metas
        )

    def finish(self) -> None:
        """Wait until everything that this rank sent has arrived.

        Raises:
            TransferError: If a transfer failed.
        """
        for end in self._ends.values():
            end.finish()

    def abort(self, reason: str) -> str:
        """Give up, so that all ranks fail within seconds instead of waiting.

        Args:
            reason: Reason why this rank gives up, told to the others; it begins with the place, as
                in ``place: error``.

        Returns:
            The reason of the rank that gave up first.
        """
        return str(self._failure.report(RuntimeError(reason), parse_reason(reason)))

    def give_up(self, error: BaseException) -> BaseException:
        """Do as `abort` after an exception, and return the error that this rank is to raise.

        Returns:
            The error, or a `hp_platform.PeerError` that names the rank that failed first.
        """
        return explained(error, self._failure.report(error))

    def close(self) -> None:
        """Finish all transfers, end the threads and destroy the groups of the edges.

        Every rank calls it; a second call does nothing.

        Raises:
            TransferError: If a transfer failed and no call has raised yet because of it.
        """
        ends, self._ends = self._ends, {}
        alive = dist.is_initialized()  # or destroy_process_group has destroyed all groups already
        known = self._failure.is_known
        try:
            for end in ends.values() if alive else ():
                end.say_goodbye()
            for end in ends.values() if alive else ():
                end.finish()
        except TransferError:
            if not known:
                raise
        finally:
            for end in ends.values():
                end.end_thread()
            self._failure.acts = []  # what they would break is gone
            for end in ends.values() if alive else ():
                end.destroy_groups()

    def _find(self, edge: Edge, ranks: tuple[int, ...], end: str) -> tuple[EdgeEnd, int]:
        if self.rank not in ranks:
            raise ValueError(f"rank ({self.rank}) must be one of the {end} ranks {ranks} of {edge}")
        if edge not in self._ends:
            raise ValueError(f"rank {self.rank}, {edge}: the transport is closed")
        return self._ends[edge], ranks.index(self.rank)


def _default_device(backend: str) -> torch.device:
    return torch.device(f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu")
