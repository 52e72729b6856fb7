"""The two axes of the ranks that share a sequence: heads are shared inside, keys gathered outside.

With N ranks and degree d, ranks i*d ... (i+1)*d - 1 exchange heads (Ulysses), so that each has the
positions of all d of them with H/d heads. Ranks of the same place in these rows then hold the
whole sequence between them and gather keys and values of those heads, or send them round a ring.
Adjacent ranks are the inner ones because their links are usually the faster ones. With a ring
outside it is known as USP (Fang and Zhao 2024, arXiv:2405.07719).

Shape symbols: N ranks, d degree, H query heads.
"""

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.batch import SequenceLayout
from hp_context.checks import check_two_axes
from hp_platform import new_group_of_members


@dataclass(frozen=True, slots=True)
class Axes:
    """The groups that one rank exchanges with.

    Attributes:
        inner: Ranks that share heads, by Ulysses; None if there is no other.
        outer: Ranks that gather keys and values; None if there is no other.
        ring: Whether keys and values travel round the outer ranks instead.
    """

    inner: ProcessGroup | None
    outer: ProcessGroup | None
    ring: bool = False

    @property
    def degree(self) -> int:
        """Return the number of ranks that share heads."""
        return 1 if self.inner is None else self.inner.size()

    @property
    def mode(self) -> str:
        """Return the name of the mode, for messages."""
        if self.outer is None:
            return "the Ulysses mode"
        if self.ring:
            degree = "" if self.inner is None else f"ulysses_degree={self.degree}, "
            return f"the ring mode ({degree}ring=True)"
        if self.inner is None:
            return "the all-gather K/V mode (ulysses_degree=1)"
        return f"the hybrid mode (ulysses_degree={self.degree})"

    def runs(self, layout: SequenceLayout, seq_len: int) -> tuple[tuple[range, ...], ...]:
        """Return the positions of each rank of `outer` after the inner exchange, as runs."""
        num_rows = 1 if self.outer is None else self.outer.size()
        return outer_runs(layout, seq_len, num_rows * self.degree, self.degree)


def outer_runs(
    layout: SequenceLayout, seq_len: int, num_ranks: int, degree: int
) -> tuple[tuple[range, ...], ...]:
    """Return the positions of each row of `degree` ranks, as runs."""
    by_rank = layout.runs(seq_len, num_ranks)
    starts = range(0, num_ranks, degree)
    return tuple(tuple(chain.from_iterable(by_rank[i : i + degree])) for i in starts)


def plain_axes(group: ProcessGroup, degree: int | None, *, ring: bool = False) -> Axes:
    """Return the axes where one has all ranks: all-gather K/V or a ring for degree 1, or Ulysses.

    No group is made for a ring: its messages are traffic of `group`, like gathers of keys.
    """
    if group.size() == 1:
        return Axes(None, None)
    return Axes(None, group, ring) if degree == 1 else Axes(group, None)


def split_group(group: ProcessGroup, degree: int, *, ring: bool = False) -> Axes:
    """Make groups for both axes; every rank of `group` calls.

    Raises:
        ValueError: There is no default process group to make them in.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"the hybrid mode (ulysses_degree={degree}) makes groups of its own and needs the "
            f"default process group: call init_process_group first"
        )
    ranks, mine = dist.get_process_group_ranks(group), group.rank()
    row = ranks[mine - mine % degree :][:degree]
    # All inner groups come before any outer one, on every rank: none waits for another in a circle.
    inner = _new_group(row, group, name="cp inner")
    outer = _new_group(ranks[mine % degree :: degree], group, name="cp outer")
    return Axes(inner, outer, ring)


def axes_of_mesh(mesh: DeviceMesh, degree: int, *, ring: bool = False) -> tuple[ProcessGroup, Axes]:
    """Return a group of all ranks of a mesh (outer, inner), and its axes; every rank of it calls.

    Raises:
        ValueError: The mesh has other than two axes, no names, or another inner size than `degree`.
    """
    check_two_axes(mesh, degree)
    outer, inner = mesh.get_group(0), mesh.get_group(1)
    whole = _new_group(mesh.mesh.flatten().tolist(), outer, name="cp")
    if ring:
        _connect(outer)
    inner_axis, outer_axis = (axis if axis.size() > 1 else None for axis in (inner, outer))
    return whole, Axes(inner_axis, outer_axis, ring)


def _new_group(ranks: list[int], like: ProcessGroup, *, name: str) -> ProcessGroup:
    backend = str(dist.get_backend(like))
    return new_group_of_members(sorted(ranks), name=name, backend=backend)


def _connect(group: ProcessGroup) -> None:
    """Let all ranks take part in the first operation of a group, as NCCL demands.

    In a ring the first message may be between some of them only.
    """
    if "nccl" in str(dist.get_backend(group)):
        device = torch.device("cuda", torch.cuda.current_device())
        dist.all_reduce(torch.zeros(1, device=device), group=group)
