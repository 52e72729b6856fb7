"""`Muon`: torch's Muon for matrices cut in any way, and torch's AdamW for all other parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from hp_optim.exchange import Exchange, make_exchange, run, select
from hp_optim.layout import Layout
from hp_optim.matrices import Matrix, Split, matrices_of
from hp_optim.newton_schulz import (
    COEFFICIENTS,
    MOST_STEPS,
    NewtonSchulz,
    orthogonalize,
    rate_factor,
)
from hp_optim.plan import Piece, make_plan
from hp_platform import new_group_of_members

Group: TypeAlias = dict[str, Any]
"""Group of parameters with their options, as `torch.optim` has them."""
Splits: TypeAlias = Mapping[str, Split | Sequence[int]]

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
"""Defaults of torch's AdamW."""
RULES = (None, "original", "match_rms_adamw")
_OUTPUTS = ("lm_head.*", "*.lm_head.*", "output.weight", "embed_out.*")
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Muon(torch.optim.Optimizer):
    """Muon, in which each matrix is orthogonalised as a whole and once in the world.

    The definition and the names of all options are those of `torch.optim.Muon`. Parameters are
    plain tensors, or DTensors cut by FSDP2, tensor or expert parallelism or several of these;
    momentum is cut as its parameter is. Ranks send their pieces of a matrix to its owner and get
    their pieces of the update back, a bucket of matrices at a time, while the owners orthogonalise
    the bucket before. A parameter of three dims is a stack of matrices, such as those of experts; a
    matrix that only one rank has is not sent. Groups with `algorithm="adamw"` get torch's AdamW.

    All ranks that share parameters make the optimizer and step together.

    Attributes:
        dtype: Dtype of the iteration.
        directions: Local gradient and momentum of each parameter; empty but within a step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        split: Splits | None = None,
        layouts: Mapping[str, Layout] | None = None,
        bucket_bytes: int = 32 << 20,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Check all parameters, and plan who orthogonalises which matrix.

        Args:
            params: Parameters, named parameters or groups, such as those of `muon_groups`. A group
                with `algorithm="adamw"` takes `lr`, `betas`, `eps`, `weight_decay`, `foreach` and
                `fused` of torch's AdamW, and where it names none, the defaults of that.
            lr: Learning rate.
            weight_decay: Decoupled decay of weights.
            momentum: Share of the old momentum.
            nesterov: Whether the gradient is looked at once more.
            ns_coefficients: Coefficients of the iteration of Newton and Schulz.
            eps: Least norm that a matrix is divided by.
            ns_steps: Number of iterations.
            adjust_lr_fn: `"original"` or None, or `"match_rms_adamw"`.
            split: Pattern of names -> how these parameters are taken apart into matrices; sizes of
                rows stand for a `Split`.
            layouts: Name -> layout of a plain parameter that other ranks have, too, or have other
                parts of.
            bucket_bytes: Bytes for each rank after which a bucket of matrices is full.
            dtype: Dtype of the iteration, in which pieces travel as well. `torch.float64` is for
                tests.

        Raises:
            ValueError: If an option is out of range, a parameter is no matrix, or a split does not
                fit.
        """
        self._splits = {name: Split.of(given) for name, given in (split or {}).items()}
        self._layouts = dict(layouts or {})
        self.dtype, self._bucket_bytes = dtype, bucket_bytes
        self.directions: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._exchanges: list[Exchange] = []
        self._planned: list[int] | None = None
        self._process_groups: dict[str, ProcessGroup] = {}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon",
            "betas": _ADAMW["betas"],
            "foreach": None,
            "fused": None,
        }
        super().__init__(params, defaults)
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for pattern in (*self._splits, *self._layouts):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"{pattern} must be the name of a parameter: pass named_parameters()"
                )
        self._plan()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; all ranks that share its parameters do so together.

        Raises:
            ValueError: If an option is out of range or a parameter is no matrix.
        """
        if param_group.get("algorithm") == "adamw":
            param_group = _ADAMW | param_group
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            matrices = self.param_groups[-1]["algorithm"] == "muon"
            for name, parameter in _named(self.param_groups[-1]) if matrices else ():
                self._split(name, parameter)
        except ValueError:
            del self.param_groups[-1]
            raise
        self._planned = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move all parameters that have a gradient.

        Args:
            closure: Function that computes gradients and returns the loss.

        Raises:
            ValueError: If a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._planned is None or self._trained() != self._planned:
            self._plan()
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
            else:
                self._step_momentum(group)
        run(self._exchanges)
        self.directions.clear()
        return loss

    def _split(self, name: str, parameter: Tensor) -> Split:
        """Check that a parameter of Muon consists of matrices; return its split."""
        found = (given for pattern, given in self._splits.items() if fnmatchcase(name, pattern))
        split = next(found, Split())
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name}: dtype ({parameter.dtype}) must be floating")
        try:
            matrices_of(0, parameter.shape, split)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
        return split

    def _trained(self) -> list[int]:
        """Return what identifies the parameters of Muon that are trained at present."""
        groups = [group for group in self.param_groups if group["algorithm"] == "muon"]
        return [id(p) for group in groups for p in group["params"] if _is_trained(p)]

    def _plan(self) -> None:
        """Plan the exchanges of the parameters that are trained at present."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        by_ranks: dict[tuple[int, ...], _Parameters] = {}
        for number, group in enumerate(self.param_groups):
            for name, parameter in _named(group):
                if group["algorithm"] == "muon" and _is_trained(parameter):
                    layout = self._layouts.get(name) or Layout.of(parameter)
                    if rank in layout.ranks:
                        found = by_ranks.setdefault(layout.ranks, _Parameters(self))
                        split = self._split(name, parameter)
                        found.entries.append(_Entry(number, parameter, layout, split))
        self._exchanges = [self._exchange(found, rank) for found in by_ranks.values()]
        self._planned = self._trained()

    def _exchange(self, parameters: "_Parameters", rank: int) -> Exchange:
        groups, tensors, layouts, splits = zip(*parameters.entries, strict=True)
        steps = max(self.param_groups[number]["ns_steps"] for number in groups)
        elements = max(1, self._bucket_bytes // self.dtype.itemsize)
        plan = make_plan(layouts, splits, steps=steps, elements=elements)
        group = None
        if plan.shared:
            # Its name has the plan's digest, so that ranks with other plans are refused.
            name = f"muon {plan.digest()}"
            if name not in self._process_groups:
                self._process_groups[name] = new_group_of_members(plan.ranks, name=name)
            group = self._process_groups[name]
        device = local(tensors[0]).device
        return make_exchange(plan, group, parameters, rank=rank, dtype=self.dtype, device=device)

    def _step_momentum(self, group: Group) -> None:
        """Take up the gradients of a group in its momenta, and decay its weights."""
        found = []
        for name, parameter in _named(group):
            if parameter.grad is not None:
                gradient = _gradient(name, parameter)
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(
                        gradient, memory_format=torch.preserve_format
                    )
                momentum = local(state["momentum_buffer"])
                self.directions[parameter] = local(gradient), momentum
                found.append((local(parameter), local(gradient), momentum))
        if found:
            parameters, gradients, momenta = map(list, zip(*found, strict=True))
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            torch._foreach_mul_(parameters, 1 - _rate(group) * group["weight_decay"])

    def _step_adamw(self, group: Group) -> None:
        """Move a group by torch's AdamW: local tensors, since all of it is pointwise."""
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [])
        for name, parameter in _named(group):
            if parameter.grad is not None:
                gradient = _gradient(name, parameter)
                state = self.state[parameter]
                if not state:
                    state["step"] = _new_step(parameter, is_fused=bool(group["fused"]))
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = torch.zeros_like(
                            parameter, memory_format=torch.preserve_format
                        )
                tensors = (
                    parameter,
                    gradient,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                )
                for values, tensor in zip(lists, tensors, strict=True):
                    values.append(local(tensor))
        parameters, gradients, averages, squares, steps = lists
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class _Entry(NamedTuple):
    group: int  # its number, since a loaded state brings other dicts
    tensor: Tensor
    layout: Layout
    split: Split


