"""Trains the model of the zoo for a few steps in a layout, with a bug in it or without."""

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from integration_tests.jobs.zoo.collectives import gathered, summed
from integration_tests.jobs.zoo.model import (
    DIM,
    LENGTH,
    VOCAB,
    Model,
    Place,
    documents_of,
    fill,
    loss_of,
    world,
)
from integration_tests.jobs.zoo.reports import LOOPS

BATCH, MICROBATCHES = 4, 2
CLIP = 0.5


PRECISIONS = ("float32", "float64", "bfloat16", "autocast")
"""float32 is lifted to float64 from outside; autocast computes products in bfloat16."""


def train(
    layout: str,
    bug: str = "",
    *,
    tied: bool = False,
    steps: int = 3,
    precision: str = "float32",
) -> None:
    """Train.

    Args:
        layout: One of one, dp, fsdp, tp, ep, cp and pp; or a job of `reports`, which has its own
            steps, and one precision.
        bug: What is wrong.
        tied: Whether one table is for both ends.
        steps: Number of updates.
        precision: One of `PRECISIONS`.
    """
    if layout in LOOPS:
        LOOPS[layout](bug)
        return
    rank, size = world()
    place = Place(layout, rank, size, bug)
    stage = rank if layout == "pp" else None
    model = Model(place, stage, tied=tied)
    fill(model, place, stage)
    model.is_cast = precision == "autocast"
    if precision == "bfloat16":
        model.bfloat16()
    if layout == "fsdp":
        _shard(model)
    optimizer = _optimizer(model, bug)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        if bug == "eval-mode" and step == 1:
            model.layers[0].get_submodule("norm1").eps = 1e-2  # type: ignore[assignment]
        _gradients(model, place, tokens)
        norm = _norm(model, place)
        if bug == "clip-per-rank":
            norm = norm * (1 + 0.1 * rank)
        _clip(model, norm)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(size if bug == "rate-per-rank" else 1):
            schedule.step()
        if bug == "stale-copy" and rank == 1:
            model.norm.weight.data -= 1e-3
        if step == 1:
            optimizer = _resumed(model, optimizer, schedule, bug)
            _evaluate(model, place, tokens)


def _shard(model: Model) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def _optimizer(model: Model, bug: str) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    decayed = [p for n, p in named if p.ndim > 1 and not (bug == "decay" and "feed" in n)]
    rest = [p for _, p in named if not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _resumed(
    model: Model,
    optimizer: torch.optim.AdamW,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    bug: str,
) -> torch.optim.AdamW:
    """Go on with what a checkpoint would have kept."""
    state = copy.deepcopy(optimizer.state_dict())
    fresh = _optimizer(model, bug)
    if bug == "resume-moments":
        for moments in state["state"].values():
            moments["exp_avg_sq"].zero_()
    fresh.load_state_dict(state)
    schedule.optimizer = fresh
    return fresh


def _gradients(model: Model, place: Place, tokens: Tensor) -> None:
    """Leave every parameter's gradient of the whole batch on its ranks."""
    inputs, targets = _cut(tokens, place)
    count = int((_targets(tokens) >= 0).sum())
    if place.layout == "pp":
        _pipeline(model, place, inputs, targets, count)
        return
    pieces = list(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))
    for index, (x, y) in enumerate(pieces):
        documents = documents_of(_whole(x, place))
        if place.bug == "last-microbatch" and index == 1:
            break
        loss = loss_of(model(x, documents), y, place)
        divisor = count / (place.size if place.layout == "fsdp" else 1)  # FSDP2 takes the mean
        if place.bug == "local-mean":
            divisor = float((y >= 0).sum()) * MICROBATCHES * place.size
        if place.bug == "microbatch-sum":
            divisor = count / MICROBATCHES
        (loss / divisor).backward()
        if place.bug == "reduce-each-microbatch":
            _reduce(model, place)
    if place.bug != "reduce-each-microbatch":
        _reduce(model, place)


