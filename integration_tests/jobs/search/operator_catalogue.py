"""Operators of torch that are tried with DTensors: what each computes, of which plain tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from integration_tests.jobs.search.tensors import generator, normal

Shape = tuple[int, ...]
Made = Callable[[Shape], Sequence[Tensor]]
SHAPES: dict[str, Shape] = {"even": (4, 6), "uneven": (5, 7), "lone": (1, 3), "square": (4, 4)}
"""The third leaves rank 1 without rows; the last is tried of some."""
_AND_SQUARE = ("even", "uneven", "square")
DEEP: dict[str, Shape] = {"even": (4, 6, 2), "uneven": (5, 3, 7)}
IMAGES: dict[str, Shape] = {"even": (4, 2, 6, 6), "uneven": (3, 5, 7, 7)}


@dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes:
        run: What is computed of the tensors: a tensor, or several.
        made: Function from a shape to the tensors, plain.
        shapes: Shapes that are tried.
        partials: Reductions of partial first tensors that are tried.
    """

    run: Callable[..., Tensor | Sequence[Tensor]]
    made: Made = lambda shape: [normal(*shape)]
    shapes: tuple[str, ...] = ("even", "uneven", "lone")
    partials: tuple[str, ...] = ("sum", "avg", "max", "min")


def _two(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(*shape, seed=8)]


def _product(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(shape[-1], shape[0] + 1, seed=8)]


def _with_bias(shape: Shape) -> list[Tensor]:
    first, second = _product(shape)
    return [first, second, normal(shape[0] + 1, seed=9)]


def _positive(shape: Shape) -> list[Tensor]:
    return [normal(*shape).abs() + 0.5]


def _indices(most: int, *shape: int, seed: int = 5) -> Tensor:
    return torch.randint(most, shape, generator=generator(seed))


def _rows(shape: Shape) -> list[Tensor]:
    return [normal(*shape), _indices(shape[0], 3)]


def _columns(shape: Shape) -> list[Tensor]:
    return [normal(*shape), _indices(shape[-1], *shape[:-1], 1)]


def _all_columns(shape: Shape) -> list[Tensor]:
    return [normal(*shape), _indices(shape[-1], *shape)]


def _fewer_rows(shape: Shape) -> list[Tensor]:
    return [normal(*shape), _indices(shape[-1], max(1, shape[0] - 1), *shape[1:])]


def _scattered(shape: Shape) -> list[Tensor]:
    return [*_all_columns(shape), normal(*shape, seed=8)]


def _larger_source(shape: Shape) -> list[Tensor]:
    return [*_all_columns(shape), normal(shape[0] + 2, *shape[1:], seed=8)]


def _classes(shape: Shape) -> list[Tensor]:
    return [normal(*shape), _indices(shape[-1], *shape[:-1])]


def _some_classes(shape: Shape) -> list[Tensor]:
    first, classes = _classes(shape)
    return (
        [first, classes.index_fill(0, torch.tensor([0]), -100)]
        if shape[0] > 1
        else [first, classes]
    )


def _weighed_classes(shape: Shape) -> list[Tensor]:
    return [*_classes(shape), normal(shape[-1], seed=9).abs() + 0.1]


def _table(shape: Shape) -> list[Tensor]:
    return [normal(9, 4), _indices(9, *shape)]


def _masked(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(*shape, seed=8) > 0]


def _normed(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(shape[-1], seed=8), normal(shape[-1], seed=9)]


def _channels(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(shape[1], seed=8), normal(shape[1], seed=9)]


def _filters(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(3, shape[1], 3, 3, seed=8), normal(3, seed=9)]


def _batched(shape: Shape) -> list[Tensor]:
    return [normal(*shape), normal(shape[0], shape[2], 3, seed=8)]


def _attended(shape: Shape) -> list[Tensor]:
    return [normal(*shape, seed=seed) for seed in (7, 8, 9)]


def _zeros_among(shape: Shape) -> list[Tensor]:
    return [normal(*shape) * (normal(*shape, seed=8) > 0)]


