"""The outline of a model of transformers, learned by running it once without memory.

Note [What a cut must not cut]. A stage gets hidden states and nothing else of other stages. The
rest of what a layer reads, such as masks and rotary angles, every stage computes by the model's own
forward. So that this is the same, nothing of it may come from a parameter outside of the stage. The
model runs once on the meta device, and what an operator reads of parameters in front of layers, in
other layers, or of what came from them, is noted down: `beside`. It tells shared keys, inputs by
layer, or choices that a layer takes over from another one, whatever they are called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_base.errors import ConfigError, told
from hp_trainer.config import ModelConfig
from hp_transformers.stages.made import choose_experts, lists_of, on_meta

BEFORE, AFTER = -1, 1 << 30
"""Places of what comes in front of all layers, and behind them; a layer's is its index."""
_SEQUENCES, _POSITIONS = 2, 8


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of a model: where it can be cut into stages.

    Attributes:
        layers: Path of the list of layers.
        num_layers: Its length.
        places: Where each parameter outside of layers is read, by global name.
        beside: Why it cannot be cut, such as what a layer reads of others besides hidden states;
            empty: it can.
        returned: What a layer returns besides the first of several values: how many, and of which
            kind; None: hidden states alone.
        width: Sizes of hidden states behind those of sequences and positions.
        head: Path of the matrix that logits come from, if they are its product and no more; empty:
            they are not.
    """

    layers: str
    num_layers: int
    places: Mapping[str, frozenset[int]]
    beside: str
    returned: tuple[type, int] | None
    width: tuple[int, ...]
    head: str

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters that are read in front of all layers, and behind them."""
        return tuple(n for n, places in self.places.items() if {BEFORE, AFTER} <= places)

    def is_on(self, name: str, layers: Sequence[int], *, first: bool, last: bool) -> bool:
        """Tell whether a stage needs a parameter or buffer.

        Args:
            name: Global name.
            layers: Layers of the stage.
            first: Whether it is the first stage, which has what nobody reads, too.
            last: Whether it is the last.
        """
        if (index := self.layer_of(name)) is not None:
            return index in layers
        places = self.places.get(name) or {BEFORE}
        return (first and BEFORE in places) or (last and AFTER in places)

    def layer_of(self, name: str) -> int | None:
        """Index of the layer that a name is in; None: it is in none."""
        prefix = f"{self.layers}."
        return (
            int(name[len(prefix) :].split(".", maxsplit=1)[0]) if name.startswith(prefix) else None
        )


def outline_of(model: ModelConfig) -> Outline:
    """Learn how the model of a folder is cut.

    Raises:
        hp_base.errors.ConfigError: When it does not run layer by layer.
    """
    return _outline(model.transformers, model.trust_remote_code)


@cache
def _outline(folder: str, trust: bool) -> Outline:
    config = ModelConfig(transformers=folder, trust_remote_code=trust)
    made = on_meta(config, torch.float32)
    reasons = []
    for path, _ in lists_of(made):
        try:
            return _seen(on_meta(config, torch.float32), path)
        except ConfigError as error:  # there may be another list
            reasons.append(error)
    raise reasons[0]


def _seen(made: Any, path: str) -> Outline:
    """Run a model, and see what goes through a list of layers."""
    choose_experts(made, "batched_mm")  # the one whose shapes do not depend on choices
    watch = _Watch(made, path)
    tokens = torch.zeros(_SEQUENCES, _POSITIONS, dtype=torch.int64, device="meta")
    try:
        with Answers(), watch:
            logits = made(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - models may do what they like
        why = f"it does not run without memory, which would tell what: {told(error, 200)}"
        return watch.unknown(why)
    return watch.outline(logits)


class Answers(TorchFunctionMode):
    """Answers what a model asks of values that are not there: whether masks hide nothing."""

    _ANSWERS: Mapping[Any, Callable[[Tensor], Any]] = {
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
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or answer in its place."""
        if func is torch.where and len(args) == 1 and not kwargs:
            return tuple(args[0].new_zeros(1, dtype=torch.int64) for _ in range(args[0].ndim))
        if func in self._ANSWERS and args[0].device.type == "meta":
            return self._ANSWERS[func](args[0])
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Notes down which parameters every operator has something of.

    Args:
        model: A model on the meta device, whose layers are wrapped.
        path: Path of the list of layers.
    """

    def __init__(self, model: Any, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._path, self._layers = path, model.get_submodule(path)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sources: dict[int, frozenset[int]] = {}  # of tensors -> places that they are of
        self._alive: list[Any] = []  # so that no id is used twice
        self._shared = _shared_by_layers(model, path)
        self._place = BEFORE
        self._places: dict[str, set[int]] = {}
        self._beside: list[str] = []
        self._called: list[int] = []
        self._passed: Tensor | None = None
        self._returned: tuple[type, int] | None = None
        self._width: tuple[int, ...] = ()
        self._head = ""
        self._from_head: Tensor | None = None
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self.call, index, layer.forward)
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear) and head.bias is None:
            self._head = next(path for path, part in model.named_modules() if part is head)
            head.register_forward_hook(self._see_head)

    def _see_head(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._from_head = output

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note down what it reads."""
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
        if len(self._beside) < 1:
            self._beside.append(
                "more than hidden states travels between layers: "
                f"{self._named(self._place)} reads in {what} what comes from {self._named(source)}"
            )

    def _named(self, place: int) -> str:
        if 0 <= place < len(self._layers):
            return f"{self._path}.{place}"
        return f"what is in front of {self._path}" if place < 0 else f"what is behind {self._path}"

    def call(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a layer."""
        self._alive.append((args, kwargs))
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        if self._passed is not None and hidden is not self._passed:
            self._note(index - 1, "its first argument, which the layer before has not returned")
        self._sources.pop(id(hidden), None)
        self._place = index
        self._called.append(index)
        self._width = tuple(hidden.shape[2:])
        if tuple(hidden.shape[:2]) != (_SEQUENCES, _POSITIONS) and not self._beside:
            self._beside.append(f"{self._named(index)} gets other positions than those of tokens")
        output = forward(*args, **kwargs)
        self._place = AFTER if index == len(self._layers) - 1 else BEFORE
        self._passed = output
        if isinstance(output, tuple | list):
            self._passed, self._returned = output[0], (type(output), len(output))
        self._sources.pop(id(self._passed), None)
        return output

    def unknown(self, why: str) -> Outline:
        """Return what is known of a model that did not run to its end: it is not to be cut."""
        return Outline(
            layers=self._path,
            num_layers=len(self._layers),
            places={},
            beside=why,
            returned=None,
            width=(),
            head="",
        )

    def outline(self, logits: Tensor) -> Outline:
        """Return what was seen."""
        if self._called != [*range(len(self._layers))]:
            raise ConfigError(
                f"layers of {self._path} must be called once each and in order, not "
                f"{self._called}, to be cut into stages"
            )
        prefix = f"{self._path}."
        return Outline(
            layers=self._path,
            num_layers=len(self._layers),
            places={
                name: frozenset(self._places.get(name, ()))
                for name in self._names.values()
                if not name.startswith(prefix)
            },
            beside="".join(self._beside) or self._shared,
            returned=self._returned,
            width=self._width,
            head=self._head if self._from_head is logits else "",
        )


def _shared_by_layers(model: nn.Module, path: str) -> str:
    """Two layers that have one parameter, in words; empty: there are none."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(f"{path}."):
            continue
        layer = name[: name.index(".", len(path) + 1)]
        if owners.setdefault(id(parameter), layer) != layer:
            return f"{layer} has a parameter of {owners[id(parameter)]}: {name}"
    return ""
