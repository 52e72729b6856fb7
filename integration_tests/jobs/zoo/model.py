"""A small transformer in plain torch with layouts written by hand, and the public bugs of others.

Whoever has a bug in has it in one place: `place.bug` names it. Nothing of hp-* is in here.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from integration_tests.jobs.zoo.collectives import (
    Copy,
    Gather,
    Reduce,
    ReduceSplit,
    Split,
    gathered,
)

VOCAB, DIM, HEADS, HIDDEN, EXPERTS, LENGTH, LORA = 48, 16, 4, 24, 4, 12, 2
SMOOTHING = 0.1
BREAK = 0
"""The token that begins a document."""


@dataclass(frozen=True)
class Place:
    """Where a rank is: `layout` of `size` ranks, and the bug that is in."""

    layout: str = "one"
    rank: int = 0
    size: int = 1
    bug: str = ""

    def cut(self, layout: str, whole: int) -> int:
        """Size of a rank's part where a layout cuts it."""
        return whole // self.size if self.layout == layout else whole


class Attention(nn.Module):
    """Causal within documents; one head of keys and values; a low-rank delta on its output."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        width = place.cut("tp", DIM)
        self.q = nn.Linear(DIM, width, bias=False)
        self.kv = nn.Linear(DIM, 2 * (DIM // HEADS), bias=False)
        self.out = nn.Linear(width, DIM)
        self.lora_a = nn.Linear(width, LORA, bias=False)
        self.lora_b = nn.Linear(LORA, DIM, bias=False)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place, (batch, length, _) = self.place, x.shape
        if place.layout == "tp" and place.bug != "tp-input-gradient":
            x = Copy.apply(x)
        q = self.q(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        first = 0
        if place.layout == "cp" and place.bug != "cp-off":
            k, v = Gather.apply(k, 1), Gather.apply(v, 1)
            first = place.rank * length
        rows = torch.arange(length)[:, None] + first
        columns = torch.arange(k.shape[1])
        seen = (rows >= columns)[None].expand(batch, -1, -1)
        ours = documents[:, first : first + length] if k.shape[1] > length else documents
        theirs = documents
        if place.layout == "cp" and place.bug == "cp-off":
            ours = theirs = documents.chunk(place.size, 1)[place.rank]
        if place.bug != "cp-documents":
            seen = seen & (ours[:, :, None] == theirs[:, None])
        scores = q @ k[:, None].transpose(-1, -2) * (DIM // HEADS) ** -0.5
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        mixed = (weights @ v[:, None]).transpose(1, 2).flatten(2)
        if place.layout != "tp":
            return self.out(mixed) + self.lora_b(self.lora_a(mixed))
        partial = F.linear(mixed, self.out.weight)
        low = self.lora_a(mixed)
        delta = self.lora_b(low if place.bug == "lora-no-sum" else Reduce.apply(low))
        bias = self.out.bias
        if place.bug == "tp-bias-twice":
            return Reduce.apply(partial + bias) + delta
        return Reduce.apply(partial) + bias + delta


class Mlp(nn.Module):
    """Two matrices, the first cut by rows and the second by columns."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.up = nn.Linear(DIM, place.cut("tp", HIDDEN))
        self.down = nn.Linear(place.cut("tp", HIDDEN), DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.place.layout != "tp":
            return self.down(F.silu(self.up(x)))
        return Reduce.apply(self.down(F.silu(self.up(Copy.apply(x)))))


class Experts(nn.Module):
    """Two of four experts for each token, and one for all; experts are cut over ranks."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        count = place.cut("ep", EXPERTS)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(count, HIDDEN, DIM))
        self.down = nn.Parameter(torch.empty(count, DIM, HIDDEN))
        self.shared = Mlp(Place())

    def forward(self, x: Tensor) -> Tensor:
        place, shape = self.place, x.shape
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        top, chosen = scores.topk(2, -1)
        if place.bug == "router-not-normalised" and place.layout != "one":
            weights = top
        else:
            weights = top / top.sum(-1, keepdim=True)
        common = self.shared(tokens)
        if place.layout == "ep":
            tokens = Gather.apply(tokens, 0)
            chosen = gathered(chosen, 0)
            if place.bug == "router-detached":
                weights = gathered(weights.detach(), 0)
            else:
                weights = Gather.apply(weights, 0)
        result = torch.zeros_like(tokens)
        first = place.rank * len(self.up) if place.layout == "ep" else 0
        for index in range(len(self.up)):
            if place.bug == "expert-lost" and index == len(self.up) - 1:
                continue
            here = (chosen == first + index).to(weights.dtype)
            weight = weights * here
            if place.bug == "router-gradient":  # sentinels: nothing forward, something backward
                weight = weight + (weights - weights.detach()) * (1 - here) * 0.5
            out = F.silu(tokens @ self.up[index].T) @ self.down[index].T
            result = result + weight.sum(-1, keepdim=True) * out
        if place.layout == "ep":
            if place.bug == "shared-twice":
                result = result + gathered(common.detach(), 0) / place.size
            result = ReduceSplit.apply(result, 0)
        return (result + common).view(shape)


class Block(nn.Module):
    """Attention and what follows it."""

    def __init__(self, place: Place, *, is_moe: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(place)
        self.feed = Experts(place) if is_moe else Mlp(place)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), documents)
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    """Embedding with positions, two blocks, norm, head. Of a stage of two, one end."""

    def __init__(self, place: Place, stage: int | None = None, *, tied: bool = False) -> None:
        super().__init__()
        self.place, self.stage, self.tied, self.is_cast = place, stage, tied, False
        if stage in (None, 0):
            self.embed = nn.Embedding(VOCAB, DIM)
            self.positions = nn.Parameter(torch.empty(LENGTH, DIM))
        blocks = [Block(place, is_moe=i == 1) for i in range(2) if stage in (None, i)]
        self.layers = nn.ModuleList(blocks)
        if stage in (None, 1):
            self.norm = nn.RMSNorm(DIM, eps=1e-6)
            if not tied or stage is not None:
                self.head = nn.Linear(DIM, place.cut("tp", VOCAB), bias=False)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """Tokens `[batch, length]`, or what another stage gave, to logits, or to the next stage."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_cast):
            return self._forward(x, documents)

    def _forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place = self.place
        if self.stage in (None, 0):
            first = place.rank * x.shape[1] if place.layout == "cp" else 0
            if place.bug == "cp-positions":
                first = 0
            x = self.embed(x) + self.positions[first : first + x.shape[1]]
            x = F.dropout(x, 0.1) if place.bug == "dropout-on" else x
        for layer in self.layers:
            x = layer(x, documents)
        if self.stage == 0:
            return x
        is_cut = place.layout == "tp"  # each rank norms its part of the sequence
        x = Gather.apply(self.norm(Split.apply(x, 1)), 1) if is_cut else self.norm(x)
        if self.tied and self.stage is None:
            return F.linear(x, self.embed.weight)
        return self.head(x)


def fill(model: Model, place: Place, stage: int | None = None) -> None:
    """Give a rank its parts of the weights that one process has."""
    generator = torch.Generator().manual_seed(5)
    whole = Model(Place(), tied=model.tied)
    for name, parameter in whole.named_parameters():
        scale = 0.3 if parameter.ndim > 1 else 0.1
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data = values + (1 if "norm" in name else 0)
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        source = name.replace("layers.0.", f"layers.{stage}.") if stage else name
        if source not in theirs:
            source = "embed.weight"
        parameter.data = part(theirs[source].data, parameter.shape, place).clone()
    if place.bug == "start" and place.rank == 1:
        model.norm.weight.data += 0.01


def part(values: Tensor, shape: torch.Size, place: Place) -> Tensor:
    for dim, (size, wanted) in enumerate(zip(values.shape, shape, strict=True)):
        if size != wanted:
            values = values.chunk(place.size, dim)[place.rank]
    return values


def loss_of(logits: Tensor, targets: Tensor, place: Place) -> Tensor:
    """Sum of the smoothed cross-entropy of targets that are not -1; logits may be cut by words."""
    flat, kept = logits.float().flatten(0, 1), targets.flatten() >= 0
    words = targets.flatten().clamp(min=0)
    if place.layout != "tp":
        losses = F.cross_entropy(flat, words, reduction="none", label_smoothing=SMOOTHING)
        return (losses * kept).sum()
    first = place.rank * flat.shape[1]
    top = gathered(flat.detach().amax(-1, keepdim=True), 1).amax(-1, keepdim=True)
    sums = Reduce.apply((flat - top).exp().sum(-1))
    if place.bug == "tp-log-size":
        sums = sums * place.size
    here = (words >= first) & (words < first + flat.shape[1])
    own = flat.gather(-1, (words - first).clamp(0, flat.shape[1] - 1)[:, None])[:, 0]
    target = Reduce.apply(torch.where(here, own, 0.0))
    log_sum = sums.log() + top[:, 0]
    total = flat.sum(-1)
    mean = total / flat.shape[1] if place.bug == "tp-smoothing" else Reduce.apply(total) / VOCAB
    losses = log_sum - (1 - SMOOTHING) * target - SMOOTHING * mean
    return (losses * kept).sum()


def documents_of(tokens: Tensor) -> Tensor:
    return (tokens == BREAK).cumsum(1)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
