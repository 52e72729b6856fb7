"""The kernels behind `triton_routing`, in Triton.

A program has the logits of BLOCK_T tokens in registers, all E of each, and computes the whole
routing from them: logits are read once, and every output has one writer. Only loads are added by
atomics: they are whole numbers, whose sum does not depend on the order.

As in torch, a score of NaN beats all others, of several the first one. So a
token gets experts that exist, each of them once, whatever its scores are, and weights of NaN that
show the step to be broken. Triton's maxima ignore NaN, so NaN is replaced by infinity before them.

Shape symbols: T tokens, E experts, K experts per token, G groups of experts.
"""

import triton
import triton.language as tl


@triton.jit
def _first_of_best(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Return the lowest index of the highest value of each row."""
    best = tl.max(values, axis=1)
    return tl.min(tl.where(values == best[:, None], index[None, :], 1 << 30), axis=1)


@triton.jit
def _at_least(values: tl.tensor, TINY: tl.constexpr) -> tl.tensor:
    """Return the values, or `TINY` where they are less; NaN stays."""
    tiny = tl.full((1,), TINY, values.dtype)
    return tl.where(values < tiny, tiny, values)


@triton.jit
def _limit_to_groups(  # noqa: PLR0917
    ranked: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMITED: tl.constexpr,
    TOP2: tl.constexpr,
) -> tl.tensor:
    """Return scores, -inf outside of each token's best groups; BLOCK_E is the number of experts."""
    size: tl.constexpr = BLOCK_E // GROUPS
    nothing = float("-inf")
    by_group = tl.reshape(ranked, (BLOCK_T, GROUPS, size))
    worth = tl.max(by_group, axis=2)
    if TOP2:
        member = tl.arange(0, size)[None, None, :]
        first = tl.min(tl.where(by_group == worth[:, :, None], member, size), axis=2)
        others = tl.where(member == first[:, :, None], nothing, by_group)
        worth += tl.max(others, axis=2)
    group = tl.arange(0, GROUPS)
    kept = tl.zeros((BLOCK_T, GROUPS), dtype=tl.int1)
    for _choice in tl.static_range(LIMITED):
        hit = group[None, :] == _first_of_best(worth, group)[:, None]
        kept = kept | hit
        worth = tl.where(hit, nothing, worth)
    limited = tl.where(kept[:, :, None], by_group, nothing)
    return tl.reshape(limited, (BLOCK_T, BLOCK_E))


@triton.jit(do_not_specialize=["num_tokens"])
def route(  # noqa: PLR0917  # Triton's launch passes them by position
    scores_out: tl.tensor,
    weights_out: tl.tensor,
    experts_out: tl.tensor,
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMITED: tl.constexpr,
    TOP2: tl.constexpr,
) -> None:
    """Write the scores, experts (unless they are given) and weights of some tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = token < num_tokens
    expert = tl.arange(0, BLOCK_E)
    here = there[:, None] & (expert < E)[None, :]
    place = token[:, None] * E + expert[None, :]
    nothing = float("-inf")
    logit = tl.load(logits + place, mask=here, other=nothing)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        best = tl.max(logit, axis=1)
        power = tl.exp(logit - tl.where(there, best, 0.0)[:, None])
        score = power / tl.where(there, tl.sum(power, axis=1), 1.0)[:, None]
    tl.store(scores_out + place, score, mask=here)
    ranked = score
    if bias is not None:
        ranked += tl.load(bias + expert, mask=expert < E, other=0.0)[None, :].to(score.dtype)
    is_number = ranked == ranked  # noqa: PLR0124  # no NaN, see the module's docstring
    ranked = tl.where(is_number, ranked, float("inf"))
    ranked = tl.where((expert < E)[None, :], ranked, nothing)
    if LIMITED < GROUPS:
        ranked = _limit_to_groups(ranked, BLOCK_T, BLOCK_E, GROUPS, LIMITED, TOP2)
    choices = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_T, BLOCK_K), dtype=score.dtype)
    for choice in tl.static_range(K):
        slot = token * K + choice
        if experts is None:
            chosen = _first_of_best(ranked, expert)
            tl.store(experts_out + slot, chosen.to(tl.int64), mask=there)
        else:
            chosen = tl.load(experts + slot, mask=there, other=-1)
        hit = expert[None, :] == chosen[:, None]
        ranked = tl.where(hit, nothing, ranked)
        weight = tl.sum(tl.where(hit & here, score, 0.0), axis=1)
        weights = tl.where((choices == choice)[None, :], weight[:, None], weights)
    if NORMALIZE:
        weights /= _at_least(tl.sum(weights, axis=1), TINY)[:, None]
    # A literal would have 32 bits.
    weights *= tl.full((1, 1), SCALE, score.dtype)
    slots = token[:, None] * K + choices[None, :]
    tl.store(weights_out + slots, weights, mask=there[:, None] & (choices < K)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def route_backward(  # noqa: PLR0917
    grad_logits: tl.tensor,
    load: tl.tensor,
    grad_weights: tl.tensor,
    grad_scores: tl.tensor,
    scores: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TINY: tl.constexpr,
) -> None:
    """Write the gradient of the logits of some tokens; add their experts to the loads."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = token < num_tokens
    expert = tl.arange(0, BLOCK_E)
    here = there[:, None] & (expert < E)[None, :]
    place = token[:, None] * E + expert[None, :]
    score = tl.load(scores + place, mask=here, other=0.0)
    if grad_scores is None:
        grad = tl.zeros((BLOCK_T, BLOCK_E), dtype=score.dtype)
    else:
        grad = tl.load(grad_scores + place, mask=here, other=0.0)
    counts = tl.zeros((BLOCK_E,), dtype=tl.int64)
    total = tl.zeros((BLOCK_T,), dtype=score.dtype)
    along = tl.zeros((BLOCK_T,), dtype=score.dtype)
    for choice in tl.static_range(K):
        chosen = tl.load(experts + token * K + choice, mask=there, other=-1)
        hit = expert[None, :] == chosen[:, None]
        counts += tl.sum((hit & here).to(tl.int64), axis=0)
        if grad_weights is not None and NORMALIZE:
            dw = tl.load(grad_weights + token * K + choice, mask=there, other=0.0)
            weight = tl.sum(tl.where(hit, score, 0.0), axis=1)
            total += weight
            along += dw * weight
    if load is not None:
        tl.atomic_add(load + expert, counts, mask=(expert < E) & (counts > 0))
    if grad_weights is not None:
        scale = tl.full((1,), SCALE, score.dtype)
        bounded = _at_least(total, TINY)
        for choice in tl.static_range(K):
            chosen = tl.load(experts + token * K + choice, mask=there, other=-1)
            dw = tl.load(grad_weights + token * K + choice, mask=there, other=0.0)
            if NORMALIZE:
                pull = tl.where(bounded > total, 0.0, along / bounded)
                dw = (dw - pull) / bounded
            grad += tl.where(expert[None, :] == chosen[:, None], (dw * scale)[:, None], 0.0)
    if SIGMOID:
        grad = grad * (1.0 - score) * score
    else:
        grad = (grad - tl.sum(grad * score, axis=1)[:, None]) * score
    tl.store(grad_logits + place, grad, mask=here)