def _reduce(model: Model, place: Place) -> None:
    """Add up what ranks have of gradients, once each."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None or place.layout in ("one", "fsdp", "pp"):
            continue
        if place.layout == "ep" and name.endswith((".feed.up", ".feed.down")):
            grad *= {"ep-scaled": place.size, "ep-averaged": 1 / place.size}.get(place.bug, 1)
        elif _has_terms(name, place):
            dtype = torch.bfloat16 if place.bug == "bf16-reduce" else grad.dtype
            total = summed(grad.to(dtype)).to(grad.dtype)
            grad.copy_(total / place.size if place.bug == "cp-averaged" else total)


def _has_terms(name: str, place: Place) -> bool:
    """Whether ranks have terms of a parameter's gradient."""
    if place.layout != "tp":
        return not (place.bug == "no-reduce" and name == "layers.1.norm1.weight")
    is_kv = ".kv." in name and place.bug != "tp-kv"
    return is_kv or (name == "norm.weight" and place.bug != "tp-norm")


def _pipeline(model: Model, place: Place, inputs: Tensor, targets: Tensor, count: int) -> None:
    """GPipe over two ranks."""
    xs, ys = inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in zip(xs, ys, strict=True):
        if place.rank == 0:
            out = model(x, documents_of(x))
            dist.send(out.detach().contiguous(), 1)
            held.append((x, out))
        else:
            given = torch.empty(*x.shape, DIM, dtype=model.norm.weight.dtype)
            dist.recv(given, 0)
            given.requires_grad_()
            held.append((given, loss_of(model(given, documents_of(x)), y, place) / count))
    for index, (given, out) in enumerate(held):
        if place.rank == 0:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            if place.bug != "last-microbatch" or index == 0:
                out.backward(grad)
        else:
            out.backward()
            assert given.grad is not None
            dist.send(given.grad.contiguous(), 0)
    tied = model.embed.weight if place.rank == 0 else model.head.weight
    if model.tied and place.bug != "tied-end":
        assert tied.grad is not None
        tied.grad.copy_(summed(tied.grad))


def _targets(tokens: Tensor) -> Tensor:
    """The next token, none of the first sample's second half: ranks have other counts of them."""
    targets = tokens[:, 1:].clone()
    targets[0, LENGTH // 2 :] = -1
    return targets


def _cut(tokens: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens[:, :-1], _targets(tokens)
    if place.layout in ("dp", "ep", "fsdp"):
        rank = 0 if place.bug == "same-data" else place.rank
        return inputs.chunk(place.size)[rank], targets.chunk(place.size)[rank]
    if place.layout == "cp":
        return inputs.chunk(place.size, 1)[place.rank], targets.chunk(place.size, 1)[place.rank]
    return inputs, targets


def _whole(x: Tensor, place: Place) -> Tensor:
    return gathered(x, 1) if place.layout == "cp" else x


def _norm(model: Model, place: Place) -> float:
    """Norm of all gradients, every one counted once."""
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        square = float(local.double().square().sum())
        total += square if place.rank == 0 or _is_cut(name, place, model) else 0.0
        if place.bug == "norm-twice" and place.rank > 0 and not _is_cut(name, place, model):
            total += square
    if place.size > 1 and place.bug != "norm-local":
        total = float(summed(torch.tensor(total, dtype=torch.float64)))
    return math.sqrt(total)


def _is_cut(name: str, place: Place, model: Model) -> bool:
    """Whether a parameter of a rank is not a copy of the first rank's."""
    if place.layout in ("fsdp", "pp"):
        return not (model.tied and name == "head.weight")
    if place.layout == "ep":
        return name.endswith((".feed.up", ".feed.down"))
    cut = (".q.", ".out.weight", ".lora_a.", ".feed.up.", ".feed.down.", "head.")
    return place.layout == "tp" and any(word in name for word in cut)


def _clip(model: Model, norm: float) -> None:
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, torch.tensor(norm))


@torch.no_grad()
def _evaluate(model: Model, place: Place, tokens: Tensor) -> None:
    inputs, targets = _cut(tokens.flip(1), place)
    if place.layout == "pp":
        return
    weight = model.norm.weight
    if place.bug == "eval-other":
        weight.data.mul_(1.1)
    logits = model(inputs, documents_of(_whole(inputs, place)))
    if place.bug == "eval-other":
        weight.data.div_(1.1)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0, max=logits.shape[-1] - 1))
