"""The loss by which transformers balances experts, of a model that is cut over ranks.

Shape symbols: B sequences, S positions, D width of the stream, T tokens, K experts of a token, E
experts.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_base.errors import ConfigError, told
from hp_platform import outside_graph
from hp_trainer.config import ModelConfig
from hp_trainer.model import Microbatch
from hp_transformers.stages.model import (
    CausalModel,
    by_folder,
    choose_experts,
    is_balanced,
    on_meta,
)
from hp_transformers.stages.outline import Answers

COLUMNS = 4
"""Columns in which counts travel: one byte of a count in each, which every dtype represents."""
_FUNCTION = "load_balancing_loss_func"
_BYTE = 8
_SAME = 1e-4  # relative, in float32
_Logits: TypeAlias = tuple[Tensor, ...]


class _Function(Protocol):
    """The function of transformers that computes the loss."""

    def __call__(self, logits: _Logits, num_experts: int, top_k: int, /) -> Tensor:
        """Return the loss of router logits [T, E] of each layer, a scalar."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The loss that balances the experts of a model.

    Attributes:
        coefficient: Factor of the loss.
        num_experts: E.
        top_k: K.
        routers: Index of router logits [T, E] in the output of each module that returns them, by
            its path; None: they are all of the output.
    """

    coefficient: float
    num_experts: int
    top_k: int
    routers: Mapping[str, int | None]

    def counted(self, logits: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return how often experts are chosen, int64 [E], and their summed probabilities [E].

        Args:
            logits: Router logits [T, E].
            keep: Mask of the rows that count, bool [T]; None: all of them.
        """
        shares_TE = logits.softmax(-1)
        chosen_TK = shares_TE.topk(self.top_k, dim=-1).indices
        ones_TK = torch.ones_like(chosen_TK)
        shares_TE = shares_TE.to(torch.promote_types(shares_TE.dtype, torch.float32))
        if keep is not None:
            ones_TK, shares_TE = ones_TK * keep[:, None], shares_TE * keep[:, None]
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64, device=logits.device)
        return counts_E.scatter_add_(0, chosen_TK.flatten(), ones_TK.flatten()), shares_TE.sum(0)

    def slope(self, counts: Tensor) -> Tensor:
        """Return the derivative of the loss by summed probabilities, float64 [E].

        Args:
            counts: Counts of all rows, int64 [E].
        """
        rows = counts.sum().double() / self.top_k
        return counts.double() * (self.coefficient * self.num_experts) / rows.square().clamp(min=1)


