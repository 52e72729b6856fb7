"""Execute transfer plans over torch.distributed, each edge on process groups of its own.

The calls here return when the transfer is done on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import new_group
from hp_vtp.bundle import bundle
from hp_vtp.channel import Channel, TransferError
from hp_vtp.cost import Links
from hp_vtp.packing import TensorMeta, Workspace
from hp_vtp.placement import Replicated, Sharded
from hp_vtp.plan import plan_edge
from hp_vtp.topology import Edge, PipelineLayout
from hp_vtp.transfer import Algorithm, TransferPlan

__all__ = ["TensorMeta", "TransferError", "Transport"]


class Transport:
    """Moves tensors between the stages of a layout.

    All ranks of the default process group construct it at the same point with the same arguments,
    which creates the groups of every edge in one order. Every rank of the source stage then calls
    `send`, every rank of the destination stage `receive`; the transfers of one edge match in the
    order of these calls. Gradients go the same way over the edge in the other direction.

    Use it from one thread per edge.
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
        check: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Create and connect the groups of all edges.

        Args:
            layout: Its ranks are those of the default process group.
            name: Begins the names of the groups.
            backend: Of the groups; by default that of the default process group.
            timeout: Of each send or receive; by default that of the default process group.
            algorithm: Of every plan.
            links: Speeds by which `"auto"` decides.
            check: Both ends show each other what they are about to transfer (shapes, dtypes,
                placements, plan, running number) before any of it moves, at the cost of one
                latency. Without it a mistake may become wrong data.
            device: Where received tensors are made; by default the current CUDA device with NCCL
                and the CPU otherwise.

        Raises:
            ValueError: If the layout does not have as many ranks as the default process group.
        """
        if layout.world_size != dist.get_world_size():
            raise ValueError(
                f"layout.world_size ({layout.world_size}) must equal the size of the default "
                f"process group ({dist.get_world_size()})"
            )
        self.layout = layout
        self.rank = dist.get_rank()
        self._algorithm = algorithm
        self._links = links
        backend = backend or str(dist.get_backend())
        self._device = device or _default_device(backend)
        self._channels: dict[Edge, Channel] = {}
        for edge in layout.edges:
            label = f"{name}/{edge.source}-{edge.destination}/{edge.domain}"
            group = new_group([edge.ranks], name=label, backend=backend, timeout=timeout)
            control = group
            if backend != "gloo" and check:
                control = new_group(
                    [edge.ranks], name=f"{label}/control", backend="gloo", timeout=timeout
                )
            if group is not None and control is not None:
                self._channels[edge] = Channel(edge, group, control, rank=self.rank, check=check)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self,
        tensors: Sequence[Tensor],
        *,
        source: int,
        destination: int,
        domain: int = 0,
        metas: Sequence[TensorMeta] | None = None,
    ) -> None:
        """Send this rank's parts of some tensors to the neighbouring stage.

        Args:
            tensors: What this rank holds of each: all of it if the stage's boundary is replicated,
                its slice if it is sharded. Not changed; need not be contiguous.
            source: Logical stage of this rank.
            destination: Logical stage that receives.
            domain: Data-parallel pipeline.
            metas: Global shape and dtype of each tensor. By default those of the tensors, which
                works where the boundary of this stage is replicated.

        Raises:
            ValueError: If this rank is not of the source stage, or a tensor is not what its meta
                says.
            TransferError: If the transfer fails.
        """
        edge = self.layout.edge(source, destination, domain=domain)
        index = self._position(edge.source_ranks, edge, "source")
        metas = self._own_metas(edge, tensors) if metas is None else tuple(metas)
        plans = self.plan(edge, metas)
        self._require_parts(tensors, metas, plans, edge, index)
        workspaces = [
            Workspace.of_source(plan, index, tensor.detach().contiguous())
            for plan, tensor in zip(plans, tensors, strict=True)
        ]
        self._channels[edge].run(bundle(plans, edge), workspaces, _describe(plans, metas))

    def receive(
        self, metas: Sequence[TensorMeta], *, source: int, destination: int, domain: int = 0
    ) -> tuple[Tensor, ...]:
        """Receive this rank's parts of some tensors from the neighbouring stage.

        Args:
            metas: Global shape and dtype of each tensor.
            source: Logical stage that sends.
            destination: Logical stage of this rank.
            domain: Data-parallel pipeline.

        Returns:
            For each tensor all of it if this stage's boundary is replicated, this rank's slice if
            it is sharded. New tensors that do not require grad.

        Raises:
            ValueError: If this rank is not of the destination stage.
            TransferError: If the transfer fails.
        """
        edge = self.layout.edge(source, destination, domain=domain)
        index = self._position(edge.destination_ranks, edge, "destination")
        plans = self.plan(edge, metas)
        workspaces = [
            Workspace.of_destination(plan, index, dtype=meta.dtype, device=self._device)
            for plan, meta in zip(plans, metas, strict=True)
        ]
        self._channels[edge].run(bundle(plans, edge), workspaces, _describe(plans, metas))
        return tuple(workspace.result(index) for workspace in workspaces)

    def plan(self, edge: Edge, metas: Sequence[TensorMeta]) -> tuple[TransferPlan, ...]:
        """The plans by which these tensors cross an edge, for example to `explain` them."""
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

    def close(self) -> None:
        """Destroy the groups of the edges. Every rank calls it; a second call does nothing."""
        while self._channels:
            self._channels.popitem()[1].close()

    def _position(self, ranks: tuple[int, ...], edge: Edge, end: str) -> int:
        if edge not in self._channels and self.rank in ranks:
            raise ValueError(f"rank {self.rank}, {edge}: the transport is closed")
        if self.rank not in ranks:
            raise ValueError(f"rank ({self.rank}) must be one of the {end} ranks {ranks} of {edge}")
        return ranks.index(self.rank)

    def _own_metas(self, edge: Edge, tensors: Sequence[Tensor]) -> tuple[TensorMeta, ...]:
        if isinstance(edge.source_boundary, Sharded):
            raise ValueError(  # noqa: TRY004 (an argument is missing, none is of a wrong type)
                f"rank {self.rank}, {edge}: metas (None) must be given where the source boundary "
                f"is {edge.source_boundary}, since a slice does not tell the global shape"
            )
        return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def _require_parts(
        self,
        tensors: Sequence[Tensor],
        metas: Sequence[TensorMeta],
        plans: Sequence[TransferPlan],
        edge: Edge,
        index: int,
    ) -> None:
        where = f"rank {self.rank}, {edge}"
        if len(tensors) != len(metas):
            raise ValueError(
                f"{where}: len(tensors) ({len(tensors)}) must equal len(metas) ({len(metas)})"
            )
        for i, (tensor, meta, plan) in enumerate(zip(tensors, metas, plans, strict=True)):
            expected = plan.source_shape(index)
            if tuple(tensor.shape) != expected:
                kind = "whole" if isinstance(plan.source, Replicated) else f"slice {index}"
                raise ValueError(
                    f"{where}: tensors[{i}].shape ({tuple(tensor.shape)}) must equal that of the "
                    f"{kind} ({expected})"
                )
            if tensor.dtype != meta.dtype:
                raise ValueError(
                    f"{where}: tensors[{i}].dtype ({tensor.dtype}) must equal metas[{i}].dtype "
                    f"({meta.dtype})"
                )


def _default_device(backend: str) -> torch.device:
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _describe(plans: Sequence[TransferPlan], metas: Sequence[TensorMeta]) -> str:
    """All that both ends must agree on, readable."""
    return "; ".join(
        f"{str(meta.dtype).removeprefix('torch.')}{list(plan.shape)} "
        f"{plan.source} -> {plan.destination} by {plan.algorithm}"
        for plan, meta in zip(plans, metas, strict=True)
    )
