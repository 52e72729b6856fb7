"""The router: scores of all experts for each token, and the choice of the best.

Shape symbols: T tokens in sequences of S, E experts, K experts per token, D model width, G groups
of M = E / G experts.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, NamedTuple, Protocol, Self, get_args

import torch
from torch import Tensor, nn

from hp_expert.kernels import fuses, triton_routing
from hp_expert.kernels.triton_routing import Rule
from hp_expert.routing.capacity import (
    DropPolicy,
    expert_capacity,
    is_within_capacity,
)
from hp_expert.routing.load import count_in_backward, route
from hp_expert.routing.recompute import decide, is_routing_saved
from hp_platform import linear
from hp_platform.autograd import Context, differentiable_once

ScoreFunction = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]

_WIDE: Final = torch.float32
"""The least dtype of logits, scores and correction biases."""


class Routing(NamedTuple):
    """The experts of each token. All floating tensors are fp32 or wider and differentiable.

    Attributes:
        weights: Factor of each chosen expert's output, [T, K]; 0 for a slot that was dropped.
        experts: The chosen experts, best first, int64 [T, K]; -1 for a slot that was dropped.
        scores: Scores of all experts, each in [0, 1], [T, E].
        logits: Logits of all experts, from which the scores were computed, [T, E].
        before_drop: The experts before any were dropped; None: none were dropped.
    """

    weights: Tensor
    experts: Tensor
    scores: Tensor
    logits: Tensor
    before_drop: Tensor | None = None

    @property
    def chosen(self) -> Tensor:
        """Return the experts before any were dropped, int64 [T, K], for balancing."""
        return self.experts if self.before_drop is None else self.before_drop


class _Choice(NamedTuple):
    """The experts of each token [T, K], and those before any were dropped."""

    experts: Tensor
    chosen: Tensor


class TopKRouter(nn.Module):
    """The router that sends each token to the experts with the K highest scores.

    Of equal scores the lower expert index wins, on every device, and the lower group likewise.
    Logits are computed in fp32 or wider, with autocast or without: in bf16 a few percent of tokens
    would change experts.

    Attributes:
        weight: Weight of the logits [E, D].
        bias: Bias of the logits [E]; None: without.
        correction_bias: Persistent buffer, added to the scores for the choice of experts only [E];
            None: without. fp32 or wider, whatever dtype the module is converted to.
        load: Slots of each expert in the backwards since the last reset, on this rank, int64 [E];
            see `take_loads`.

    Args:
        dim: Width of the model, D.
        num_experts: Number of experts, E.
        top_k: Number of experts per token, K.
        score_function: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3,
            arXiv:2412.19437).
        normalize: Whether to divide the chosen scores by their sum. With softmax scores, this is
            the softmax over the chosen logits alone (Mixtral, gpt-oss).
        scaling_factor: Factor of all weights, applied last (DeepSeek-V2, arXiv:2405.04434).
        bias: Whether logits have a bias (gpt-oss).
        correction_bias: Whether there is a correction bias, for `update_correction_biases`.
        num_groups: Number of groups, equal runs of experts, G.
        num_limited_groups: Number of groups that may have experts of a token.
        group_score: Score of a group, with the correction bias: its best score ("max") or the sum
            of its best two ("top2_sum").
        capacity_factor: Factor for the capacity of an expert: it takes ceil(factor * S * K / E)
            slots of one sequence, and the rest is dropped; the weights of a token's other slots
            stay as they are. None: nothing is dropped.
        drop_policy: Slots that an expert takes: those with the highest weights ("score"), of equal
            weights those of earlier tokens, or those of the first tokens ("position").
        counts_load: Whether to count `load`; without, a layer saves the work of counting.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If a number or a name is out of range.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        bias: bool = False,
        correction_bias: bool = False,
        num_groups: int = 1,
        num_limited_groups: int = 1,
        group_score: GroupScore = "top2_sum",
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "score",
        counts_load: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.normalize = score_function, normalize
        self.scaling_factor = scaling_factor
        self.num_groups, self.num_limited_groups = num_groups, num_limited_groups
        self.group_score = group_score
        self.capacity_factor, self.drop_policy = capacity_factor, drop_policy
        self.counts_load = counts_load
        _check(self)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        empty = torch.empty(num_experts, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty) if bias else None
        wide = torch.promote_types(empty.dtype, _WIDE)
        self.register_buffer("correction_bias", empty.to(wide) if correction_bias else None)
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does; both biases begin with zero."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        for bias in (self.bias, self.correction_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self, x: Tensor, *, replay: Tensor | None = None, padding: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x: Any floating dtype, one sequence [S, D] or several [..., S, D].
            replay: See `route`.
            padding: See `route`.
        """
        # Always two dims, so that the kernel and its bits do not depend on the caller's view.
        x_TD = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), _WIDE)
            logits_TE = linear(x_TD, self.weight, self.bias, dtype=dtype)
            logits = logits_TE.view(*x.shape[:-1], self.num_experts)
            # Without padding, subclasses whose `route` has no such argument work as well.
            options = {} if padding is None else {"padding": padding}
            return self.route(logits, replay=replay, **options)

    def route(
        self, logits: Tensor, *, replay: Tensor | None = None, padding: Tensor | None = None
    ) -> Routing:
        """Route by logits.

        Args:
            logits: Logits of one sequence [S, E] or several [..., S, E]; scored in fp32 or wider.
            replay: Experts to take instead of the best ones, int64 [T, K]; their weights are
                computed from the logits, with gradients. A slot with expert -1 was dropped: the
                other weights are computed without it. See `check_replay`.
            padding: Mask of tokens that are padding, bool of the shape of `logits` without E: they
                go to no expert and are not counted. None: there is no padding.

        Returns:
            The routing of the tokens of all sequences, one after the other.

        Raises:
            ValueError: If the record is of the wrong shape or dtype; on the CPU also if its experts
                do not exist. If `padding` does not fit, or is given to a router with a capacity.
        """
        if padding is not None:
            _check_padding(padding, logits, self)
        logits_TE = logits.reshape(-1, self.num_experts)
        logits_TE = logits_TE.to(torch.promote_types(logits.dtype, _WIDE))
        sequence_length = logits.shape[-2] if logits.ndim > 1 else 1
        if replay is not None:
            _check_record(replay, num_tokens=logits_TE.shape[0], router=self)
        if fuses(logits_TE) and not torch.compiler.is_compiling():
            rule = self._rule()
            if rule.fits(self.num_experts):
                make = partial(self._choose_fused, logits_TE.detach(), rule, sequence_length)
                given = replay if padding is None else self._without(padding, replay, make)
                return self._route_fused(logits_TE, rule, sequence_length, replay=given)
        softmax = self.score_function == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if softmax else logits_TE.sigmoid()
        make = partial(self._choose, scores_TE.detach(), logits_TE.detach(), sequence_length)
        if padding is not None:
            replay = self._without(padding, replay, make)
        choice = decide(self, make) if replay is None else _Choice(replay, replay)
        made = replay is None
        weights_TK = self._weigh(scores_TE, logits_TE, choice, replayed=not made)
        load = self._counter(weights_TK)
        if load is not None:
            weights_TK = count_in_backward(weights_TK, choice.chosen, load, all_exist=made)
        before_drop = None if choice.experts is choice.chosen else choice.chosen
        return Routing(weights_TK, choice.experts, scores_TE, logits_TE, before_drop)

    def _route_fused(
        self, logits_TE: Tensor, rule: Rule, sequence_length: int, *, replay: Tensor | None
    ) -> Routing:
        """Route by kernels, in two passes where experts must be known before their weights."""
        given, choice = replay, None
        if replay is not None:
            choice = _Choice(replay, replay)
        elif self.capacity_factor is not None or is_routing_saved():
            make = partial(self._choose_fused, logits_TE.detach(), rule, sequence_length)
            choice = decide(self, make)
            given = choice.chosen
        scores_TE, weights_TK, chosen_TK = route(
            logits_TE,
            rule,
            bias=self.correction_bias,
            experts_TK=given,
            load=self._counter(logits_TE),
        )
        if choice is None:
            choice = _Choice(chosen_TK, chosen_TK)
        if choice.experts is choice.chosen:
            return Routing(weights_TK, choice.experts, scores_TE, logits_TE)
        weights_TK = weights_TK.masked_fill(choice.experts < 0, 0.0)
        return Routing(weights_TK, choice.experts, scores_TE, logits_TE, choice.chosen)

    @torch.no_grad()
    def _choose_fused(self, logits_TE: Tensor, rule: Rule, sequence_length: int) -> _Choice:
        _, weights_TK, chosen_TK = triton_routing.route(logits_TE, rule, bias=self.correction_bias)
        return self._drop(chosen_TK, lambda: weights_TK, sequence_length)

    def _without(
        self, padding: Tensor, replay: Tensor | None, make: Callable[[], _Choice]
    ) -> Tensor:
        """Return the experts of all tokens, int64 [T, K]; -1 for padding."""
        experts = decide(self, make).experts if replay is None else replay
        return experts.masked_fill(padding.reshape(-1, 1), -1)

    def _rule(self) -> Rule:
        return Rule(
            self.top_k,
            sigmoid=self.score_function == "sigmoid",
            normalize=self.normalize,
            scaling_factor=self.scaling_factor,
            num_groups=self.num_groups,
            num_limited_groups=self.num_limited_groups,
            top2_sum=self.group_score == "top2_sum",
        )

    def _counter(self, scores: Tensor) -> Tensor | None:
        """Return the counter of the slots of experts; None if they are not counted."""
        wanted = self.counts_load and self.training
        if not (wanted and torch.is_grad_enabled() and scores.requires_grad):
            return None
        return self.load if self.load.device == scores.device else self._load_on(scores)

    @torch.no_grad()
    def _choose(self, scores_TE: Tensor, logits_TE: Tensor, sequence_length: int) -> _Choice:
        ranked_TE = scores_TE
        if self.correction_bias is not None:
            ranked_TE = scores_TE + self.correction_bias.to(scores_TE.dtype)
        if self.num_limited_groups < self.num_groups:
            ranked_TE = limit_to_groups(
                ranked_TE,
                num_groups=self.num_groups,
                num_limited_groups=self.num_limited_groups,
                group_score=self.group_score,
            )
        is_softmax = ranked_TE is scores_TE and self.score_function == "softmax"
        chosen_TK = top_k_experts(ranked_TE, self.top_k, is_softmax=is_softmax)
        if self.capacity_factor is None:
            return _Choice(chosen_TK, chosen_TK)
        weigh = partial(self._weigh, scores_TE, logits_TE, _Choice(chosen_TK, chosen_TK))
        return self._drop(chosen_TK, weigh, sequence_length)

    def _drop(
        self, chosen_TK: Tensor, weigh: Callable[[], Tensor], sequence_length: int
    ) -> _Choice:
        """Return the choice without the slots for which an expert has no room."""
        if self.capacity_factor is None:
            return _Choice(chosen_TK, chosen_TK)
        has_room_TK = is_within_capacity(
            chosen_TK,
            None if self.drop_policy == "position" else weigh(),
            capacity=expert_capacity(
                self.capacity_factor,
                num_slots=sequence_length * self.top_k,
                num_experts=self.num_experts,
            ),
            sequence_length=sequence_length,
            num_experts=self.num_experts,
        )
        return _Choice(chosen_TK.masked_fill(~has_room_TK, -1), chosen_TK)

    def _weigh(
        self, scores_TE: Tensor, logits_TE: Tensor, choice: _Choice, *, replayed: bool = False
    ) -> Tensor:
        """Return the weight of each slot, [T, K]."""
        index_TK, absent_TK = choice.chosen, None
        if replayed:
            # Scores of experts that do not exist must not be read; the dispatcher refuses them.
            index_TK = index_TK.clamp(0, self.num_experts - 1)
            absent_TK = index_TK != choice.chosen
        if self.normalize:
            sigmoid = self.score_function == "sigmoid"
            has_best = self.correction_bias is None and not replayed and not sigmoid
            weights_TK: Tensor = _Normalized.apply(
                logits_TE, scores_TE.detach(), index_TK, absent_TK, sigmoid, has_best
            )
        else:
            weights_TK = scores_TE.gather(1, index_TK)
            if absent_TK is not None:
                weights_TK = weights_TK.masked_fill(absent_TK, 0.0)
        if self.scaling_factor != 1:
            weights_TK = weights_TK * self.scaling_factor
        if choice.experts is not choice.chosen:
            weights_TK = weights_TK.masked_fill(choice.experts < 0, 0.0)
        return weights_TK

    def _load_on(self, place: Tensor) -> Tensor:
        """Return a new counter on the device of a tensor.

        Counts before the move are lost; on the meta device nothing was counted.
        """
        self.load = torch.zeros_like(self.load, device=place.device)
        return self.load

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module as torch does, but keep the correction bias wide.

        In bf16, updates of 0.001 would be lost as soon as the bias is 0.25.
        """
        before = self.correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.correction_bias
        if before is not None and after is not None and after.dtype.itemsize < _WIDE.itemsize:
            self.correction_bias = before.to(after.device)
        if self.load.device != self.weight.device:
            self._load_on(self.weight)
        return self

    def extra_repr(self) -> str:
        """Return the settings of the router, for `repr`."""
        experts, dim = self.weight.shape
        shown = (
            f"dim={dim}, num_experts={experts}, top_k={self.top_k}, "
            f"score_function={self.score_function}, normalize={self.normalize}"
        )
        if self.num_limited_groups < self.num_groups:
            shown += f", groups={self.num_limited_groups} of {self.num_groups} ({self.group_score})"
        if self.capacity_factor is not None:
            shown += f", capacity_factor={self.capacity_factor} ({self.drop_policy})"
        return shown


