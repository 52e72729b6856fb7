"""Kernels that each block of a model launches, learned on a device that computes nothing.

The model runs forward and backward on `hp_dry.DryDevice`, as one rank with one layer of each kind,
once with two sequences and once with three; with three and four if the loss goes in tiles from
three on. The difference is what grows with tokens; the rest, such as weights, is read or written
whatever their number. All experts get the same number of tokens; where experts are computed one by
one, as in fp32, each has products of its own. Each part of a block has an autograd graph of its
own, so that its backward runs, and is counted, by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hp_context import Attention, SlidingWindow
from hp_dry import DryDevice
from hp_dry.trace import Launch, Trace
from hp_expert import ExchangeRead, LocalRead, MoE
from hp_plan.costs.routing import ALL_LAYERS, Skew, rows_per_rank
from hp_plan.costs.work import Kernel, KernelKind, Kernels
from hp_platform.dry_device import answering
from hp_trainer.config import ModelConfig
from hp_trainer.model import DropoutKey, Microbatch, look_ahead
from hp_trainer.model.block import Block
from hp_trainer.model.capabilities import Countable, Spreading
from hp_trainer.model.loss import loss_of
from hp_trainer.model.stage import Stage, experts_of, share_casts
from hp_trainer.model.transformer import build_stage

BEFORE, LOSS = "before", "loss"
_PARTS = (".attend", ".feed")
_PRODUCTS = frozenset(("mm", "addmm", "addmm_", "bmm", "baddbmm"))
EVEN = Skew("uniform")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class _Part:
    """A part of a stage while it runs.

    Attributes:
        name: Name under which launches are counted.
        launches: Launches of the forward.
        ends: Ends of its graph: its outputs, and inputs of parts inside it.
    """

    name: str
    launches: list[Launch] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)

    def cut(self, values: R) -> R:
        """End the graph at the tensors in some values; return the values with leaves instead."""

        def change(x: Tensor) -> Tensor:
            if x.grad_fn is None:
                return x
            self.ends.append(x)
            return x.detach().requires_grad_()

        changed: R = tree_map_only(Tensor, change, values)
        return changed


class _Parts:
    """Parts of a stage, each with a graph of its own.

    Args:
        trace: Trace of their device.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._seen = 0
        self._open: list[_Part] = []
        self._done: list[_Part] = []

    def cut(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function whose launches are counted under a name."""

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            outer, part = self._open[-1], _Part(name)
            outer.launches += self._new()
            self._open.append(part)
            output = function(*outer.cut(args), **outer.cut(kwargs))
            part.launches += self._new()
            self._done.append(self._open.pop())
            return part.cut(output)

        return call

    def run(self, forward: Callable[[], Tensor]) -> dict[str, Launches]:
        """Run all parts forward, then each backward; return the launches of each."""
        self._new()
        self._done.clear()
        self._open = [_Part(BEFORE)]
        before = self._open[0]
        before.cut(forward())
        before.launches += self._new()
        found: dict[str, Launches] = {}
        for part in (*self._done[::-1], before):
            gradients = [torch.empty_like(x) for x in part.ends]
            if gradients:
                torch.autograd.backward(part.ends, gradients)
            ways = found.setdefault(part.name, Launches([], []))
            ways.forward.extend(part.launches)
            ways.backward.extend(self._new())
        return found

    def _new(self) -> list[Launch]:
        """Return the launches since the last call."""
        events = self._trace.events[self._seen :]
        self._seen = len(self._trace.events)
        return [event for event in events if isinstance(event, Launch) and event.num_kernels]


class Launches(NamedTuple):
    """The launches of a part, forward and backward."""

    forward: list[Launch]
    backward: list[Launch]


def learn(
    model: ModelConfig,
    vocab_size: int,
    layers: Sequence[int],
    *,
    seq_len: int,
    dtype: str,
    sizes: Mapping[str, int],
) -> dict[str, Kernels]:
    """Learn the kernels of some layers, and of what is in front of them and behind.

    Args:
        model: Configuration of the model.
        vocab_size: Rows of the embedding.
        layers: Indices of the layers to run.
        seq_len: Positions of a sequence.
        dtype: Dtype of activations, as `train.dtype` names it.
        sizes: Ranks by axis, for a model that cuts itself over ranks.

    Returns:
        Kernels of each part by its name: `"before"`, `"layers.3.attend"`, `"layers.3.feed"`,
        `"layers.3.dense"` for parts of a layer of experts besides routed experts, `"layers.3"` for
        the rest of a block, `"loss"`; `"before"` includes the part between the last block and the
        loss.
    """
    build = partial(build_stage, model, vocab_size, compute_dtype=getattr(torch, dtype))
    with DryDevice() as device, answering(evenly):
        stage = build(layers=layers, first=True, last=True)
        _stand_alone(stage, sizes)
        stage.to_empty(device="cuda")
        if dtype == "float64":  # no weight is narrower than activations
            stage.to(torch.float64)
        share_casts(stage)
        run = partial(_loss, stage, model, seq_len=seq_len)
        # Later runs find casts, gradients, and the segments of masks by size.
        run(2).backward()
        lose, stage.linear_cross_entropy = stage.linear_cross_entropy, _no_loss
        run(3)
        parts = _Parts(device.trace)
        modules = named_blocks(stage)
        for name, block in modules.items():
            if isinstance(block, Block):
                block.attend = parts.cut(f"{name}.attend", block.attend)
                block.feed = parts.cut(f"{name}.feed", block.feed)
                for part in _dense_parts(block):
                    part.forward = parts.cut(f"{name}.dense", part.forward)
            else:
                experts: list[nn.Module] = [*experts_of(block)]
                for part in experts:
                    part.forward = parts.cut(f"{name}.feed", part.forward)
            block.forward = parts.cut(name, block.forward)
        stage.linear_cross_entropy = parts.cut(LOSS, lose)
        # From some number of tokens on, a loss goes in tiles, by other operators.
        for fewest in (2, 3):
            fewer, more = (parts.run(partial(run, fewest + further)) for further in (0, 1))
            if _names(fewer) == _names(more):
                break
    found = {}
    for name, ways in fewer.items():
        module = modules[name.rpartition(".")[0]] if name.endswith(_PARTS) else None
        is_expert = (
            name.endswith(".feed")
            and module is not None
            and (not isinstance(module, Block) or bool(_dense_parts(module)))
        )
        # See Note [Costs of a stage that cuts itself]; rows of experts are dealt out.
        ranks = 1 if is_expert else sizes["tp"]
        read = partial(
            _kernels,
            module=module,
            is_expert=is_expert,
            seq_len=seq_len,
            tokens=fewest * seq_len,
            ranks=ranks,
        )
        forward, backward = map(read, ways, more[name])
        found[name] = Kernels(forward, backward, Counter())
    return found


def routed(read: ExchangeRead | LocalRead, copy: Tensor, skew: Skew, *, layer: str) -> Tensor:
    """Return the numbers that the host reads of a routing, where no router runs.

    Args:
        read: Read of a layer of experts; see `hp_platform.dry_device`.
        copy: Host tensor in place of which the numbers are returned.
        skew: Shares of the experts.
        layer: Name of the layer.
    """
    num_ranks = read.num_ranks if isinstance(read, ExchangeRead) else 1
    slots = skew.slots(
        layer,
        num_tokens=read.num_tokens,
        top_k=read.top_k,
        num_experts=read.num_experts,
        num_ranks=num_ranks,
    )
    if isinstance(read, LocalRead):
        return read.numbers(slots, like=copy)
    rows = rows_per_rank(slots, read.num_tokens, read.top_k, num_ranks)
    return read.numbers(slots, rows, like=copy)


def evenly(copy: Tensor, purpose: object) -> Tensor:
    """Answer reads of a routing with equal shares, and all other reads with zeros."""
    if isinstance(purpose, ExchangeRead | LocalRead):
        return routed(purpose, copy, EVEN, layer=ALL_LAYERS)
    return copy


def named_blocks(stage: Stage) -> dict[str, nn.Module]:
    """Return the blocks of a stage by their global names."""
    names = {id(module): name for name, module in stage.named_modules()}
    names |= {id(block): f"layers.{index}" for index, block in stage.layers.items()}
    return {names[id(block)]: block for block in stage.blocks}


def _dense_parts(block: nn.Module) -> list[nn.Module]:
    """Return the parts of layers of experts that every rank has: routers and shared experts."""
    layers = [part for part in block.modules() if isinstance(part, MoE)]
    return [part for moe in layers for part in (moe.router, moe.shared) if part is not None]


def _stand_alone(stage: Stage, sizes: Mapping[str, int]) -> None:
    """Let a stage that can do so act as one of several ranks."""
    if isinstance(stage, Spreading):
        stage.expect_ranks(sizes)
    if isinstance(stage, Countable):
        stage.stand_alone(sizes, lambda _: None)


def _loss(stage: Stage, model: ModelConfig, num_sequences: int, *, seq_len: int) -> Tensor:
    """Return the loss of a microbatch."""
    tokens = torch.zeros(num_sequences, seq_len, dtype=torch.int64, device="cuda")
    output = forward(stage, model, tokens)
    return loss_of(output, tokens) if output.ndim else output


def forward(stage: Stage, model: ModelConfig, tokens: Tensor) -> Tensor:
    """Run the forward of a microbatch of tokens, int64 [B, S], which are their own targets."""
    num_sequences, seq_len = tokens.shape
    key = DropoutKey(0, 0, torch.arange(num_sequences), torch.arange(seq_len))
    counts = (tokens.numel(),) * model.num_mtp_modules
    ahead = look_ahead(tokens, tokens, counts) if counts else None
    microbatch = Microbatch(num_sequences, key, targets=tokens, ahead=ahead)
    output: Tensor = stage(tokens, microbatch=microbatch)
    return output


def _no_loss(x: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return x.sum()


def _names(found: Mapping[str, Launches]) -> dict[str, list[set[str]]]:
    """Return the names of the operators of each part, forward and backward."""
    return {name: [{each.what for each in way} for way in ways] for name, ways in found.items()}


def _kernels(
    fewer: list[Launch],
    more: list[Launch],
    *,
    module: nn.Module | None,
    is_expert: bool,
    seq_len: int,
    tokens: int,
    ranks: int,
) -> Counter[Kernel]:
    """Split the launches of a part into those per token and a fixed rest.

    Prices divide all but launches by the number of ranks that share the part.

    Args:
        fewer: Launches for `tokens` tokens.
        more: Launches for one sequence more.
        module: Block of the part, if it may have attention.
        is_expert: Whether the part is routed experts.
        seq_len: Positions of a sequence.
        tokens: Number of tokens.
        ranks: Ranks that share the part.
    """
    parts = [] if module is None else list(module.modules())
    seen = [seen_positions(part, seq_len) for part in parts if isinstance(part, Attention)]
    if [each.what for each in fewer] != [each.what for each in more]:
        fewer, more = _by_name(fewer), _by_name(more)
    found: defaultdict[object, Kernel] = defaultdict(Kernel)
    for place, (first, second) in enumerate(zip(fewer, more, strict=True)):
        kind = _kind(first)
        per_token = (second.num_bytes - first.num_bytes) / seq_len
        launches = (second.num_kernels - first.num_kernels) / seq_len
        # Operators of attention count all scores, and compute those that a query sees.
        share = seen[0] / seq_len if kind == "attention" and seen else 1.0
        # Kernels that only move bytes are priced alike, so one stands for all.
        found[kind if kind == "memory" else place] += Kernel(
            kind=kind,
            launches=first.num_kernels - launches * tokens,
            launches_per_token=ranks * launches,
            flops=ranks * share * (second.flops - first.flops) / seq_len,
            bytes=ranks * per_token,
            fixed_bytes=ranks * max(0.0, first.num_bytes - per_token * tokens),
            is_expert=is_expert,
        )
    return Counter(found.values())


def seen_positions(attention: Attention, seq_len: int) -> float:
    """Return the positions that a query sees on average: its window, or half of the sequence."""
    if isinstance(attention.mask, SlidingWindow):
        return float(min(attention.mask.left + 1 + attention.mask.right, seq_len))
    return seq_len / 2 if attention.mask.causal else float(seq_len)


def _kind(launch: Launch) -> KernelKind:
    name = launch.what.removeprefix("aten.").partition(".")[0]
    if name == "_grouped_mm":
        return "grouped"
    if "attention" in name:
        return "attention"
    return "product" if name in _PRODUCTS else "memory"


def _by_name(launches: list[Launch]) -> list[Launch]:
    """Return one launch for each operator, the sum of all of its launches."""
    found: defaultdict[str, list[Launch]] = defaultdict(list)
    for each in launches:
        found[each.what].append(each)
    return [
        replace(
            found[what][-1],
            num_kernels=sum(each.num_kernels for each in found[what]),
            num_bytes=sum(each.num_bytes for each in found[what]),
            flops=sum(each.flops for each in found[what]),
        )
        for what in sorted(found)
    ]