class Balancing:
    """The loss of one microbatch in one stage.

    With `output_router_logits` a model adds to its loss a coefficient times E x sum of c[e] p[e] /
    n^2, over the rows of router logits of all layers and tokens of one call: c counts how often an
    expert is chosen, p sums its probabilities, and n is the number of rows. Here the call is a
    microbatch, in whatever stages and ranks it is. Counts have no gradient, and the loss is linear
    in the probabilities. So a layer needs nothing of other layers, stages and ranks but the sum of
    counts, and needs that in backward alone. Counts travel with hidden states from stage to stage,
    in extra columns; the last stage sums them over ranks with other positions, and the sums travel
    back in the same columns of the gradient. The modules that return router logits, the coefficient
    and the form of the loss are learned by one run on the meta device and one comparison of
    functions; the only name that is relied on is `load_balancing_loss_func`.

    Attributes:
        before: Counts of stages before this one, int64 [E]; None on the first.
        settled: Counts of all layers and positions, int64 [E]; None before they are known.

    Args:
        balance: Loss of the model.
        microbatch: Microbatch, to which backward adds this stage's share of the loss.
        weight: Share of the microbatch in the batch of the step.
        name: Name of the stage; a microbatch may pass several stages on one rank.
        reports: Whether this rank reports its share; of ranks with the same tokens one does.
    """

    def __init__(
        self, balance: Balance, microbatch: Microbatch, weight: float, *, name: str, reports: bool
    ) -> None:
        self._balance, self._microbatch, self._weight = balance, microbatch, weight
        self._reports = reports
        self._name = name
        self._keep = None if microbatch.padding is None else ~microbatch.padding.flatten()
        self._logits: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.before: Tensor | None = None
        self._slope: Tensor | None = None
        self.settled: Tensor | None = None

    @outside_graph
    def begin(self) -> None:
        """Begin a layer; one that ran again in backward may have stopped half way."""
        self._logits.clear()

    @outside_graph
    def see(self, logits: Tensor) -> None:
        """Record router logits [T, E] of the layer that runs."""
        self._logits.append(logits)

    @outside_graph
    def attach(self, index: int, hidden: Tensor) -> Tensor:
        """Attach the loss of a layer to the hidden states that it returns, in each of its runs."""
        if not self._logits:
            return hidden
        found = [self._balance.counted(logits, self._keep) for logits in self._logits]
        counts, sums = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
        self._layers[index] = counts, sums.detach()
        attached: Tensor = _Attach.apply(hidden, sums, self)
        return attached

    def counts(self, device: torch.device) -> Tensor:
        """Return the summed counts of layers of this stage and those before, int64 [E]."""
        none = torch.zeros(self._balance.num_experts, dtype=torch.int64, device=device)
        total = sum((counts for counts, _ in self._layers.values()), none)
        return total if self.before is None else total + self.before

    def settle(self, counts: Tensor) -> None:
        """Take the counts of all layers and positions, int64 [E]."""
        self.settled, self._slope = counts, self._balance.slope(counts) * self._weight
        sums = [sums for _, sums in self._layers.values()]
        if sums and self._reports:
            share = (torch.stack(sums).sum(0).double() * self._slope).sum()
            self._microbatch.balance_losses[self._name] = share

    def finish(self, device: torch.device, group: ProcessGroup | None) -> None:
        """End the forward of the last stage.

        Args:
            device: Device of the counts.
            group: Ranks with other positions of the same sequences; None: there are none.
        """
        counts = self.counts(device)
        if group is not None:
            dist.all_reduce(counts, group=group)
        self.settle(counts)

    def send(self, hidden: Tensor) -> Tensor:
        """End the forward of any stage but the last: [B, S, D] to [B, S, D + `COLUMNS`]."""
        sent: Tensor = _Send.apply(hidden, self)
        return sent

    def receive(self, x: Tensor) -> Tensor:
        """Begin the forward of any stage but the first: [B, S, D + `COLUMNS`] to [B, S, D]."""
        hidden: Tensor = _Receive.apply(x, self)
        return hidden

    @property
    def slope(self) -> Tensor:
        """Return the gradient of summed probabilities, float64 [E]."""
        assert self._slope is not None, "forward must have come to its end on the last stage"
        return self._slope

    def packed(self, hidden: Tensor, counts: Tensor) -> Tensor:
        """Put hidden states [B, S, D] and counts int64 [E] together: [B, S, D + `COLUMNS`]."""
        rows = hidden.new_zeros(hidden.shape[0] * hidden.shape[1], COLUMNS)
        for column in range(COLUMNS):
            rows[: len(counts), column] = (counts >> (column * _BYTE)) & (2**_BYTE - 1)
        return torch.cat((hidden, rows.view(*hidden.shape[:2], COLUMNS)), dim=2)

    def unpacked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states and counts that :meth:`packed` has put together."""
        hidden, columns = x.split((x.shape[2] - COLUMNS, COLUMNS), dim=2)
        rows = columns.reshape(-1, COLUMNS)[: self._balance.num_experts].to(torch.int64)
        counts = sum(rows[:, column] << (column * _BYTE) for column in range(COLUMNS))
        assert isinstance(counts, Tensor)
        return hidden.contiguous(), counts


class _Context(Protocol):
    """The attributes that autograd keeps from forward for backward."""

    balancing: Balancing
    dtype: torch.dtype


class _Attach(torch.autograd.Function):
    """Identity on hidden states, which adds the gradient of a loss in backward."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, sums: Tensor, balancing: Balancing) -> Tensor:
        ctx.balancing, ctx.dtype = balancing, sums.dtype
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.balancing.slope.to(ctx.dtype), None


class _Send(torch.autograd.Function):
    """Adds counts to hidden states; backward takes sums over all stages out of the gradient."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, balancing: Balancing) -> Tensor:
        ctx.balancing = balancing
        return balancing.packed(hidden, balancing.counts(hidden.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        hidden, counts = ctx.balancing.unpacked(grad)
        ctx.balancing.settle(counts)
        return hidden, None


class _Receive(torch.autograd.Function):
    """Takes counts out of hidden states; backward adds sums over all stages to the gradient."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, balancing: Balancing) -> Tensor:
        ctx.balancing = balancing
        hidden, counts = balancing.unpacked(x)
        balancing.before = counts
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        settled = ctx.balancing.settled
        assert settled is not None, "backward of the last stage runs first"
        return ctx.balancing.packed(grad, settled), None


@by_folder
def balance_of(model: ModelConfig) -> Balance | None:
    """Return the loss by which the model of a folder balances its experts; None: it has none.

    Raises:
        hp_base.errors.ConfigError: When the loss has another form than the one known here.
    """
    if not is_balanced(model):
        return None
    made = on_meta(model, torch.float32, balanced=True)
    choose_experts(made, "batched_mm")  # the one whose shapes do not depend on choices
    kind = type(made).__name__
    recorder = _Recorder(made)
    try:
        output = recorder.run(made)
    except Exception as error:
        why = f"the model does not run without memory: {told(error, 200)}"
        raise _refused(kind, why) from error
    if recorder.arguments is None:
        if getattr(output, "aux_loss", None) is not None:
            raise _refused(kind, f"it is not made by {_FUNCTION}")
        return None  # the model has no such loss, whatever its config says
    return recorder.balance(kind)