class _Parameters:
    """The parameters of Muon that lie on the same ranks."""

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer
        self.entries: list[_Entry] = []

    def read(self, piece: Piece) -> Tensor | None:
        """Return the direction of a piece before it is orthogonalised; None without a gradient."""
        tensor, group = self._of(piece.matrix)
        if tensor not in self._optimizer.directions:
            return None
        gradient, momentum = (_view(x, piece) for x in self._optimizer.directions[tensor])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def orthogonalize(self, matrix: Matrix, direction: Tensor) -> Tensor:
        """Return the orthogonal factor of a matrix."""
        _, group = self._of(matrix)
        settings = NewtonSchulz(
            group["ns_coefficients"], group["ns_steps"], group["eps"], self._optimizer.dtype
        )
        return orthogonalize(direction, settings)

    def write(self, piece: Piece, update: Tensor) -> None:
        """Move a piece by its part of the orthogonal factor, unless it has no gradient."""
        tensor, group = self._of(piece.matrix)
        if tensor in self._optimizer.directions:
            whole = local(tensor)
            part = _view(whole, piece)
            rate = _rate(group) * rate_factor(group["adjust_lr_fn"], piece.matrix.shape)
            moved = part.add_(update, alpha=-float(rate))
            if not _is_view(piece):
                _stacked(whole)[piece.place][select(piece.rows, piece.cols, whole.device)] = moved

    def _of(self, matrix: Matrix) -> tuple[Tensor, Group]:
        entry = self.entries[matrix.parameter]
        return entry.tensor, self._optimizer.param_groups[entry.group]


