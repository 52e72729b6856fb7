"""Small layers whose answer one process computes by itself, token by token.

Shape symbols: T tokens of a rank, K experts per token, E experts, L of them local, W ranks, D
width, N rows, F slots per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_expert.batch import ExpertBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The sizes, dtype and device of the checks.

    Attributes:
        num_experts: Number of experts, E; divisible by the number of ranks.
        top_k: Number of experts per token, K, at most E.
        dim: Width of a token, D.
        num_tokens: Number of tokens of rank 0, T; every further rank has one more.
        dtype: Dtype of tokens and experts. Routing weights are fp32 or wider.
        device: Device of all tensors.
        bound: Largest error of outputs and gradients, relative to their largest value; None: 1e-12
            in fp64, else 16 units in the last place.
        late_check: Function that is called with the dispatcher after each batch, on every rank; for
            dispatchers that raise errors later than in `prepare`.

    """

    num_experts: int = 8
    top_k: int = 2
    dim: int = 8
    num_tokens: int = 10
    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"
    bound: float | None = None
    late_check: Callable[[Any], None] | None = None

    @property
    def largest_error(self) -> float:
        """Return `bound`, or its default."""
        if self.bound is not None:
            return self.bound
        return 1e-12 if self.dtype == torch.float64 else 16 * torch.finfo(self.dtype).eps


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The input of one rank for `Dispatcher.prepare`: x [T, D], experts and weights [T, K]."""

    x: Tensor
    experts: Tensor
    weights: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The output y [T, D], gradients of x, weights and the rank's matrices, and problems found."""

    y: Tensor
    dx: Tensor
    dweights: Tensor | None
    dmatrices: Tensor
    problems: tuple[str, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without missing ones."""
        named = {"y": self.y, "dx": self.dx, "dmatrices": self.dmatrices}
        return named if self.dweights is None else named | {"dweights": self.dweights}


def _random(case: Case, rank: int, _num_ranks: int, generator: torch.Generator) -> Tensor:
    scores = torch.rand(case.num_tokens + rank, case.num_experts, generator=generator)
    return scores.argsort(-1)[:, : case.top_k]


def _one_set(case: Case, rank: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    experts = _random(case, rank, num_ranks, generator)
    return torch.arange(case.top_k).expand_as(experts).contiguous()


def _idle_ranks(case: Case, rank: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    """Choose no expert of the first rank, if K <= E - L, and give the last rank no tokens."""
    experts = _random(case, rank, num_ranks, generator)
    num_local = case.num_experts // num_ranks
    if case.top_k <= case.num_experts - num_local:
        others = torch.rand(len(experts), case.num_experts - num_local, generator=generator)
        experts = num_local + others.argsort(-1)[:, : case.top_k]
    return experts[:0] if rank == num_ranks - 1 else experts


def _dropped(case: Case, rank: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    """Drop a third of the slots, and all of the first token."""
    experts = _random(case, rank, num_ranks, generator)
    goes_nowhere = torch.rand(experts.shape, generator=generator) < 1 / 3
    goes_nowhere[0] = True
    return experts.masked_fill(goes_nowhere, -1)


ROUTINGS: dict[str, Callable[[Case, int, int, torch.Generator], Tensor]] = {
    "random": _random,
    "all tokens choose the same experts": _one_set,
    "a rank without work and one without tokens": _idle_ranks,
    "no tokens": lambda *given: _random(*given)[:0],
    "some slots dropped": _dropped,
    "all slots dropped": lambda *given: torch.full_like(_random(*given), -1),
}


def make_batch(
    case: Case,
    rank: int,
    num_ranks: int,
    *,
    routing: str = "random",
    weighted: bool = True,
    seed: int = 0,
) -> Batch:
    """Draw the tokens of a rank and their routing, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    experts = ROUTINGS[routing](case, rank, num_ranks, generator)
    x = torch.randn(len(experts), case.dim, generator=generator, dtype=torch.float64)
    weights = torch.rand(experts.shape, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(case.dtype, torch.float32)
    return Batch(
        x.to(case.device, case.dtype).requires_grad_(),
        experts.to(case.device),
        weights.to(case.device, wide).requires_grad_() if weighted else None,
    )


def make_matrices(case: Case, rank: int, num_ranks: int) -> Tensor:
    """Draw the matrices of a rank's experts, [L, D, D]; expert e computes tanh(row @ matrix_e)."""
    generator = torch.Generator().manual_seed(77)
    shape = (case.num_experts, case.dim, case.dim)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / case.dim**0.5
    mine: Tensor = drawn.chunk(num_ranks)[rank]
    return mine.to(case.device, case.dtype, copy=True).requires_grad_()


def apply_experts(batch: ExpertBatch, matrices: Tensor) -> Tensor:
    """Compute each row's sum over its slots of weight times tanh(row @ matrix), [N, D].

    By plain differentiable operators; the host reads the counts.
    """
    wide = torch.promote_types(batch.rows.dtype, torch.float32)
    rows, out = batch.rows.to(wide), torch.zeros_like(batch.rows, dtype=wide)
    counts = batch.num_tokens_per_expert.tolist()
    slots = batch.order[: sum(counts)].split(counts)
    for slot_n, matrix in zip(slots, matrices.to(wide).unbind(0), strict=True):
        row_n = slot_n.div(batch.num_slots_per_row, rounding_mode="floor")
        y_n = torch.tanh(rows.index_select(0, row_n) @ matrix)
        if batch.weights is not None:
            y_n = y_n * batch.weights.reshape(-1, 1).index_select(0, slot_n)
        out = out.index_add(0, row_n, y_n)
    return out.to(batch.rows.dtype)


def loss_of(y: Tensor) -> Tensor:
    """Return a loss that is linear in `y`, with a different factor for every element."""
    wide = torch.promote_types(y.dtype, torch.float32)
    phase = torch.arange(y.numel(), device=y.device, dtype=wide).view_as(y)
    total: Tensor = (y.to(wide) * torch.cos(phase)).sum()
    return total


def answer_of(batch: Batch, matrices: Tensor, y: Tensor, *, problems: Sequence[str] = ()) -> Answer:
    """Compute the gradients; tensors on which the loss does not depend get zeros."""
    leaves = [batch.x, matrices, *([] if batch.weights is None else [batch.weights])]
    for leaf in leaves:
        leaf.grad = None
    loss_of(y).backward()
    dx, dmatrices, *dweights = (
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
    )
    return Answer(y.detach(), dx, dweights[0] if dweights else None, dmatrices, tuple(problems))


def batch_problems(batch: ExpertBatch, *, num_local: int) -> list[str]:
    """Return the violations of the contract of `ExpertBatch`; the host reads its tensors."""
    num_tokens = batch.num_tokens_per_expert
    if num_tokens.shape != (num_local,) or {num_tokens.dtype, batch.order.dtype} != {torch.int64}:
        return [f"num_tokens_per_expert {num_tokens} and order {batch.order} must be int64"]
    counts, problems = num_tokens.tolist(), []
    num_valid = sum(counts)
    if batch.counts is not None and list(batch.counts) != counts:
        problems.append(f"counts {batch.counts} must equal num_tokens_per_expert {counts}")
    num_positions = batch.order.numel()
    if num_positions < num_valid or (batch.counts is not None and num_positions > num_valid):
        problems.append(f"positions in order ({num_positions}) must be as many as {num_valid}")
    slots = batch.order[:num_valid].tolist()
    if len(set(slots)) < len(slots) or not set(slots) <= set(range(batch.num_slots)):
        problems.append(f"order {slots} must hold slots below {batch.num_slots}, each once")
    shape = (batch.rows.shape[0], batch.num_slots_per_row)
    if batch.weights is not None and batch.weights.shape != shape:
        problems.append(f"shape of weights {tuple(batch.weights.shape)} must be {shape}")
    return problems


def expected(case: Case, num_ranks: int, *, routing: str, weighted: bool) -> list[Answer]:
    """Compute the answer of every rank in this process, in fp64 and without a dispatcher."""
    matrices = torch.cat(
        [make_matrices(case, rank, num_ranks).detach() for rank in range(num_ranks)]
    )
    matrices = matrices.double().requires_grad_()
    batches, ys = [], []
    for rank in range(num_ranks):
        drawn = make_batch(case, rank, num_ranks, routing=routing, weighted=weighted)
        batch = Batch(
            drawn.x.detach().double().requires_grad_(),
            drawn.experts,
            None if drawn.weights is None else drawn.weights.detach().double().requires_grad_(),
        )
        batches.append(batch)
        ys.append(_by_hand(batch, matrices))
    answers = [answer_of(batch, matrices, y) for batch, y in zip(batches, ys, strict=True)]
    dmatrices = torch.stack([answer.dmatrices for answer in answers]).sum(0).chunk(num_ranks)
    return [
        Answer(answer.y, answer.dx, answer.dweights, mine)
        for answer, mine in zip(answers, dmatrices, strict=True)
    ]


def _by_hand(batch: Batch, matrices: Tensor) -> Tensor:
    """Compute every expert for every token, and sum with a mask."""
    y_TED = torch.tanh(torch.einsum("td,edf->tef", batch.x, matrices))
    experts = torch.arange(len(matrices), device=matrices.device)
    is_chosen_TKE = (batch.experts.unsqueeze(-1) == experts).to(y_TED.dtype)
    if batch.weights is not None:
        is_chosen_TKE = is_chosen_TKE * batch.weights.unsqueeze(-1)
    return torch.einsum("tke,ted->td", is_chosen_TKE, y_TED)
