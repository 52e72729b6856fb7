"""Tensor-parallel styles, losses over split classes and split sequences, against plain modules."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.tensors import error_of, generator, normal

BATCH, LENGTH, WIDTH, WORDS = 2, 4, 6, 10


class Layers(nn.Module):
    """Words, a norm, two products with a residual path around them, a norm, a head.

    Args:
        hidden: Width of what is between the products.
        words: Number of words.
        bias: Whether products have biases.
        rms: Whether norms are of the root mean square.
    """

    def __init__(self, hidden: int, words: int, *, bias: bool, rms: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.table = nn.Embedding(words, WIDTH)
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)
        self.last = norm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores of words."""
        hidden = self.table(words)
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        scores: Tensor = self.head(self.last(hidden))
        return scores


@dataclass(frozen=True)
class Plan:
    """How layers are split.

    Attributes:
        hidden: Width between the products; odd: ranks have other numbers of columns.
        words: Number of words.
        rows: Whether the table is cut by rows, and not by columns.
        sequence: Whether norms have a part of the sequence each.
        bias: Whether products have biases.
        rms: Kind of the norms.
        parted: Whether the loss is computed of scores that are split.
        smoothing: Label smoothing.
        ignored: Whether some words do not count.
        weighed: Whether words are weighed.
        reduction: Reduction of the loss.
        tied: Whether the head has the table's matrix.
    """

    hidden: int = 8
    words: int = WORDS
    rows: bool = True
    sequence: bool = True
    bias: bool = True
    rms: bool = False
    parted: bool = False
    smoothing: float = 0.0
    ignored: bool = False
    weighed: bool = False
    reduction: str = "mean"
    tied: bool = False


def cases() -> Iterator[Case]:
    """Return plans, single styles with their layouts, losses and attention."""
    for hidden, words in product((8, 5), (WORDS, 9)):
        for rows, parted, *more in product((True, False), repeat=5):
            yield _plan(Plan(hidden, words, rows, more[0], more[1], more[2], parted))
    for words in (WORDS, 9):
        for parted in (False, True):
            plan = partial(Plan, words=words, parted=parted)
            yield _plan(plan(tied=True))
            yield _plan(plan(ignored=True))
            yield _plan(plan(weighed=True))
            yield _plan(plan(weighed=True, ignored=True))
            for smoothing, reduction in product((0.0, 0.2), ("mean", "sum", "none")):
                yield _plan(plan(smoothing=smoothing, reduction=reduction))
    for name, work in _losses().items():
        for classes in (8, 9):
            yield Case(f"loss_parallel {name}, {classes} classes", partial(work, classes))
    layouts: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2))
    for style, into, out, local, height in product(
        ("colwise", "rowwise"), layouts, layouts, (True, False), (4, 5)
    ):
        told = f"{style} {height} rows, {into} to {out}, {'local' if local else 'DTensor'}"
        yield Case(
            told.replace("(", "").replace(")", ""), partial(_style, style, into, out, local, height)
        )
    for causal, rotate, balanced, length in product(
        (False, True), ("allgather", "alltoall"), (True, False), (8, 12)
    ):
        told = f"context_parallel {'causal' if causal else 'full'}, {rotate}, {length}"
        told += ", balanced" if balanced else ""
        yield Case(told, partial(_attention, causal, rotate, balanced, length))


def _plan(plan: Plan) -> Case:
    usual = Plan()
    told = [
        f"{name} {value}" for name, value in vars(plan).items() if value != getattr(usual, name)
    ]
    return Case(f"plan {', '.join(told) or 'as usual'}", partial(_planned, plan))


def _split(plan: Plan, model: Layers) -> nn.Module:
    """Return the model, split by torch's styles."""
    mesh = init_device_mesh("cpu", (2,))
    between: Placement = Shard(1) if plan.sequence else Replicate()
    table = RowwiseParallel if plan.rows else ColwiseParallel
    styles: dict[str, ParallelStyle] = {
        "table": table(input_layouts=Replicate(), output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if plan.parted else Replicate(),
            use_local_output=not plan.parted,
        ),
    }
    if plan.sequence:
        styles |= {"norm": SequenceParallel(), "last": SequenceParallel()}
    parallelize_module(model, mesh, styles)
    if plan.tied:
        model.head.weight = model.table.weight
    return model


def _planned(plan: Plan) -> Errors:
    torch.set_default_dtype(torch.float64)
    plain = Layers(plan.hidden, plan.words, bias=plan.bias, rms=plan.rms)
    if plan.tied:
        plain.head.weight = plain.table.weight
    split = _split(plan, Layers(plan.hidden, plan.words, bias=plan.bias, rms=plan.rms))
    words = torch.randint(plan.words, (BATCH, LENGTH), generator=generator())
    wanted = torch.randint(plan.words, (BATCH * LENGTH,), generator=generator(9))
    if plan.ignored:
        wanted[::3] = -100
    weight = normal(plan.words, seed=4).abs() + 0.1 if plan.weighed else None

    def lossy(scores: Tensor) -> Tensor:
        loss = F.cross_entropy(
            scores.flatten(0, 1),
            wanted,
            weight,
            reduction=plan.reduction,
            label_smoothing=plan.smoothing,
        )
        return loss if plan.reduction != "none" else (loss * loss).sum()

    one = lossy(plain(words))
    one.backward()
    if plan.parted:
        with loss_parallel():
            many = lossy(split(words))
            many.backward()
    else:
        many = lossy(split(words))
        many.backward()
    errors = {"loss": error_of(many, one)}
    theirs = dict(plain.named_parameters())
    for name, parameter in split.named_parameters():
        gradient = parameter.grad
        errors[f"gradient {name}"] = error_of(gradient, theirs[name].grad)
    return errors