def check_replay(replay: Tensor, *, num_tokens: int, top_k: int, num_experts: int) -> None:
    """Raise ValueError for a record that is not a routing; on CUDA the host waits for its values.

    `TopKRouter.route` calls it on the CPU. On CUDA it checks shape and dtype only; the dispatcher,
    which has a host read in any case, finds experts that do not exist.

    Args:
        replay: Experts of each token, -1 for none [T, K].
        num_tokens: Number of tokens, T.
        top_k: Number of experts per token, K.
        num_experts: Number of experts, E.

    Raises:
        ValueError: If the record is not int64 [T, K], or an expert is not in [-1, E), or occurs
            twice for one token.
    """
    check_replay_shape(replay, num_tokens=num_tokens, top_k=top_k)
    is_wrong = (replay < -1) | (replay >= num_experts)
    ordered = replay.sort(dim=1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    num_wrong, num_double = torch.stack([is_wrong.sum(), is_double.sum()]).tolist()
    if num_wrong:
        raise ValueError(
            f"replayed experts must be in [-1, num_experts ({num_experts})), but {num_wrong} are "
            "not"
        )
    if num_double:
        raise ValueError(
            f"replayed experts of a token must be distinct, but {num_double} are there before"
        )


def check_replay_shape(replay: Tensor, *, num_tokens: int, top_k: int) -> None:
    """Raise ValueError for a record of another shape or dtype; reads no values."""
    if replay.shape != (num_tokens, top_k) or replay.dtype != torch.int64:
        raise ValueError(
            f"replay ({tuple(replay.shape)}, {replay.dtype}) must be int64 and [num_tokens "
            f"({num_tokens}), top_k ({top_k})]"
        )


def _check_record(replay: Tensor, *, num_tokens: int, router: TopKRouter) -> None:
    check_replay_shape(replay, num_tokens=num_tokens, top_k=router.top_k)
    if replay.device.type == "cpu" and not torch.compiler.is_compiling():
        check_replay(
            replay, num_tokens=num_tokens, top_k=router.top_k, num_experts=router.num_experts
        )


def _check_padding(padding: Tensor, logits: Tensor, router: TopKRouter) -> None:
    if padding.shape != logits.shape[:-1] or padding.dtype != torch.bool:
        raise ValueError(
            f"padding ({tuple(padding.shape)}, {padding.dtype}) must be bool and "
            f"{tuple(logits.shape[:-1])}, as the tokens are"
        )
    if router.capacity_factor is not None:
        raise ValueError(
            f"capacity_factor ({router.capacity_factor}) must be None with padding, which is part "
            "of the length that a capacity is a share of"
        )


def _check(router: TopKRouter) -> None:
    """Raise ValueError for settings that do not fit each other."""
    E, K, G = router.num_experts, router.top_k, router.num_groups
    limited = router.num_limited_groups
    if not 1 <= K <= E:
        raise ValueError(f"top_k ({K}) must be in [1, num_experts ({E})]")
    for name, known in (
        ("score_function", get_args(ScoreFunction)),
        ("group_score", get_args(GroupScore)),
        ("drop_policy", get_args(DropPolicy)),
    ):
        if getattr(router, name) not in known:
            raise ValueError(f"{name} ({getattr(router, name)}) must be {' or '.join(known)}")
    if G < 1 or E % G:
        raise ValueError(f"num_groups ({G}) must divide num_experts ({E})")
    if not 1 <= limited <= G:
        raise ValueError(f"num_limited_groups ({limited}) must be in [1, num_groups ({G})]")
    if limited * (E // G) < K:
        raise ValueError(
            f"top_k ({K}) must be at most num_limited_groups ({limited}) * experts of a group "
            f"({E // G})"
        )
    if limited < G and router.group_score == "top2_sum" and E // G < 2:
        raise ValueError(f"experts of a group ({E // G}) must be at least 2 for top2_sum")
    if router.capacity_factor is not None and not 0 < router.capacity_factor < math.inf:
        raise ValueError(f"capacity_factor ({router.capacity_factor}) must be positive and finite")


class _NormalizedContext(Context, Protocol):
    shape: torch.Size
    saved_tensors: tuple[Tensor, Tensor, Tensor | None]


class _Normalized(torch.autograd.Function):
    """Divide the scores of the chosen experts by their sum, [T, K]; differentiable once.

    The weights of a token, w_k = s_k / sum(s), are a softmax over the chosen experts: of the logits
    where scores are a softmax, of the logarithms of the scores where they are sigmoids. So the
    gradient of the logits is w_k * (dw_k - <dw, w>), for sigmoids times 1 - s_k, and no gradient of
    the scores is computed. The best expert of a softmax has a score of at least 1/E, so that a sum
    with it (`is_sure`) cannot be zero.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes by position
        ctx: _NormalizedContext,
        logits: Tensor,
        scores: Tensor,
        index: Tensor,
        absent: Tensor | None,
        sigmoid: bool,
        is_sure: bool,
    ) -> Tensor:
        chosen = scores.gather(1, index)
        if absent is not None:
            chosen = chosen.masked_fill(absent, 0.0)
        total = chosen.sum(dim=-1, keepdim=True)
        if not is_sure:  # all K scores may have been rounded to zero
            total = total.clamp_min(torch.finfo(chosen.dtype).tiny)
        weights = chosen / total
        ctx.save_for_backward(weights, index, chosen if sigmoid else None)
        ctx.shape = logits.shape
        return weights

    @staticmethod
    @differentiable_once
    def backward(ctx: _NormalizedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, index, chosen = ctx.saved_tensors
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)  # noqa: SLF001
        if chosen is not None:
            grad = torch.addcmul(grad, grad, chosen, value=-1)
        return (grad.new_zeros(ctx.shape).scatter_add_(1, index, grad), *[None] * 5)


@torch.no_grad()
def top_k_experts(scores_TE: Tensor, top_k: int, *, is_softmax: bool = False) -> Tensor:
    """Return the indices of the highest scores, best first; the lower index wins ties.

    `torch.topk` breaks ties arbitrarily, and a stable sort takes twice the time of K maxima, each
    of which finds the first of equal scores. The bits of fp32 numbers that are not negative are
    whole numbers in the same order; with the index in lower bits no two keys are equal, so that
    `torch.topk` has no ties.

    Args:
        scores_TE: Scores, finite, or -inf for no more than E - K experts [T, E].
        top_k: Number of experts per token, K.
        is_softmax: Whether scores are a softmax: none is negative, and NaN are all scores of a
            token or none.

    Returns:
        Indices, int64 [T, K].
    """
    if is_softmax and top_k > 1 and scores_TE.dtype == torch.float32:
        bits_TE = scores_TE.view(torch.int32)
        last_first_E = torch.arange(scores_TE.shape[1] - 1, -1, -1, device=scores_TE.device)
        return torch.add(last_first_E, bits_TE, alpha=1 << 32).topk(top_k, dim=-1).indices
    left_TE = scores_TE.clone() if top_k > 1 else scores_TE
    chosen = []
    for choice in range(top_k):
        best_T1 = left_TE.max(dim=-1, keepdim=True).indices
        chosen.append(best_T1)
        if choice < top_k - 1:
            left_TE.scatter_(-1, best_T1, -math.inf)
    return torch.cat(chosen, dim=-1)


@torch.no_grad()
def limit_to_groups(
    scores_TE: Tensor, *, num_groups: int, num_limited_groups: int, group_score: GroupScore
) -> Tensor:
    """Return the scores, -inf outside of each token's best groups; the lower group wins ties.

    Groups are equal runs of experts. The score of a group is that of its best expert ("max",
    DeepSeek-V2, arXiv:2405.04434, section 2.2.2) or the sum of its best two ("top2_sum",
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        scores_TE: Finite scores [T, E].
        num_groups: Number of groups, G, a divisor of E.
        num_limited_groups: Number of groups that a token keeps.
        group_score: Score of a group.

    Returns:
        Scores [T, E], of the dtype of `scores_TE`.
    """
    scores_TGM = scores_TE.view(-1, num_groups, scores_TE.shape[-1] // num_groups)
    if group_score == "max":
        groups_TG = scores_TGM.amax(dim=-1)
    else:
        groups_TG = scores_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best = top_k_experts(groups_TG, num_limited_groups)
    is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(-1, best, value=False)
    return scores_TGM.masked_fill(is_out_TG.unsqueeze(-1), -math.inf).flatten(-2)
