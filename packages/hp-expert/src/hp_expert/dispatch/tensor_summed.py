"""The dispatcher of experts whose hidden dim is sharded: sums are exchanged instead of rows.

Every rank has the same tokens and a part of the hidden dim of all experts. The experts return this
rank's part of a sum, and so do the gradients of tokens and of routing weights; each is summed over
the ranks, once per direction.

Shape symbols: T tokens, K experts per token, E experts, W ranks, B numbers sent.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_expert.batch import ExpertBatch, RowsStay, SharesGroups
from hp_expert.dispatch.exchange_plan import (
    FAILED,
    ExchangeRead,
    Header,
    block_size,
    input_error,
    raise_on_all_ranks,
    read_counts,
)
from hp_expert.permute import SlotCounts, count_slots, invalid_experts, order_of
from hp_platform import launch_all_to_all, wait_tensor
from hp_platform.autograd import Context

_CODE, _INVALID, _TOKENS, _COUNTS = range(4)


@dataclass(frozen=True, slots=True)
class TensorSummedDispatcher(RowsStay, SharesGroups):
    """Each rank of `group` has a part of the hidden dim of all experts, and the same tokens.

    The sums are in `prepare` (in backward) and in `finish_combine`; the launches do nothing. The
    number of tokens and of slots of each expert must be the same on all ranks.

    Attributes:
        group: The ranks that share the hidden dim.
        num_experts: Number of experts, E.
    """

    group: ProcessGroup
    num_experts: int

    def prepare(
        self, x: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, ExpertBatch]:
        """Sort the slots while counts are exchanged; see `Dispatcher.prepare`."""
        E, W = self.num_experts, self.group.size()
        error, header, counted = input_error(x, experts, weights), FAILED, None
        if error is None:
            header = Header.of(x, experts, weights, num_experts=E)
            counted = count_slots(experts, E)
        sent = _count_block(header, counted, num_experts=E, x=x)
        exchange = launch_all_to_all(sent.repeat(W, 1, 1), group=self.group)
        order = None if counted is None else order_of(counted)
        read = ExchangeRead(
            header=header,
            num_tokens=len(x),
            told_tokens=len(x),
            top_k=experts.shape[-1],
            num_experts=E,
            tells_rows=False,
        )
        _, _, blocks = read_counts(
            sent.expand(W, 1, -1), exchange, num_columns=_COUNTS + E, purpose=read
        )
        received = [block for [block] in blocks]
        mine = received[self.group.rank()]
        if error is None and mine[_INVALID]:
            error = invalid_experts(mine[_INVALID], E)
        verdicts = [block[: _INVALID + 1] for block in received]
        raise_on_all_ranks(error, header, verdicts, groups=[self.group], device=x.device)
        self._require_same(received)
        assert order is not None
        assert counted is not None
        x, weights = _SumGradients.apply(x, weights, self.group)
        counts = tuple(mine[_COUNTS:])
        order, num_tokens = order[: sum(counts)], counted.counts[:E]
        return x, ExpertBatch(x, weights, order, counts, num_tokens, experts.shape[1])

    def finish_combine(self, rows: Tensor, state: ExpertBatch) -> Tensor:
        """Sum the outputs over the ranks."""
        del state
        y: Tensor = _SumOutputs.apply(rows, self.group)
        return y

    def _require_same(self, received: list[list[int]]) -> None:
        """Raise ValueError, on every rank, if tokens or routing differ: each sees all counts."""
        others = [rank for rank, block in enumerate(received) if block != received[0]]
        if others:
            raise ValueError(
                f"tokens and routing of rank {others[0]} of the tensor group "
                f"({received[others[0]][_TOKENS]} tokens) must equal those of rank 0 "
                f"({received[0][_TOKENS]} tokens), also in how many go to each expert"
            )


def _count_block(
    header: Header, counted: SlotCounts | None, *, num_experts: int, x: Tensor
) -> Tensor:
    """Return the block that this rank sends to all others, int64 [B]."""
    sent = torch.full((block_size(_COUNTS + num_experts),), header.code, device=x.device)
    if counted is not None:
        sent[_INVALID], sent[_TOKENS] = counted.counts[num_experts], x.shape[0]
        sent[_COUNTS : _COUNTS + num_experts] = counted.counts[:num_experts]
    return sent


class _SumContext(Context, Protocol):
    group: ProcessGroup


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SumContext, x: Tensor, weights: Tensor | None, group: ProcessGroup
    ) -> tuple[Tensor, Tensor | None]:
        ctx.group = group
        return x.view_as(x), None if weights is None else weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        wanted = ctx.needs_input_grad[:2]
        summed = iter(_sum_over([g for g, w in zip(grads, wanted, strict=True) if w], ctx.group))
        grad_x, grad_weights = (next(summed) if is_wanted else None for is_wanted in wanted)
        return grad_x, grad_weights, None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Context, y: Tensor, group: ProcessGroup) -> Tensor:
        # A new tensor: autograd would not let the caller change a view in place.
        total = wait_tensor(y).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(_ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        # The sum is the same on all ranks, and so is its gradient, which each rank has whole.
        return grad, None


def _sum_over(tensors: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Sum tensors over ranks, all tensors of one dtype in one all-reduce."""
    tensors = [wait_tensor(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [_sum_over([tensor], group)[0] for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
