"""The outline of a model of transformers, learned by running it once without memory.

A stage receives hidden states, and nothing else, from other stages.

The other inputs of a layer, such as masks and rotary angles, every stage computes by the model's
own forward. For these to be the same, none may depend on a parameter of another stage. The model
runs once on the meta device, and every operator that reads a parameter in front of the layers or in
another layer, or a tensor that was computed from one, is recorded as `why_not`. That finds shared
keys, inputs by layer, and choices that one layer takes over from another, whatever their names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_base.errors import ConfigError, told
from hp_trainer.config import ModelConfig
from hp_transformers.stages.model import CausalModel, by_folder, choose_experts, lists_of, on_meta

Several: TypeAlias = type[list[object]] | type[tuple[object, ...]]
BEFORE, AFTER = -1, 1 << 30
"""Places in front of all layers, and behind them; the place of a layer is its index."""
_SEQUENCES, _POSITIONS = 2, 8


@dataclass(frozen=True, slots=True)
class Outline:
    """The layers of a model, and the places where its other parameters are read.

    Attributes:
        layers: Path of the list of layers.
        num_layers: Length of that list.
        places: Places at which each parameter outside of layers is read, by global name.
        why_not: Reason why the model cannot be cut into stages; empty: it can.
        returned: Type and length of the sequence that a layer returns, with hidden states first;
            None: a layer returns hidden states alone.
        width: Sizes of hidden states behind the dims of sequences and positions.
        head: Path of the output matrix, if logits are its product and nothing more; else empty.
    """

    layers: str
    num_layers: int
    places: Mapping[str, frozenset[int]]
    why_not: str
    returned: tuple[Several, int] | None
    width: tuple[int, ...]
    head: str

    @property
    def tied(self) -> tuple[str, ...]:
        """Return the parameters that are read both in front of all layers and behind them."""
        return tuple(n for n, places in self.places.items() if {BEFORE, AFTER} <= places)

    def is_on(self, name: str, layers: Sequence[int], *, first: bool, last: bool) -> bool:
        """Tell whether a stage needs a parameter or buffer.

        Args:
            name: Global name.
            layers: Layers of the stage.
            first: Whether it is the first stage, which also has parameters that nobody reads.
            last: Whether it is the last stage.
        """
        if (index := self.layer_of(name)) is not None:
            return index in layers
        places = self.places.get(name) or {BEFORE}
        return (first and BEFORE in places) or (last and AFTER in places)

    def layer_of(self, name: str) -> int | None:
        """Return the index of the layer that a name is in; None: it is in none."""
        prefix = f"{self.layers}."
        return int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else None


@by_folder
def outline_of(model: ModelConfig) -> Outline:
    """Learn how the model of a folder is cut.

    Raises:
        hp_base.errors.ConfigError: When it does not run layer by layer.
    """
    reasons = []
    for path, _ in lists_of(on_meta(model, torch.float32)):
        try:
            return _observed(on_meta(model, torch.float32), path)
        except ConfigError as error:  # there may be another list
            reasons.append(error)
    raise reasons[0]


def _observed(model: CausalModel, path: str) -> Outline:
    """Run a model once, and return its outline with the list of layers at a path."""
    choose_experts(model, "batched_mm")  # the one whose shapes do not depend on choices
    observer = _Observer(model, path)
    tokens = torch.zeros(_SEQUENCES, _POSITIONS, dtype=torch.int64, device="meta")
    try:
        with Answers(), observer:
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - models may raise anything
        why = f"it does not run without memory, which would tell what: {told(error, 200)}"
        return observer.unknown(why)
    return observer.outline_of(logits)


class Answers(TorchFunctionMode):
    """A mode in which tensors without values answer questions about them: masks hide nothing."""

    _ANSWERS: Mapping[Callable[..., object], Callable[[Tensor], object]] = {
        Tensor.__contains__: lambda _: False,
        Tensor.nonzero: lambda x: x.new_zeros(1, x.ndim, dtype=torch.int64),
        torch.nonzero: lambda x: x.new_zeros(1, x.ndim, dtype=torch.int64),
        Tensor.__bool__: lambda _: True,
        Tensor.item: lambda x: True if x.dtype == torch.bool else 1,
        Tensor.__int__: lambda _: 1,
        Tensor.__index__: lambda _: 1,
        Tensor.__float__: lambda _: 1.0,
        Tensor.tolist: lambda x: torch.ones(x.shape, dtype=x.dtype, device="cpu").tolist(),
    }

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch, or answer in its place."""
        x = args[0] if args else None
        if isinstance(x, Tensor):
            if func is torch.where and len(args) == 1 and not kwargs:
                return tuple(x.new_zeros(1, dtype=torch.int64) for _ in range(x.ndim))
            if func in self._ANSWERS and x.device.type == "meta":
                return self._ANSWERS[func](x)
        return func(*args, **(kwargs or {}))