def _is_trained(tensor: Tensor) -> bool:
    """Tell whether a tensor is no frozen parameter; a plain tensor is given to be moved."""
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return not is_frozen or tensor.grad is not None


def _rate(group: Group) -> float | Tensor:
    """Return a learning rate; a tensor stays one, in whose dtype torch computes with it."""
    rate: float | Tensor = group["lr"]
    return rate.squeeze() if isinstance(rate, Tensor) else rate


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, and a plain tensor as it is, without a graph."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach()


def _stacked(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor[None]


def _view(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a local tensor: a view, unless its indices have no single step."""
    return _stacked(tensor)[piece.place][select(piece.rows, piece.cols, tensor.device)]


def _is_view(piece: Piece) -> bool:
    return isinstance(piece.rows, range) and isinstance(piece.cols, range)


def _named(group: Group) -> list[tuple[str, Tensor]]:
    names = group.get("param_names") or [f"of shape {tuple(p.shape)}" for p in group["params"]]
    return [*zip(names, group["params"], strict=True)]


def _gradient(name: str, parameter: Tensor) -> Tensor:
    """Return a gradient, cut as its parameter is.

    Raises:
        ValueError: If it is sparse.
    """
    gradient = parameter.grad
    assert gradient is not None, "looked at before"
    if gradient.is_sparse:
        raise ValueError(f"gradient of parameter {name} must not be sparse")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _new_step(parameter: Tensor, *, is_fused: bool) -> Tensor:
    """Return a count of steps as torch's AdamW makes it."""
    if is_fused:
        return torch.zeros((), dtype=torch.float32, device=local(parameter).device)
    is_double = torch.get_default_dtype() == torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if is_double else torch.float32)


def _check_options(group: Group) -> None:
    """Refuse options that are out of range.

    Raises:
        ValueError: Naming the first of them.
    """
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} ({group[name]}) must be at least 0")
    if group["algorithm"] not in {"muon", "adamw"}:
        raise ValueError(f"algorithm ({group['algorithm']}) must be 'muon' or 'adamw'")
    if group["adjust_lr_fn"] not in RULES:
        raise ValueError(f"adjust_lr_fn ({group['adjust_lr_fn']}) must be one of {RULES}")
    if not 0 <= group["ns_steps"] <= MOST_STEPS:
        raise ValueError(f"ns_steps ({group['ns_steps']}) must be 0 to {MOST_STEPS}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients {group['ns_coefficients']} must be three numbers")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas {group['betas']} must be at least 0 and below 1")


def muon_groups(
    module: nn.Module,
    *,
    adamw: Iterable[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> list[Group]:
    """Part the trained parameters of a module into those of Muon and those of AdamW.

    AdamW gets embeddings, the output matrix, convolutions, and what is no matrix and no stack of
    matrices, such as norms and biases; weights of the latter do not decay.

    Args:
        module: Module, after it has been cut.
        adamw: Patterns of names of further parameters for AdamW; None: usual names of output
            matrices (`lm_head.*`, `output.weight` and the like).
        options: Options of AdamW, such as `lr`.

    Returns:
        Groups for `Muon`, without empty ones.

    Raises:
        ValueError: If a pattern names no parameter.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    patterns = _OUTPUTS if adamw is None else tuple(adamw)
    for pattern in () if adamw is None else patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"pattern ({pattern}) must be that of a trained parameter")
    kinds = (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS)
    others = {id(m.weight) for m in module.modules() if isinstance(m, kinds)}
    parts: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "decayed": [], "kept": []}
    for name, parameter in named:
        is_other = id(parameter) in others or any(fnmatchcase(name, each) for each in patterns)
        kind = "decayed" if is_other or parameter.ndim > 3 else "muon"
        parts["kept" if parameter.ndim < 2 else kind].append((name, parameter))
    rest = {"algorithm": "adamw", **(options or {})}
    groups: list[Group] = [
        {"params": parts["muon"]},
        {"params": parts["decayed"], **rest},
        {"params": parts["kept"], **rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