def _refused(kind: str, why: str) -> ConfigError:
    return ConfigError(
        f"output_router_logits (true) of {kind} must be false in its config.json: what its loss "
        f"that balances experts is of cannot be told, since {why}"
    )


class _Factor:
    """Stands for the loss, and records the coefficient that it is multiplied with."""

    def __init__(self) -> None:
        self.coefficient: float | None = None

    def to(self, *_args: object, **_kwargs: object) -> "_Factor":
        """Return this object, in place of a copy on another device."""
        return self

    def __rmul__(self, other: float) -> Tensor:
        self.coefficient = float(other)
        return torch.zeros((), device="meta")

    __mul__ = __rmul__


class _Recorder:
    """Records the arguments of the function that computes the loss, and the outputs of modules.

    Attributes:
        arguments: Arguments of the function, by name; None: it was not called.

    Args:
        made: Model on the meta device.
    """

    def __init__(self, made: CausalModel) -> None:
        self.arguments: Mapping[str, object] | None = None
        self._factor = _Factor()
        self._code = vars(sys.modules[type(made).__module__])
        self._function: _Function | None = self._code.get(_FUNCTION)
        self._alive: list[Tensor] = []  # so that no id is used twice
        self._places: dict[int, tuple[str, int | None]] = {}  # id of a tensor -> module, index
        for path, module in made.named_modules():
            module.register_forward_hook(self._seeing(path))

    def _seeing(self, path: str) -> Callable[[nn.Module, object, object], None]:
        def see(_module: nn.Module, _args: object, output: object) -> None:
            is_one = isinstance(output, Tensor)
            several = output if isinstance(output, tuple | list) else ()
            for place, value in [(None, output)] if is_one else enumerate(several):
                if isinstance(value, Tensor):
                    self._alive.append(value)
                    self._places.setdefault(id(value), (path, place))  # the innermost

        return see

    def run(self, made: CausalModel) -> object:
        """Run the model with targets; return its output."""
        tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
        if self._function is not None:
            self._code[_FUNCTION] = self._record
        try:
            with Answers():
                output: object = made(input_ids=tokens, labels=tokens, use_cache=False)
                return output
        finally:
            if self._function is not None:
                self._code[_FUNCTION] = self._function

    def _record(self, *args: object, **kwargs: object) -> _Factor:
        assert self._function is not None
        self.arguments = inspect.signature(self._function).bind(*args, **kwargs).arguments
        return self._factor

    def balance(self, kind: str) -> Balance:
        """Return the loss of the model after a run.

        Args:
            kind: Class of the model, for messages.

        Raises:
            hp_base.errors.ConfigError: When the loss has another form than the one known here.
        """
        assert self.arguments is not None
        logits = self.arguments.get("gate_logits")
        num_experts, top_k = self.arguments.get("num_experts"), self.arguments.get("top_k")
        if not isinstance(logits, tuple) or not logits or any(x.ndim != 2 for x in logits):
            raise _refused(kind, f"{_FUNCTION} does not get logits [tokens, experts] of each layer")
        if any(tuple(x.shape) != (16, num_experts) for x in logits):
            raise _refused(kind, f"{_FUNCTION} gets other rows than those of tokens and experts")
        if self._factor.coefficient is None:
            raise _refused(kind, "it is not multiplied with a coefficient")
        routers: dict[str, int | None] = {}
        for tensor in logits:
            if id(tensor) not in self._places or self._places[id(tensor)][0] in routers:
                raise _refused(kind, "router logits are not what modules return, each once")
            path, place = self._places[id(tensor)]
            routers[path] = place
        assert isinstance(num_experts, int)
        assert isinstance(top_k, int)
        balance = Balance(self._factor.coefficient, num_experts, top_k, routers)
        with torch.device("cpu"):  # models are made on others
            if not self._is_same(balance):
                raise _refused(kind, f"its {_FUNCTION} is not that of Mixtral")
        return balance

    def _is_same(self, balance: Balance) -> bool:
        """Tell whether the function of the model agrees with `Balance`, on random logits."""
        assert self._function is not None
        drawn = torch.Generator().manual_seed(0)
        some = torch.randn(2, 13, balance.num_experts, generator=drawn, dtype=torch.float32)
        theirs = self._function(tuple(some), balance.num_experts, balance.top_k)
        counts, sums = (sum(part) for part in zip(*map(balance.counted, some), strict=True))
        assert isinstance(counts, Tensor)
        ours = float((balance.slope(counts) * sums).sum())
        expected = balance.coefficient * float(theirs)
        return abs(ours - expected) <= _SAME * abs(expected)
