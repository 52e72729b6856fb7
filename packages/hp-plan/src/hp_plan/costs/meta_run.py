"""Work of each block of a model, learned by running the model once without memory.

Each kind of work is recorded where it happens: matrix products when they are dispatched, kept bytes
when autograd saves a tensor, exchanges of tensor-parallel ranks where they are placed. Only two
kinds of modules do not run, and have their work computed instead: attention proper, which keeps its
arguments, its output and the logarithm of its denominators; and routed experts, which keep two of
their hidden rows. Work in front of and behind blocks is that of the first and the last stage.

Note [Costs of a stage that cuts itself]. Tensor-parallel ranks of hp-train's models share all that
a layer computes and keeps, and prices divide by their number. A model of transformers is cut by its
own plan, and most of it stays whole on every rank. So it runs as one of those ranks, and its work
is multiplied by their number.

Shape symbols: B sequences, S positions, N query heads, H width of a query head, K experts per
token, F hidden width of an expert, V vocabulary.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hp_base.errors import ConfigError
from hp_context import Attention
from hp_expert import MoE, Routing
from hp_plan.costs.kernels import forward, named_blocks, seen_positions
from hp_plan.costs.work import BlockWork, ModelWork, Weight, Work, alike
from hp_platform._internals import FakeTensorMode
from hp_trainer.config import ModelConfig
from hp_trainer.layout.vocabulary import LogitTile
from hp_trainer.model.block import Block
from hp_trainer.model.capabilities import (
    Countable,
    Counted,
    CutByExchanges,
    Exchanges,
    Spreading,
)
from hp_trainer.model.layers import WeightCasts, cast_linear
from hp_trainer.model.loss import loss_of, tiled_cross_entropy
from hp_trainer.model.parameters import Declared, declared
from hp_trainer.model.stage import Stage, share_casts
from hp_trainer.model.transformer import build_stage

_SEQUENCES = 2
_OF_RANK = frozenset(("flops", "scores", "kept", "heads", "routed", "logits"))
"""Attributes of `Work` that prices divide by the number of tensor-parallel ranks."""
P = ParamSpec("P")
R = TypeVar("R")
BEFORE, AFTER, LOSS, TILED = "before", "after", "loss", "tiled loss"


def run(
    model: ModelConfig,
    vocab_size: int,
    *,
    seq_len: int,
    dtype: str,
    sizes: Mapping[str, int],
) -> ModelWork:
    """Run forward and loss of a model with one layer of each kind, the first of it.

    Args:
        model: Configuration of the model.
        vocab_size: Rows of the embedding, V.
        seq_len: Positions of a sequence, S.
        dtype: Dtype of activations, as `train.dtype` names it.
        sizes: Ranks by axis, for a model that cuts itself over ranks.

    Raises:
        hp_base.errors.ConfigError: When `model.factory` makes no stage, or one that cannot be cut
            over these ranks.
    """
    build = partial(build_stage, model, vocab_size, compute_dtype=getattr(torch, dtype))
    stage = build(layers=sorted({*alike(model).values()}), first=True, last=True)
    if isinstance(stage, Countable):
        stage.expect_no_values()
    if isinstance(stage, Spreading):
        stage.expect_ranks(sizes)
    blocks = named_blocks(stage)
    weights = {
        name: _weights(_parameters(block), _names_of_cast(block, stage.casting))
        for name, block in blocks.items()
    }
    cast = _names_of_cast(stage, stage.casting)
    outside = _outside(stage)
    first, last = outside, dict[str, Declared]()
    if model.num_layers > 1:
        with contextlib.suppress(ConfigError):  # a model that cannot be cut is one stage
            first = _outside(build(layers=range(1), first=True, last=False))
            last = _outside(build(layers=range(model.num_layers)[-1:], first=False, last=True))
    if isinstance(stage, Countable):
        # The recorder is made later, of the stage that this call changes.
        stage.stand_alone(sizes, lambda elements: recorder.exchange(elements))  # noqa: PLW0108
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.to_empty(device="cpu")
        recorder = _Recorder(stage, num_ranks=sizes["tp"])
        for name, block in blocks.items():
            recorder.watch(name, block, is_layer=block in stage.layers.values())
        kept = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
        with recorder.counter, kept:
            tokens = torch.zeros(_SEQUENCES, seq_len, dtype=torch.int64)
            recorder.lose(forward(stage, model, tokens), tokens)
            recorder.enter(AFTER)
    work = partial(recorder.work, tokens=_SEQUENCES * seq_len)
    before = work(BEFORE, _weights({n: d for n, d in outside.items() if n in first}, cast))
    # Ranks that share the rows of a table sum the embeddings that each has found.
    summed = model.dim if any(w.spec.tp_dim is not None for w in before.weights) else 0
    after = work(AFTER, _weights({n: d for n, d in outside.items() if n not in first}, cast))
    works = {
        name: BlockWork(work(f"{name}.attend"), work(f"{name}.feed"), work(name, weights[name]))
        for name in blocks
    }
    loss, tiled = work(LOSS), work(TILED)
    return ModelWork(
        before=before + Work(summed=float(summed)),
        blocks=works,
        after=after,
        loss=loss,
        tiled_loss=replace(tiled, again=Work(flops=tiled.flops)) if tiled.flops else loss,
        tied=_weights({name: d for name, d in last.items() if name in first}, cast),
    )


def _parameters(module: nn.Module) -> dict[str, Declared]:
    found = declared(module)
    return {name: found[name] for name, _ in module.named_parameters()}


def _weights(found: Mapping[str, Declared], cast: Collection[str]) -> tuple[Weight, ...]:
    return tuple(Weight(n, tensor.shape, tensor.spec, n in cast) for n, tensor in found.items())


def _names_of_cast(whole: nn.Module, casting: Sequence[nn.Module]) -> set[str]:
    """Return the names in a module of the parameters that some modules inside it cast."""
    cast = {id(weight) for part in casting for weight in part.parameters(recurse=False)}
    return {name for name, weight in whole.named_parameters() if id(weight) in cast}


def _outside(stage: Stage) -> dict[str, Declared]:
    """Return the parameters of a stage that are in none of its blocks."""
    inside = {id(parameter) for block in stage.blocks for parameter in block.parameters()}
    found = _parameters(stage)
    return {name: found[name] for name, p in stage.named_parameters() if id(p) not in inside}


class _Recorder:
    """Records the work of each part of a stage.

    Attributes:
        counter: Mode that counts operations of matrix products.

    Args:
        stage: Stage, whose exchanges, attention and experts are replaced by functions that count.
        num_ranks: Number of tensor-parallel ranks of a stage that cuts itself; 1 if prices divide.
    """

    def __init__(self, stage: Stage, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.counter = FlopCounterMode(display=False)
        self._counts: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self._found: dict[object, Work] = {}
        self._now = BEFORE
        self._flops = 0
        share_casts(stage)
        assert stage.casts is not None
        self._casts = stage.casts
        self._known = _Storages(stage.parameters())
        if isinstance(stage, CutByExchanges):
            summed = partial(self._count, "summed")
            stage.place_exchanges(Exchanges(self._gather, summed, self._lose))
        stage.linear_cross_entropy = self._lose
        if isinstance(stage, Countable):
            stage.be_counted(Counted(self._attend_seeing, self._mix_others, self.exchange))
        blocks = [block for block in stage.blocks if isinstance(block, Block)]
        self._balanced = {id(block.moe) for block in blocks if block.balance_coefficient}
        for part in stage.modules():
            if isinstance(part, Attention):
                _replace_forward(part, partial(self._attend, part))
            elif isinstance(part, MoE):
                _replace_forward(part, partial(self._mix, part))

    def watch(self, name: str, block: nn.Module, *, is_layer: bool) -> None:
        """Record the work of a block under its name, and of its parts under theirs."""
        if isinstance(block, Block):
            block.attend = self._scoped(f"{name}.attend", block.attend)
            block.feed = self._scoped(f"{name}.feed", block.feed)
        own = name if isinstance(block, Block) else f"{name}.feed"
        block.forward = self._scoped(own, block.forward, is_layer=is_layer)

    def work(self, name: str, weights: tuple[Weight, ...] = (), *, tokens: int) -> Work:
        """Return the work that was recorded in a part, per token of a number of tokens."""
        counts = {n: count / tokens for n, count in self._counts[name].items()}
        if self._num_ranks > 1:  # see Note [Costs of a stage that cuts itself]
            counts |= {n: counts[n] * self._num_ranks for n in _OF_RANK & counts.keys()}
            counts.pop("losses", None)
        key = weights, tuple(sorted(counts.items()))
        return self._found.setdefault(key, Work.counted(counts, weights))  # equal parts are one

    def pack(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor that autograd keeps, once."""
        self._known.add(*self._casts.made)
        if self._known.add(tensor):
            self._counts[self._now]["kept"] += tensor.untyped_storage().nbytes()
        return tensor

    def lose(self, output: Tensor, targets: Tensor) -> None:
        """Compute the loss of the output of a stage, which may be logits."""
        self.enter(LOSS)
        if output.ndim:
            self._counts[LOSS]["logits"] = output.shape[2] * targets.numel()
        loss_of(output, targets)

    def enter(self, name: str) -> str:
        """Record under another name from now on; return the former name."""
        flops = self.counter.get_total_flops()
        self._counts[self._now]["flops"] += flops - self._flops
        self._flops = flops
        before, self._now = self._now, name
        return before

    def _scoped(
        self, name: str, function: Callable[Concatenate[Tensor, P], R], *, is_layer: bool = False
    ) -> Callable[Concatenate[Tensor, P], R]:
        @wraps(function)
        def call(x: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
            outer = self.enter(name)
            # Tensors that all blocks read are not counted as kept by one block.
            self._known.add(*(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)))
            try:
                return function(x, *args, **kwargs)
            finally:
                self.enter(AFTER if is_layer else outer)

        return call

    def _lose(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        casts: WeightCasts | None,
        is_split: bool,
    ) -> Tensor:
        """Compute `hp_trainer.model.loss.linear_cross_entropy` both by tiles and at once."""
        del is_split
        outer = self.enter(TILED)
        self._known.add(targets)
        tile = LogitTile(*targets.shape, *weight.shape[:1])
        tiled_cross_entropy(
            x.detach().clone().requires_grad_(), weight, targets, tile=tile, casts=casts
        )
        self.enter(LOSS)
        logits = cast_linear(x, weight, casts=casts)
        loss = loss_of(logits[None], targets[None])
        for name in (TILED, LOSS):
            self._counts[name]["logits"] = logits.numel()
            self._counts[name]["losses"] += targets.numel()
        self.enter(outer)
        return loss

    def _count(self, kind: str, x: Tensor) -> Tensor:
        self._counts[self._now][kind] += x.numel()
        return x

    def _gather(self, x: Tensor) -> Tensor:
        """Count a gather, of which each rank keeps all positions."""
        self._counts[self._now]["whole"] += x.numel() * x.element_size()
        return self._count("gathered", x)

    def _attend(
        self, core: Attention, q: Tensor, k: Tensor, v: Tensor, attn_mask: object = None
    ) -> Tensor:
        """Count attention of q, k and v, [B, S, N, H]; return an output of its shape."""
        del attn_mask
        return self._attend_seeing(q, k, v, seen_positions(core, q.shape[1]))

    def _attend_seeing(self, q: Tensor, k: Tensor, v: Tensor, seen: float) -> Tensor:
        B, S, N, H = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = (B, S, N, v.shape[3])
        y = _keep(shape, q, k, v, q.new_empty(B, S, N, dtype=wide), with_output=True)
        counts = self._counts[self._now]
        scores = 2.0 * seen * N * (H + v.shape[3]) * B * S
        counts["flops"] += scores
        counts["scores"] += scores
        counts["attentions"] += B * S
        counts["heads"] += sum(tensor.numel() for tensor in (q, k, v, y))
        return y

    def _mix(
        self,
        moe: MoE,
        x: Tensor,
        *,
        replay: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Count routed experts in place of `hp_expert.MoE.forward`."""
        routing = moe.router(x, replay=replay, padding=padding)
        x_TD = x.reshape(-1, x.shape[-1])
        T, K = routing.experts.shape
        _, F, D = moe.experts.w1.shape
        counts = self._counts[self._now]
        counts["flops"] += 6.0 * T * K * D * F
        counts["rows"] += T * K
        counts["balances"] += T * (id(moe) in self._balanced)
        hidden = x_TD.new_empty(2, T, K, F)
        counts["routed"] += hidden.nbytes
        y = _keep(x.shape, x_TD, hidden, routing.weights, routing.experts)
        return (y if moe.shared is None else y + moe.shared(x)), routing

    def exchange(self, elements: float) -> None:
        """Count elements that tensor-parallel ranks exchange."""
        self._counts[self._now]["summed"] += elements

    def _mix_others(
        self, x: Tensor, experts: Tensor, elements: int, *, kept: int, share: int
    ) -> Tensor:
        """Count experts, see `Counted.mix`; each of `share` ranks sends a part of the tokens."""
        T, K = experts.shape
        counts = self._counts[self._now]
        counts["flops"] += 2.0 * T * K * elements / share
        counts["rows"] += T * K
        if share > 1:  # outputs are gathered in forward, gradients and weights in backward
            self.exchange(T * (2 * x.shape[1] + K) / 2)
        hidden = x.new_empty(-(-T // share), K, kept)
        counts["routed"] += hidden.nbytes
        return _keep(x.shape, x, hidden, experts)


class _Storages:
    """Memory that was seen before, kept alive so that no id is used twice."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen: dict[int, torch.UntypedStorage] = {}
        self.add(*tensors)

    def add(self, *tensors: Tensor) -> bool:
        """Add the memory of tensors; return whether some of it is new."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        found = [storage for storage in storages if id(storage) not in self._seen]
        self._seen |= {id(storage): storage for storage in found}
        return bool(found)


def _replace_forward(module: nn.Module, function: Callable[..., object]) -> None:
    module.forward = function


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, shape: tuple[int, ...], with_output: bool, *kept: Tensor
    ) -> Tensor:
        y = kept[0].new_empty(shape)
        ctx.save_for_backward(*kept, *([y] if with_output else []))
        return y


def _keep(shape: tuple[int, ...], *kept: Tensor, with_output: bool = False) -> Tensor:
    """Return an output whose graph keeps some tensors, and maybe the output."""
    y: Tensor = _Keep.apply(shape, with_output, *kept)
    return y