def _losses() -> Mapping[str, Callable[[int], Errors]]:
    """Return losses over split classes, by name."""

    def entropy(scores: Tensor, _: Tensor) -> Tensor:
        logs = F.log_softmax(scores, 1)
        return -(logs.exp() * logs).sum()

    def divergence(scores: Tensor, _: Tensor) -> Tensor:
        return F.log_softmax(scores, 1).square().mean()

    def with_entropy(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted) + 0.1 * entropy(scores, wanted)

    def doubled(scores: Tensor, wanted: Tensor) -> Tensor:
        return 2 * F.cross_entropy(scores, wanted) + F.cross_entropy(scores * 2, wanted)

    def smoothed(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted, label_smoothing=0.1)

    def summed(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted, reduction="sum")

    def each(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted, reduction="none").square().sum()

    def ignoring(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted, ignore_index=2)

    def plain(scores: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(scores, wanted)

    functions = {
        f.__name__: f for f in (entropy, divergence, with_entropy, doubled, smoothed, summed)
    }
    functions |= {f.__name__: f for f in (each, ignoring, plain)}
    shapes: dict[str, tuple[int, ...]] = {
        "[C]": (),
        "[N, C]": (4,),
        "[N, C, L]": (2, 3),
        "[N, C, H, W]": (2, 3, 4),
        "[N, C, H, H]": (2, 3, 3),
    }
    return {
        f"{name} of {told}": partial(_loss_of, function, shape)
        for name, function in functions.items()
        for told, shape in shapes.items()
        if shape or name in ("plain", "summed")
    }


def _loss_of(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], classes: int
) -> Errors:
    """Compare a loss over split classes, and its gradient."""
    mesh = init_device_mesh("cpu", (2,))
    full = (*shape[:1], classes, *shape[1:])
    scores = normal(*full).requires_grad_()
    wanted = torch.randint(classes, shape, generator=generator(9))
    split = distribute_tensor(scores.detach(), mesh, [Shard(1 if shape else 0)]).requires_grad_()
    one = function(scores, wanted)
    one.backward()
    with loss_parallel():
        many = function(split, wanted)
        many.backward()
    return {"loss": error_of(many, one), "gradient": error_of(split.grad, scores.grad)}


def _style(style: str, into: Placement, out: Placement, local: bool, rows: int) -> Errors:
    """Compare a product under a style, whose inputs and outputs are laid out as asked."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Sequential(nn.Linear(WIDTH, 7))
    split: nn.Module = copy.deepcopy(plain)
    kind = ColwiseParallel if style == "colwise" else RowwiseParallel
    made = kind(input_layouts=into, output_layouts=out, use_local_output=local)
    split = parallelize_module(split, mesh, {"0": made})
    outer = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=into)
    back = PrepareModuleOutput(output_layouts=out, desired_output_layouts=Replicate())
    whole = parallelize_module(nn.Sequential(split), mesh, outer)
    parallelize_module(whole, mesh, back)
    inputs, again = (normal(rows, 3, WIDTH).requires_grad_() for _ in range(2))
    weight = normal(rows, 3, 7, seed=5)
    one, many = plain(inputs), whole(again)
    one.backward(weight)
    many.backward(weight)
    errors = {"output": error_of(many, one), "gradient inputs": error_of(again.grad, inputs.grad)}
    theirs = dict(plain.named_parameters())
    for name, parameter in split.named_parameters():
        errors[f"gradient {name}"] = error_of(parameter.grad, theirs[name].grad)
    return errors


def _attention(causal: bool, rotate: str, balanced: bool, length: int) -> Errors:
    """Compare attention over a split sequence."""
    from torch.distributed.tensor.experimental import _attention as private  # noqa: PLC0415

    private.set_rotate_method(rotate)
    private._cp_options.enable_load_balance = balanced
    mesh = init_device_mesh("cpu", (2,))
    one = [normal(2, 2, length, 4, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    many = [each.detach().clone() for each in one]
    weight = normal(2, 2, length, 4, seed=4)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=causal)

    attend(*one).backward(weight)
    parts = [*many, weight]
    with context_parallel(
        mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)
    ):
        for each in many:
            each.requires_grad_()
        attend(*many).backward(parts[3])
        local = [each.grad for each in many]
    errors = {}
    for name, mine, theirs in zip("qkv", local, one, strict=True):
        assert mine is not None
        gathered = private.context_parallel_unshard(mesh, [mine], [2])[0]
        errors[f"gradient {name}"] = error_of(gathered, theirs.grad)
    return errors