def _statistics(images: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
    """Return a batch norm's running statistics after a step that begins with some of its own."""
    mean, variance = mean.detach().clone(), variance.detach().clone()
    F.batch_norm(images, mean, variance, training=True)
    return [mean, variance]


_OPERATORS: dict[str, Operator] = {
    # one tensor, element by element
    "neg": Operator(torch.neg),
    "abs": Operator(torch.abs),
    "exp": Operator(torch.exp),
    "relu": Operator(F.relu),
    "gelu": Operator(F.gelu),
    "silu": Operator(F.silu),
    "sigmoid": Operator(torch.sigmoid),
    "tanh": Operator(torch.tanh),
    "softplus": Operator(F.softplus),
    "square": Operator(torch.square),
    "sign": Operator(torch.sign),
    "log": Operator(torch.log, _positive),
    "sqrt": Operator(torch.sqrt, _positive),
    "reciprocal": Operator(torch.reciprocal, _positive),
    "pow3": Operator(lambda x: x**3),
    "leaky_relu": Operator(lambda x: F.leaky_relu(x, 0.1)),
    "elu": Operator(F.elu),
    "mish": Operator(F.mish),
    "hardtanh": Operator(F.hardtanh),
    "erf": Operator(torch.erf),
    "round": Operator(torch.round),
    "threshold": Operator(lambda x: F.threshold(x, 0.2, 0.5)),
    "trunc": Operator(torch.trunc),
    "clamp": Operator(lambda x: x.clamp(-0.5, 0.5)),
    "clamp_min": Operator(lambda x: x.clamp_min(0.1)),
    "nan_to_num": Operator(torch.nan_to_num),
    "rsub": Operator(lambda x: 1 - x),
    "add_number": Operator(lambda x: x + 2),
    "sub_number": Operator(lambda x: x - 2),
    "mul_number": Operator(lambda x: x * -2),
    "div_number": Operator(lambda x: x / -2),
    "floor_divide": Operator(lambda x: x // 0.5),
    "remainder": Operator(lambda x: x % 0.5),
    "to_float32": Operator(lambda x: x.to(torch.float32).to(torch.float64) * 0 + x),
    "to_int": Operator(lambda x: (x * 3).to(torch.int64)),
    "to_bool": Operator(lambda x: x.bool()),
    "isnan": Operator(torch.isnan),
    "logical_not": Operator(torch.logical_not),
    "greater": Operator(lambda x: x > 0),
    "glu": Operator(lambda x: F.glu(x, -1), shapes=("even",)),
    "logit": Operator(lambda x: torch.logit(x, 0.1)),
    "frexp": Operator(lambda x: torch.frexp(x)[0]),
    "heaviside": Operator(torch.heaviside, _two),
    # in place, of a copy
    "fill_": Operator(lambda x: x.clone().fill_(3.0)),
    "zero_": Operator(lambda x: x.clone().zero_()),
    "add_": Operator(lambda x: x.clone().add_(1.0)),
    "mul_": Operator(lambda x: x.clone().mul_(-2.0)),
    "relu_": Operator(lambda x: x.clone().relu_()),
    "clamp_": Operator(lambda x: x.clone().clamp_(-0.1, 0.1)),
    "copy_": Operator(lambda x, y: x.clone().copy_(y), _two),
    "addcmul_": Operator(lambda x, y: x.clone().addcmul_(y, y), _two),
    "lerp_": Operator(lambda x, y: x.clone().lerp_(y, 0.3), _two),
    "sub_": Operator(lambda x, y: x.clone().sub_(y), _two),
    "masked_fill_": Operator(lambda x, m: x.clone().masked_fill_(m, 2.0), _masked),
    "index_fill_": Operator(lambda x, i: x.clone().index_fill_(0, i, 2.0), _rows),
    "index_add_": Operator(lambda x, i: x.clone().index_add_(0, i, x[:3] * 2), _rows, ("even",)),
    "set_row": Operator(lambda x: torch.cat([x]).clone().index_fill(0, torch.tensor(0), 1.0)),
    # two tensors, element by element
    "add": Operator(torch.add, _two),
    "sub": Operator(torch.sub, _two),
    "mul": Operator(torch.mul, _two),
    "add_alpha": Operator(lambda x, y: torch.add(x, y, alpha=-2), _two),
    "div": Operator(lambda x, y: x / (y.abs() + 1), _two),
    "sub_alpha": Operator(lambda x, y: torch.sub(x, y, alpha=-2), _two),
    "rsub_alpha": Operator(lambda x, y: torch.rsub(x, y, alpha=2), _two),
    "div_floor": Operator(lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"), _two),
    "maximum": Operator(torch.maximum, _two),
    "minimum": Operator(torch.minimum, _two),
    "fmax": Operator(torch.fmax, _two),
    "where": Operator(lambda x, y: torch.where(x > 0, x, y), _two),
    "atan2": Operator(torch.atan2, _two),
    "lerp": Operator(lambda x, y: torch.lerp(x, y, 0.3), _two),
    "logaddexp": Operator(torch.logaddexp, _two),
    "addcmul": Operator(lambda x, y: torch.addcmul(x, y, y, value=0.5), _two),
    "hypot": Operator(torch.hypot, _two),
    "addcdiv": Operator(lambda x, y: torch.addcdiv(x, y, y.abs() + 1), _two),
    "xlogy": Operator(lambda x, y: torch.xlogy(x, y.abs() + 1), _two),
    "masked_fill": Operator(lambda x, m: x.masked_fill(m, -1.0), _masked),
    "copysign": Operator(torch.copysign, _two),
    "mse_loss": Operator(F.mse_loss, _two),
    "l1_loss": Operator(F.l1_loss, _two),
    "smooth_l1": Operator(F.smooth_l1_loss, _two),
    "huber": Operator(F.huber_loss, _two),
    "kl_div": Operator(lambda x, y: F.kl_div(x, y.abs(), reduction="batchmean"), _two),
    "bce": Operator(lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), _two),
    "cosine": Operator(lambda x, y: F.cosine_similarity(x, y, dim=-1), _two),
    "dist": Operator(torch.dist, _two),
    "margin": Operator(lambda x, y: F.soft_margin_loss(x, y.sign()), _two),
    "equal": Operator(lambda x, y: torch.tensor(torch.equal(x, y)), _two),
    "allclose": Operator(torch.isclose, _two),
    "broadcast_add": Operator(lambda x, y: x + y[0], _two),
    "broadcast_mul": Operator(lambda x, y: x * y[:, :1], _two),
    "outer": Operator(lambda x, y: torch.outer(x[0], y[:, 0]), _two),
    # reductions
    "sum": Operator(torch.sum),
    "sum_last": Operator(lambda x: x.sum(-1)),
    "sum_first": Operator(lambda x: x.sum(0, keepdim=True)),
    "mean": Operator(torch.mean),
    "mean_last": Operator(lambda x: x.mean(-1)),
    "mean_first": Operator(lambda x: x.mean(0)),
    "nansum": Operator(torch.nansum),
    "prod": Operator(torch.prod),
    "prod_last": Operator(lambda x: x.prod(-1)),
    "max": Operator(torch.max),
    "min": Operator(torch.min),
    "amax": Operator(lambda x: x.amax(-1)),
    "amin": Operator(lambda x: x.amin(0)),
    "max_last": Operator(lambda x: x.max(-1)[0]),
    "max_last_index": Operator(lambda x: x.max(-1)[1]),
    "min_first": Operator(lambda x: x.min(0)[0]),
    "argmax": Operator(torch.argmax),
    "argmax_last": Operator(lambda x: x.argmax(-1)),
    "argmin_first": Operator(lambda x: x.argmin(0, keepdim=True)),
    "var": Operator(torch.var, shapes=("even", "uneven")),
    "var_last": Operator(lambda x: x.var(-1, correction=0)),
    "std_first": Operator(lambda x: x.std(0), shapes=("even", "uneven")),
    "var_mean": Operator(lambda x: torch.var_mean(x, -1)),
    "norm": Operator(torch.linalg.vector_norm),
    "norm_last": Operator(lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "norm1": Operator(lambda x: torch.linalg.vector_norm(x, 1)),
    "norm3": Operator(lambda x: torch.linalg.vector_norm(x, 3, dim=0)),
    "norm_inf": Operator(lambda x: torch.linalg.vector_norm(x, float("inf"))),
    "norm_minus_inf": Operator(lambda x: torch.linalg.vector_norm(x, -float("inf"), dim=-1)),
    "norm0": Operator(lambda x: torch.linalg.vector_norm(x, 0), _zeros_among),
    "norm_half": Operator(lambda x: torch.linalg.vector_norm(x, 0.5)),
    "norm_minus1": Operator(lambda x: torch.linalg.vector_norm(x, -1)),
    "norm_odd": Operator(lambda x: torch.linalg.vector_norm(-x.abs(), 3)),
    "frobenius": Operator(torch.linalg.matrix_norm),
    "tensor_norm": Operator(lambda x: x.norm(dim=-1, keepdim=True)),
    "powsum": Operator(lambda x: torch.ops.aten.linalg__powsum(x, 2)),
    "logsumexp": Operator(lambda x: torch.logsumexp(x, -1)),
    "logsumexp_first": Operator(lambda x: x.logsumexp(0, keepdim=True)),
    "count_nonzero": Operator(torch.count_nonzero, _zeros_among),
    "any": Operator(torch.any, _zeros_among),
    "all": Operator(torch.all, _zeros_among),
    "any_last": Operator(lambda x: (x > 0).any(-1)),
    "all_first": Operator(lambda x: (x > -1).all(0)),
    "aminmax": Operator(lambda x: [*torch.aminmax(x, dim=0)]),
    "median": Operator(torch.median),
    "median_last": Operator(lambda x: x.median(-1)[0]),
    "mode": Operator(lambda x: x.round().mode(-1)[0]),
    "kthvalue": Operator(lambda x: x.kthvalue(2, -1)[0]),
    "quantile": Operator(lambda x: torch.quantile(x, 0.3, dim=-1)),
    "trace": Operator(torch.trace),
    # reductions of reductions
    "norm_then_sum": Operator(lambda x: torch.linalg.vector_norm(x, dim=-1).sum()),
    "norm_then_mean": Operator(lambda x: torch.linalg.vector_norm(x, dim=0).mean()),
    "norm_then_norm": Operator(
        lambda x: torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1))
    ),
    "norm_then_max": Operator(lambda x: torch.linalg.vector_norm(x, dim=-1).max()),
    "norm_then_add": Operator(lambda x: x.norm(dim=-1) + 1),
    "norm_times": Operator(lambda x: x.norm(dim=-1) * 2),
    "norm_negative": Operator(lambda x: -x.norm(dim=-1)),
    "norm_squared": Operator(lambda x: x.norm() ** 2),
    "norm_divide": Operator(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "norm_stack": Operator(lambda x: torch.stack([x.norm(), (2 * x).norm()]).norm()),
    "norm_stack_sum": Operator(lambda x: torch.stack([x.norm(), (2 * x).norm()]).sum()),
    "norm_view": Operator(lambda x: x.norm(dim=-1).view(1, -1).sum(0)),
    "sum_then_max": Operator(lambda x: x.sum(-1).max()),
    "max_then_sum": Operator(lambda x: x.amax(-1).sum()),
    "mean_then_mean": Operator(lambda x: x.mean(0).mean()),
    "max_then_negative": Operator(lambda x: (-x.amax(-1)).amin()),
    "max_times": Operator(lambda x: x.amax(-1) * -1.5),
    "prod_then_sum": Operator(lambda x: x.prod(-1).sum()),
    "max_minus": Operator(lambda x: 1 - x.amax(-1)),
    "max_divide": Operator(lambda x: x.amax(0) / -2),
    "mean_then_add": Operator(lambda x: x.mean() + x.sum()),
    "sum_select": Operator(lambda x: x.sum(0)[1]),
    "mean_squared": Operator(lambda x: x.mean(-1) ** 2),
    "sum_exp": Operator(lambda x: x.sum(-1).exp()),
    "rms": Operator(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "centred": Operator(lambda x: x - x.mean(0, keepdim=True)),
    "unit": Operator(lambda x: F.normalize(x, dim=-1)),
    "unit_first": Operator(lambda x: F.normalize(x, dim=0)),
    "renorm": Operator(lambda x: x.renorm(2, 0, 1.0)),
    # along a dim
    "softmax": Operator(lambda x: x.softmax(-1)),
    "softmax_first": Operator(lambda x: x.softmax(0)),
    "log_softmax": Operator(lambda x: x.log_softmax(-1)),
    "cumsum": Operator(lambda x: x.cumsum(1)),
    "cumsum_minus": Operator(lambda x: x.cumsum(-1)),
    "cumsum_first": Operator(lambda x: x.cumsum(0)),
    "cumsum_minus2": Operator(lambda x: x.cumsum(-2)),
    "cumprod_minus": Operator(lambda x: x.cumprod(-1)),
    "logcumsumexp": Operator(lambda x: x.logcumsumexp(-1)),
    "cummax_minus": Operator(lambda x: x.cummax(-1)[0]),
    "sort": Operator(lambda x: x.sort(-1)[0]),
    "sort_first": Operator(lambda x: x.sort(0, descending=True)[0]),
    "argsort": Operator(lambda x: x.argsort(-1)),
    "topk": Operator(lambda x: x.topk(2, -1)[0]),
    "topk_first": Operator(lambda x: x.topk(1, 0)[0]),
    "flip": Operator(lambda x: x.flip(0)),
    "roll": Operator(lambda x: x.roll(1, -1)),
    "roll_all": Operator(lambda x: x.roll(2)),
    "diff": Operator(lambda x: x.diff(dim=-1)),
    "tril": Operator(torch.tril),
    "triu": Operator(lambda x: x.triu(1)),
    "diagonal": Operator(torch.diagonal),
    "diag_embed": Operator(torch.diag_embed),
    "pad": Operator(lambda x: F.pad(x, (1, 2))),
    "pad_first": Operator(lambda x: F.pad(x, (0, 0, 1, 0))),
    "repeat": Operator(lambda x: x.repeat(2, 3)),
    "repeat_interleave": Operator(lambda x: x.repeat_interleave(2, 0)),
    "tile": Operator(lambda x: x.tile(2)),
    "unfold": Operator(lambda x: x.unfold(-1, 2, 1)),
    "bucketize": Operator(
        lambda x, y: torch.bucketize(x, y.sort(0)[0]), lambda s: [normal(*s), normal(7, seed=8)]
    ),
    "searchsorted": Operator(
        lambda x, y: torch.searchsorted(y.sort(0)[0], x), lambda s: [normal(*s), normal(7, seed=8)]
    ),
    "histc": Operator(lambda x: torch.histc(x, 4, -2, 2)),
    "one_hot": Operator(lambda x: F.one_hot((x > 0).long(), 2)),
    # views and pieces
    "t": Operator(lambda x: x.t() * 1),
    "transpose": Operator(lambda x: x.transpose(-1, 0).exp()),
    "flatten": Operator(lambda x: x.flatten() * 2),
    "reshape": Operator(lambda x: x.reshape(-1, 2) * 2, shapes=("even",)),
    "view_split": Operator(lambda x: x.view(2, 2, -1) * 2, shapes=("even",)),
    "view_last": Operator(lambda x: x.view(x.shape[0], -1, 2).sum(-1), shapes=("even",)),
    "unsqueeze": Operator(lambda x: x.unsqueeze(-1).sum(0)),
    "squeeze": Operator(lambda x: x.unsqueeze(0).squeeze(0) * 2),
    "squeeze_all": Operator(lambda x: x.unsqueeze(1).squeeze() * 2),
    "expand": Operator(lambda x: x.unsqueeze(0).expand(3, -1, -1) * 1),
    "permute": Operator(lambda x: x.permute(1, 0) * 1),
    "movedim": Operator(lambda x: x.movedim(-1, 0) * 1),
    "unflatten": Operator(lambda x: x.unflatten(-1, (2, -1)).sum(1), shapes=("even",)),
    "view_dtype": Operator(lambda x: x.detach().view(torch.int64)),
    "select": Operator(lambda x: x.select(1, 1)),
    "select_minus": Operator(lambda x: x.select(-1, 1)),
    "select_minus2": Operator(lambda x: x.select(-2, 0) * 2),
    "index_row": Operator(lambda x: x[0] * 2),
    "index_last": Operator(lambda x: x[..., -1]),
    "slice": Operator(lambda x: x[:, 1:3]),
    "slice_rows": Operator(lambda x: x[1:] * 2, shapes=("even", "uneven")),
    "slice_step": Operator(lambda x: x[:, ::2]),
    "narrow": Operator(lambda x: x.narrow(1, 0, 2)),
    "narrow_minus": Operator(lambda x: x.narrow(-1, 1, 2)),
    "narrow_minus2": Operator(lambda x: x.narrow(-2, 0, 1)),
    "split": Operator(lambda x: x.split(2, -1)),
    "chunk": Operator(lambda x: x.chunk(2, 0)),
    "chunk_last": Operator(lambda x: x.chunk(3, -1)),
    "unbind": Operator(lambda x: x.unbind(0)),
    "unbind_last": Operator(lambda x: x.unbind(-1)),
    "tensor_split": Operator(lambda x: x.tensor_split(2, 1)),
    "hsplit": Operator(lambda x: x.tensor_split((1, 2), -1)),
    "cat": Operator(lambda x, y: torch.cat([x, y]), _two),
    "cat_last": Operator(lambda x, y: torch.cat([x, y], -1), _two),
    "stack": Operator(lambda x, y: torch.stack([x, y], 1), _two),
    "stack_minus": Operator(lambda x, y: torch.stack([x, y], -1), _two),
    "swap_halves": Operator(lambda x: torch.cat([-x[:, 3:], x[:, :3]], -1), shapes=("even",)),
    "meshgrid": Operator(lambda x: torch.meshgrid(x[0], x[:, 0], indexing="ij")),
    # indices
    "index_select": Operator(lambda x, i: x.index_select(0, i), _rows),
    "index": Operator(lambda x, i: x[i], _rows),
    "index_columns": Operator(lambda x, i: x[:, i], lambda s: [normal(*s), _indices(s[1], 3)]),
    "index_put": Operator(lambda x, i: x.index_put((i,), x[:1] * 0 + 1), _rows),
    "index_put_add": Operator(lambda x, i: x.index_put((i,), x[:1], accumulate=True), _rows),
    "index_add": Operator(lambda x, i: x.index_add(0, i, x[i]), _rows),
    "index_copy": Operator(lambda x, i: x.index_copy(0, i[:1], x[:1] * 2), _rows),
    "take_along": Operator(lambda x, i: torch.take_along_dim(x, i, -1), _columns),
    "gather": Operator(lambda x, i: x.gather(-1, i), _all_columns),
    "gather_one": Operator(lambda x, i: x.gather(-1, i), _columns),
    "gather_fewer": Operator(lambda x, i: x.gather(1, i), _fewer_rows, ("even", "uneven")),
    "scatter": Operator(lambda x, i, y: x.scatter(-1, i[:, :1], y[:, :1]), _scattered),
    "scatter_value": Operator(lambda x, i: x.scatter(1, i[:, :1], 2.0), _all_columns),
    "scatter_add": Operator(lambda x, i, y: x.scatter_add(-1, i, y), _scattered),
    "scatter_add_fewer": Operator(
        lambda x, i, y: x.scatter_add(1, i[:-1], y[:-1]), _scattered, ("even", "uneven")
    ),
    "scatter_add_larger": Operator(lambda x, i, y: x.scatter_add(1, i, y), _larger_source),
    "scatter_larger": Operator(lambda x, i, y: x.scatter(1, i[:, :1], y), _larger_source),
    "scatter_reduce": Operator(lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), _scattered),
    "masked_select": Operator(lambda x, m: x.masked_select(m), _masked),
    "masked_scatter": Operator(lambda x, m: x.masked_scatter(m, x * 2), _masked),
    "nonzero": Operator(torch.nonzero, _zeros_among),
    "embedding": Operator(lambda t, i: F.embedding(i, t), _table),
    "embedding_padding": Operator(lambda t, i: F.embedding(i, t, padding_idx=2), _table),
    "embedding_scaled": Operator(lambda t, i: F.embedding(i, t, scale_grad_by_freq=True), _table),
    "embedding_norm": Operator(lambda t, i: F.embedding(i, t.clone(), max_norm=0.5), _table),
    "embedding_bag": Operator(lambda t, i: F.embedding_bag(i, t, mode="sum"), _table),
    "embedding_then_max": Operator(lambda t, i: F.embedding(i, t).amax(-1), _table),
    "embedding_then_norm": Operator(lambda t, i: F.embedding(i, t).norm(dim=-1), _table),
    "embedding_add": Operator(lambda t, i: F.embedding(i, t) + 1, _table),
    "embedding_twice": Operator(lambda t, i: F.embedding(i, t) + F.embedding(i, t * 2), _table),
    "embedding_both": Operator(lambda t, i: (F.embedding(i, t), F.embedding(i.flip(0), t)), _table),
    "embedding_mul": Operator(lambda t, i: F.embedding(i, t) * 3, _table),
    "embedding_view": Operator(lambda t, i: F.embedding(i, t).flatten(0, 1).sum(0), _table),
    "embedding_sum": Operator(lambda t, i: F.embedding(i, t).sum(1), _table, _AND_SQUARE),
    "embedding_sum_all": Operator(lambda t, i: F.embedding(i, t).sum(), _table, _AND_SQUARE),
    "embedding_sum_last": Operator(lambda t, i: F.embedding(i, t).sum(-1), _table, _AND_SQUARE),
    "embedding_mean": Operator(lambda t, i: F.embedding(i, t).mean(1), _table, _AND_SQUARE),
    "embedding_t": Operator(
        lambda t, i: F.embedding(i, t).transpose(0, 1) * 1, _table, _AND_SQUARE
    ),
    "embedding_select": Operator(lambda t, i: F.embedding(i, t)[:, 0] * 1, _table, _AND_SQUARE),
    "embedding_cat": Operator(
        lambda t, i: torch.cat([F.embedding(i, t), F.embedding(i.flip(1), t)], -1),
        _table,
        _AND_SQUARE,
    ),
    # losses over classes
    "cross_entropy": Operator(F.cross_entropy, _classes, ("even", "uneven")),
    "cross_entropy_sum": Operator(lambda x, c: F.cross_entropy(x, c, reduction="sum"), _classes),
    "cross_entropy_none": Operator(lambda x, c: F.cross_entropy(x, c, reduction="none"), _classes),
    "cross_entropy_ignored": Operator(F.cross_entropy, _some_classes, ("even", "uneven")),
    "cross_entropy_smooth": Operator(
        lambda x, c: F.cross_entropy(x, c, label_smoothing=0.2), _classes, ("even", "uneven")
    ),
    "cross_entropy_weights": Operator(F.cross_entropy, _weighed_classes, ("even", "uneven")),
    "cross_entropy_weights_sum": Operator(
        lambda x, c, w: F.cross_entropy(x, c, w, reduction="sum"), _weighed_classes
    ),
    "cross_entropy_ignored_sum": Operator(
        lambda x, c: F.cross_entropy(x, c, reduction="sum"), _some_classes
    ),
    "nll_loss": Operator(F.nll_loss, _classes, ("even", "uneven")),
    "cross_entropy_soft": Operator(lambda x, y: F.cross_entropy(x, y.softmax(-1)), _two),
    "multi_margin": Operator(F.multi_margin_loss, _classes, ("even", "uneven")),
    # products
    "mm": Operator(torch.mm, _product),
    "addmm": Operator(lambda x, y, b: torch.addmm(b, x, y), _with_bias),
    "addmm_scaled": Operator(lambda x, y, b: torch.addmm(b, x, y, beta=0.5, alpha=2), _with_bias),
    "linear": Operator(lambda x, y, b: F.linear(x, y.t(), b), _with_bias),
    "mv": Operator(lambda x, y: x @ y[:, 0], _product),
    "dot": Operator(lambda x, y: torch.dot(x[0], y[0]), _two),
    "einsum": Operator(lambda x, y: torch.einsum("ij,ij->i", x, y), _two),
    "kron": Operator(torch.kron, _two),
    "gram": Operator(lambda x: x.t() @ x),
    "mm_relu": Operator(lambda x, y: F.relu(x @ y), _product),
    "mm_sum": Operator(lambda x, y: (x @ y).sum(0), _product),
    "mm_max": Operator(lambda x, y: (x @ y).amax(-1), _product),
    "mm_norm": Operator(lambda x, y: (x @ y).norm(), _product),
    "mm_softmax": Operator(lambda x, y: (x @ y).softmax(-1), _product),
    "mm_plus": Operator(lambda x, y: x @ y + 1, _product),
    "matrix_power": Operator(lambda x: torch.linalg.matrix_power(x.t() @ x, 2)),
    "cdist": Operator(torch.cdist, _two),
    "inverse": Operator(
        lambda x: torch.linalg.inv(x @ x.t() + 3 * torch.ones_like(x @ x.t()).tril().triu())
    ),
    "qr": Operator(lambda x: torch.linalg.qr(x.t())[1].abs()),
    "svdvals": Operator(torch.linalg.svdvals),
    # norms of layers
    "layer_norm": Operator(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), _normed),
    "layer_norm_plain": Operator(lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": Operator(lambda x, w, _: F.rms_norm(x, x.shape[-1:], w), _normed),
    "rms_norm_plain": Operator(lambda x: F.rms_norm(x, x.shape[-1:])),
    "layer_norm_all": Operator(lambda x: F.layer_norm(x, tuple(x.shape))),
}
_DEEP: dict[str, Operator] = {
    "bmm": Operator(torch.bmm, _batched),
    "matmul": Operator(torch.matmul, _batched),
    "baddbmm": Operator(lambda x, y: torch.baddbmm(y[:, :1, :], x, y), _batched),
    "attention": Operator(F.scaled_dot_product_attention, _attended),
    "attention_causal": Operator(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _attended
    ),
    "linear3": Operator(F.linear, lambda s: [normal(*s), normal(4, s[-1], seed=8)]),
    "flatten01": Operator(lambda x: x.flatten(0, 1) * 2),
    "flatten12": Operator(lambda x: x.flatten(1) * 2),
    "flatten_sum": Operator(lambda x: x.flatten(0, 1).sum(0)),
    "heads": Operator(lambda x: x.transpose(0, 1).reshape(x.shape[1], -1) * 1),
    "select3": Operator(lambda x: x.select(-2, 1).exp()),
    "cumsum3": Operator(lambda x: x.cumsum(-2)),
    "sum3": Operator(lambda x: x.sum((0, -1))),
    "mean3": Operator(lambda x: x.mean((-2, -1))),
    "norm3d": Operator(lambda x: torch.linalg.vector_norm(x, dim=(0, 2))),
    "softmax3": Operator(lambda x: x.softmax(-2)),
    "unbind3": Operator(lambda x: x.unbind(-2)),
    "squeeze3": Operator(lambda x: x[:1].squeeze(0) * 2),
    "cat3": Operator(lambda x: torch.cat([x, x[:, :1]], -2)),
    "index3": Operator(lambda x: x[:, torch.zeros(2, dtype=torch.long)]),
    "cross_entropy3": Operator(lambda x, c: F.cross_entropy(x.transpose(1, 2), c), _classes),
    "einsum3": Operator(lambda x, y: torch.einsum("bij,bjk->bik", x, y), _batched),
    "layer_norm3": Operator(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), _normed),
    "rms_norm3": Operator(lambda x, w, _: F.rms_norm(x, x.shape[-1:], w), _normed),
    "layer_norm_two": Operator(lambda x: F.layer_norm(x, tuple(x.shape[-2:]))),
    "repeat_heads": Operator(lambda x: x[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2) * 1),
    "group_norm3": Operator(lambda x: F.group_norm(x.transpose(1, 2).contiguous(), 1)),
    "gather3": Operator(lambda x, i: x.gather(-1, i), _columns),
    "argmax3": Operator(lambda x: x.argmax(-2)),
    "sort3": Operator(lambda x: x.sort(-2)[0]),
    "instance_norm": Operator(F.instance_norm),
    "avg_pool1d": Operator(lambda x: F.avg_pool1d(x, 2)),
    "max_pool1d": Operator(lambda x: F.max_pool1d(x, 2)),
    "conv1d": Operator(F.conv1d, lambda s: [normal(*s), normal(3, s[1], 2, seed=8)]),
}
_IMAGES: dict[str, Operator] = {
    "conv2d": Operator(F.conv2d, _filters),
    "conv2d_padded": Operator(lambda x, w, b: F.conv2d(x, w, b, padding=1), _filters),
    "avg_pool2d": Operator(lambda x: F.avg_pool2d(x, 2)),
    "max_pool2d": Operator(lambda x: F.max_pool2d(x, 2)),
    "adaptive_pool": Operator(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "upsample": Operator(lambda x: F.interpolate(x, scale_factor=2)),
    "bilinear": Operator(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "batch_norm": Operator(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), _channels
    ),
    "group_norm": Operator(lambda x, w, b: F.group_norm(x, 1, w, b), _channels),
    "instance_norm2": Operator(F.instance_norm),
    "batch_norm_stats": Operator(_statistics, _channels),
    "pixel_shuffle": Operator(lambda x: F.pixel_unshuffle(x, 2), shapes=("even",)),
}


GROUPS = ((_OPERATORS, SHAPES), (_DEEP, DEEP), (_IMAGES, IMAGES))
