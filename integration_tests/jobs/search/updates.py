"""Clipping, scaling, optimizers and lists of tensors over meshes, against plain tensors."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.tensors import error_of, laid_out, normal, whole

Places = tuple[Placement, ...]
LISTS: dict[str, tuple[tuple[int, ...], tuple[Places, ...]]] = {
    "replicated": ((2,), ((Replicate(),), (Replicate(),))),
    "rows": ((2,), ((Shard(0),), (Shard(0),))),
    "columns": ((2,), ((Shard(1),), (Shard(1),))),
    "rows-first": ((2,), ((Shard(0),), (Replicate(),))),
    "replicated-first": ((2,), ((Replicate(),), (Shard(0),))),
    "both": ((2,), ((Shard(1),), (Shard(0),), (Replicate(),))),
    "partial": ((2,), ((Partial(),), (Shard(0),))),
    "2x2": ((2, 2), ((Shard(0), Shard(1)), (Replicate(), Shard(0)))),
    "2x2-replicated-first": ((2, 2), ((Replicate(), Replicate()), (Shard(0), Shard(1)))),
    "2x2-rows-twice": ((2, 2), ((Shard(0), Shard(0)), (Shard(1), Replicate()))),
}
"""Name -> sizes of the mesh, placements of each tensor of a list."""
_SHAPES = ((4, 6), (5, 3), (1, 4))
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "SGD-nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, maximize=True),
    "Adam": partial(torch.optim.Adam, eps=1e-3, weight_decay=0.1),
    "Adam-amsgrad": partial(torch.optim.Adam, eps=1e-3, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, eps=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, eps=1e-3),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": partial(torch.optim.Adamax, eps=1e-3),
    "NAdam": partial(torch.optim.NAdam, eps=1e-3),
    "RAdam": partial(torch.optim.RAdam, eps=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}
_LOOPS: dict[str, dict[str, object]] = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "default": {},
    "tensor-rate": {"foreach": False, "lr": torch.tensor(0.1, dtype=torch.float64)},
}
_PLAIN_ONLY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": partial(torch.optim.Muon, weight_decay=0.1),
    "LBFGS": torch.optim.LBFGS,
}
_FOREACH: dict[str, Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=-2),
    "sub": lambda x, y: torch._foreach_sub(x, y, alpha=2),
    "mul": lambda x, y: torch._foreach_mul(y, x),
    "mul-number": lambda x, _: torch._foreach_mul(x, -2.0),
    "div": lambda x, y: torch._foreach_div(x, [each.abs() + 1 for each in y]),
    "addcmul": lambda x, y: torch._foreach_addcmul(x, y, y, 0.5),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, y, [each.abs() + 1 for each in y], 0.5),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.3),
    "norm": lambda x, _: torch._foreach_norm(x, 2.0),
    "norm-1": lambda x, _: torch._foreach_norm(x, 1.0),
    "norm-inf": lambda x, _: torch._foreach_norm(x, float("inf")),
    "max": lambda x, _: torch._foreach_max(x),
    "powsum": lambda x, _: torch._foreach_powsum(x, 2),
    "neg": lambda x, _: torch._foreach_neg(x),
    "abs": lambda x, _: torch._foreach_abs(x),
    "exp": lambda x, _: torch._foreach_exp(x),
    "sqrt": lambda x, _: torch._foreach_sqrt([each.abs() for each in x]),
    "maximum": lambda x, y: torch._foreach_maximum(y, x),
    "clamp-max": lambda x, _: torch._foreach_clamp_max(x, 0.2),
    "add-number": lambda x, _: torch._foreach_add(x, 1.5),
    "sub-number": lambda x, _: torch._foreach_sub(x, 1.5),
    "pow": lambda x, _: torch._foreach_pow(x, 2.0),
    "copy": lambda x, y: _in_place(lambda z: torch._foreach_copy_(z, y), x),
    "zero": lambda x, _: _in_place(torch._foreach_zero_, x),
    "div-in-place": lambda x, _: _in_place(lambda z: torch._foreach_div_(z, -2.0), x),
}


def _in_place(
    function: Callable[[list[Tensor]], object], tensors: Sequence[Tensor]
) -> list[Tensor]:
    copies = [each.clone() for each in tensors]
    function(copies)
    return copies


def cases() -> Iterator[Case]:
    """Return lists of tensors with clipping, scaling, optimizers and functions of lists."""
    for name, (mesh, _) in LISTS.items():
        ranks = 2 if len(mesh) == 1 else 4
        for foreach, norm in product((True, False), (2.0, 1.0, 3.0, 0.5, float("inf"))):
            work = partial(_clipped, name, norm, foreach)
            yield Case(f"clip_grad_norm {name}, {norm}, foreach {foreach}", work, ranks)
        yield Case(f"clip_grad_value {name}", partial(_clipped, name, 0.0, True), ranks)
        for bad in range(3):
            yield Case(f"GradScaler {name}, infinite {bad}", partial(_scaled, name, bad), ranks)
        yield Case(f"average {name}", partial(_averaged, name), ranks)
        for function in _FOREACH:
            yield Case(f"foreach_{function} {name}", partial(_listed, name, function), ranks)
        if name == "partial":
            continue
        for optimizer, loop in product(OPTIMIZERS, _LOOPS):
            work = partial(_optimized, name, optimizer, loop)
            yield Case(f"{optimizer} {name}, {loop}", work, ranks)
        for optimizer in _PLAIN_ONLY:
            work = partial(_optimized, name, optimizer, "default")
            # Muon orthogonalizes in bfloat16.
            yield Case(f"{optimizer} {name}", work, ranks, 1e-2 if optimizer == "Muon" else 1e-9)


def _tensors(name: str, seed: int, *, grad: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of a list, plain and laid out: of each placement one of each shape."""
    sizes, places = LISTS[name]
    mesh = _mesh(sizes)
    plain, spread = [], []
    for number, (each, shape) in enumerate(product(places, _SHAPES)):
        tensor = normal(*shape, seed=seed + number).requires_grad_(grad)
        plain.append(tensor)
        spread.append(laid_out(tensor, mesh, each))
    return plain, [*spread]