class _Observer(TorchDispatchMode):
    """Records which parameters every operator reads, or reads results of.

    Args:
        model: Model on the meta device, whose layers get wrapped.
        path: Path of the list of layers.
    """

    def __init__(self, model: CausalModel, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, layers = path, [*model.get_submodule(path).children()]
        self._num_layers = len(layers)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sources: dict[int, frozenset[int]] = {}  # id of a tensor -> places it depends on
        self._alive: list[object] = []  # so that no id is used twice
        self._shared = _shared_by_layers(model, path)
        self._place = BEFORE
        self._places: dict[str, set[int]] = {}
        self._why_not = ""
        self._called: list[int] = []
        self._passed: object = None
        self._returned: tuple[Several, int] | None = None
        self._width: tuple[int, ...] = ()
        self._head = ""
        self._from_head: Tensor | None = None
        for index, layer in enumerate(layers):
            layer.forward = partial(self._call, index, layer.forward)
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear) and head.bias is None:
            self._head = next(path for path, part in model.named_modules() if part is head)
            head.register_forward_hook(self._see_head)

    def _see_head(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self._from_head = output

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, and record what it reads."""
        kwargs = kwargs or {}
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        sources: frozenset[int] = frozenset()
        for tensor in read:
            if name := self._names.get(id(tensor)):
                self._places.setdefault(name, set()).add(self._place)
                sources |= {self._place}
            sources |= self._sources.get(id(tensor), frozenset())
        for source in sources - {self._place}:
            self._note(source, str(func))
        output = func(*args, **kwargs)
        changed = read if func._schema.is_mutable else []  # noqa: SLF001 - there is no other way
        for tensor in (*tree_leaves(output), *changed):
            if isinstance(tensor, Tensor):
                self._alive.append(tensor)
                self._sources[id(tensor)] = self._sources.get(id(tensor), frozenset()) | sources
        return output

    def _note(self, source: int, what: str) -> None:
        self._why_not = self._why_not or (
            "more than hidden states travels between layers: "
            f"{self._named(self._place)} reads in {what} what comes from {self._named(source)}"
        )

    def _named(self, place: int) -> str:
        if 0 <= place < self._num_layers:
            return f"{self._path}.{place}"
        return f"what is in front of {self._path}" if place < 0 else f"what is behind {self._path}"

    def _call(
        self, index: int, forward: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        """Run a layer."""
        self._alive.append((args, kwargs))
        hidden = args[0] if args else kwargs.get("hidden_states")
        assert isinstance(hidden, Tensor), "a layer takes hidden states first"
        if self._passed is not None and hidden is not self._passed:
            self._note(index - 1, "its first argument, which the layer before has not returned")
        self._sources.pop(id(hidden), None)
        self._place = index
        self._called.append(index)
        self._width = tuple(hidden.shape[2:])
        if tuple(hidden.shape[:2]) != (_SEQUENCES, _POSITIONS) and not self._why_not:
            self._why_not = f"{self._named(index)} gets other positions than those of tokens"
        output = forward(*args, **kwargs)
        self._place = AFTER if index == self._num_layers - 1 else BEFORE
        self._passed = output
        if isinstance(output, tuple | list):
            self._passed, self._returned = output[0], (type(output), len(output))
        self._sources.pop(id(self._passed), None)
        return output

    def outline_of(self, logits: Tensor) -> Outline:
        """Return the outline after a run that returned logits.

        Raises:
            hp_base.errors.ConfigError: When layers were not called once each and in order.
        """
        if self._called != [*range(self._num_layers)]:
            raise ConfigError(
                f"layers of {self._path} must be called once each and in order, not "
                f"{self._called}, to be cut into stages"
            )
        places = {
            name: frozenset(self._places.get(name, ()))
            for name in self._names.values()
            if not name.startswith(f"{self._path}.")
        }
        head = self._head if self._from_head is logits else ""
        return replace(
            self.unknown(self._why_not or self._shared),
            places=places,
            returned=self._returned,
            width=self._width,
            head=head,
        )

    def unknown(self, why_not: str) -> Outline:
        """Return the outline after a run that failed: the model is not to be cut."""
        return Outline(
            layers=self._path,
            num_layers=self._num_layers,
            places={},
            why_not=why_not,
            returned=None,
            width=(),
            head="",
        )


def _shared_by_layers(model: nn.Module, path: str) -> str:
    """Return a sentence about two layers that share a parameter; empty: there are none."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(f"{path}."):
            continue
        layer = name[: name.index(".", len(path) + 1)]
        if owners.setdefault(id(parameter), layer) != layer:
            return f"{layer} has a parameter of {owners[id(parameter)]}: {name}"
    return ""