def _mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xy"[: len(sizes)]))


def _with_gradients(name: str, seed: int = 100) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters whose gradients are laid out as they are; of partial ones whole."""
    plain, spread = _tensors(name, seed)
    gradients, parted = _tensors(name, 2 * seed)
    for tensor, gradient in zip((*plain, *spread), (*gradients, *parted), strict=True):
        tensor.requires_grad_()
        tensor.grad = gradient
    return plain, spread


def _clipped(name: str, norm: float, foreach: bool) -> Errors:
    plain, spread = _with_gradients(name)
    if norm:
        one = torch.nn.utils.clip_grad_norm_(plain, 0.7, norm, foreach=foreach)
        many = torch.nn.utils.clip_grad_norm_(spread, 0.7, norm, foreach=foreach)
        errors = {"norm": error_of(many, one)}
    else:
        torch.nn.utils.clip_grad_value_(plain, 0.3)
        torch.nn.utils.clip_grad_value_(spread, 0.3)
        errors = {}
    return {**errors, **_of_gradients(spread, plain)}


def _of_gradients(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> dict[str, float]:
    pairs = enumerate(zip(mine, theirs, strict=True))
    return {f"gradient {i}": error_of(one.grad, other.grad) for i, (one, other) in pairs}


def _scaled(name: str, bad: int) -> Errors:
    """Compare a step that a scaler leaves out, as a gradient's last element is infinite.

    Args:
        name: Name of the list.
        bad: 0: none is; 1: one of the first tensor; 2: one of the last.
    """
    plain, spread = _with_gradients(name)
    for tensors in (plain, spread):
        if bad:
            chosen = tensors[0] if bad == 1 else tensors[-2]
            gradient = chosen.grad
            assert gradient is not None
            infinite = whole(gradient)
            infinite[-1, -1] = float("inf")
            if isinstance(gradient, DTensor):
                infinite = laid_out(infinite, gradient.device_mesh, gradient.placements)
            chosen.grad = infinite
    for tensors in (plain, spread):
        optimizer = torch.optim.SGD(tensors, 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    errors = {}
    for i, (mine, theirs) in enumerate(zip(spread, plain, strict=True)):
        errors[f"weight {i}"] = error_of(mine, theirs)
    return errors


def _averaged(name: str) -> Errors:
    plain, spread = _tensors(name, 100)
    seen = []
    for tensors in (plain, spread):
        model = torch.nn.Module()
        for i, each in enumerate(tensors):
            model.register_parameter(f"p{i}", torch.nn.Parameter(each.detach()))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            average.update_parameters(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5 + step)
        seen.append([*average.module.parameters()])
    pairs = enumerate(zip(seen[1], seen[0], strict=True))
    return {f"average {i}": error_of(mine, theirs) for i, (mine, theirs) in pairs}


def _listed(name: str, function: str) -> Errors:
    plain, spread = _tensors(name, 100)
    others, more = _tensors(name, 200)
    one, many = _FOREACH[function](plain, others), _FOREACH[function](spread, more)
    pairs = enumerate(zip(many, one, strict=True))
    return {f"output {i}": error_of(mine, theirs) for i, (mine, theirs) in pairs}


def _optimized(name: str, optimizer: str, loop: str) -> Errors:
    plain, spread = _with_gradients(name)
    errors = {}
    for tensors in (plain, spread):
        make = {**OPTIMIZERS, **_PLAIN_ONLY}[optimizer]
        made = make(tensors, **{"lr": 0.1, **_LOOPS[loop]})
        for step in range(3):
            made.step(*([_zero] if optimizer == "LBFGS" else []))
            with torch.no_grad():
                for each in tensors:
                    assert each.grad is not None
                    each.grad.mul_(-0.7 + step)
    for i, (mine, theirs) in enumerate(zip(spread, plain, strict=True)):
        errors[f"weight {i}"] = error_of(mine, theirs)
    return errors


def _zero() -> float:
    return 0.0
