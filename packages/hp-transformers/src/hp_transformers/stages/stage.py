"""A pipeline stage of a causal language model of transformers, which is run by its own code.

Note [Stages of a stranger's model]. Every stage has the modules of the whole model, and parameters
of its own layers alone; the first has those in front of layers as well, and the last those behind
them. A stage calls the forward of the whole model. Layers of stages before are skipped: the first
of them puts the hidden states in that have arrived, whatever the model made of the token ids.
Parameters in front of layers, which it reads for that, are zeros without memory. The first layer
of the stages behind leaves the forward with the hidden states it gets. So masks, positions and all
else that a layer takes are what the model itself computes, and there is no code for any
architecture. What of it would not be the same is told by Note [What a cut must not cut].

Shape symbols: B sequences, S positions, D width of the stream, V vocabulary.
"""

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, update_wrapper
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hp_base.errors import ConfigError
from hp_context import ContextParallel
from hp_context.hugging_face.mixers import current_trial
from hp_expert.hugging_face import apply_to_transformers
from hp_expert.hugging_face.layout import expert_modules
from hp_platform.device.float64 import lifting
from hp_platform.host_reads import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.config.transformers_folder import text_config_of
from hp_trainer.model import Counted, Microbatch, Stage
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.recompute import Recompute, recomputed
from hp_trainer.model.stage import experts_of
from hp_transformers.stages.balance import COLUMNS, Balancing, balance_of
from hp_transformers.stages.counted import count_attention, count_experts
from hp_transformers.stages.documents import positions_of
from hp_transformers.stages.documents_trial import require_documents_apart
from hp_transformers.stages.first_weights import fill
from hp_transformers.stages.made import (
    choose_experts,
    on_meta,
    places_of,
    require_same_in_every_layout,
)
from hp_transformers.stages.outline import Outline, outline_of
from hp_transformers.stages.sequence import hidden_of, not_spread, spread
from hp_transformers.stages.specs import declare_all, declare_experts
from hp_transformers.stages.tensor_parallel import (
    Alone,
    Style,
    cut,
    declare_cuts,
    styles_of,
)


class _Call(NamedTuple):
    """The call of a stage that is running, as its modules read it.

    Attributes:
        hidden: What the stage before has sent; None: there is none, nor outside of calls.
        wants_logits: Whether the output matrix is to be used, and not what it would get.
        balancing: The loss that balances experts; None: there is none.
    """

    hidden: Tensor | None
    wants_logits: bool
    balancing: Balancing | None = None


_NO_CALL = _Call(None, wants_logits=True)
_call: ContextVar[_Call] = ContextVar("call", default=_NO_CALL)


class _LeftError(Exception):
    """Leaves the forward of a model.

    Args:
        hidden: With these hidden states.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class TransformersStage(Stage):
    """One pipeline stage of the model in `model.transformers`; see `Stage`.

    Args:
        config: The whole model.
        vocab_size: V, as the folder says it.
        layers: Global indices of the layers this stage holds.
        first: Whether it is the first stage.
        last: Whether it is the last.
        compute_dtype: Dtype of activations; parameters may be wider.

    Raises:
        hp_base.errors.ConfigError: When the model cannot be cut, or depends on the layout.
    """

    whole: Any
    _listed: Any

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        layers: Sequence[int],
        first: bool,
        last: bool,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(compute_dtype=compute_dtype)
        del vocab_size  # the folder has its own
        self.config, self.is_first, self.is_last = config, first, last
        self.outline, self.balance = outline_of(config), balance_of(config)
        self.own_layers = [*layers]
        self.num_columns = COLUMNS if self.balance is not None else 0
        if self.outline.width:
            # Of several residual streams, all.
            self.width_sent = prod(self.outline.width) + self.num_columns
        if self.outline.num_layers != config.num_layers:
            raise ConfigError(
                f"num_hidden_layers ({config.num_layers}) of {config.transformers} must be the "
                f"length of {self.outline.layers} ({self.outline.num_layers})"
            )
        model = on_meta(config, compute_dtype)
        require_same_in_every_layout(model)
        if not (first and last):
            _require_cut(model, self.outline, config)
        self.__dict__["whole"] = model  # its children are this stage's, so that names are its own
        for name, child in model.named_children():
            self.add_module(name, child)
        self.__dict__["_listed"] = model.get_submodule(self.outline.layers)  # a child already
        self._stand_ins = self._take_away()
        self._styles: Mapping[str, Style] = {}
        self._shares_sequence = self._was_called = False
        self._outside: list[nn.Module] = []  # modules in none of the blocks
        self._counts_once = True  # losses of a rank whose tokens others have, too, count in one
        self._context: ProcessGroup | None = None
        self._ranks: Mapping[str, int] = {"tp": 1, "ep": 1}  # that this one stands for
        for index, layer in enumerate(self._listed):
            if index not in self.own_layers:
                layer.forward = self._skip if index < self.own_layers[0] else _leave
        declare_all(self)

    @staticmethod
    def tied_parameters(config: ModelConfig) -> tuple[str, ...]:
        """Parameters that the first and the last stage both have, by global name."""
        return outline_of(config).tied

    @property
    def layers(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        """Blocks of this stage, by their index in the whole model."""
        return {str(index): self._listed[index] for index in self.own_layers}

    def units(self, *, by_block: bool) -> Sequence[nn.Module]:
        """See `Stage.units`; what layers share is FSDP's with all that is in no block.

        Raises:
            hp_base.errors.ConfigError: When layers run outside of their calls.
        """
        del by_block
        if any("Reversible" in name for name in vars(sys.modules[type(self.whole).__module__])):
            raise ConfigError(
                f"mesh.dp_shard must be 1 with {type(self.whole).__name__}: its backward runs "
                "parts of layers again by itself, outside of their calls"
            )
        owners = Counter(id(p) for block in self.blocks for p in {*block.parameters()})
        shared = {key for key, count in owners.items() if count > 1}
        return [b for b in self.blocks if not shared & {id(p) for p in b.parameters()}]

    @property
    def casting(self) -> Sequence[nn.Module]:
        """See `Stage.casting`: all modules, whose parameters are cast around their calls."""
        return [*self.modules()]

    @property
    def kept_buffers(self) -> Mapping[str, Tensor]:
        """See `Stage.kept_buffers`: those that transformers saves, of layers and parts here."""
        saved = self.state_dict(keep_vars=True).keys()
        return {
            name: buffer
            for name, buffer in self.named_buffers()
            if name in saved and self._is_here(name)
        }

    def initialize(
        self,
        parameters: Sequence[Parameter],
        config: ModelConfig,
        *,
        seed: int,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """See `Stage.initialize`: by the model's own rule."""
        fill(self, parameters, config, seed=seed, on_progress=on_progress)

    def expect_no_values(self) -> None:
        """See `hp_trainer.model.Countable`."""
        choose_experts(self.whole, "batched_mm")

    def expect_ranks(self, sizes: Mapping[str, int]) -> None:
        """See `hp_trainer.model.Spreading`.

        Raises:
            hp_base.errors.ConfigError: When ranks cannot share what the model has.
        """
        if sizes["ep"] > 1:
            declare_experts(self, self.blocks)
        if sizes["tp"] > 1:
            self._plan_tensors(sizes["tp"])

    def stand_alone(self, sizes: Mapping[str, int], exchange: Callable[[float], None]) -> None:
        """See `hp_trainer.model.Countable`."""
        if sizes["tp"] > 1:
            cut(self._listed, self._styles, Alone(sizes["tp"], exchange))
        for block in self.blocks if sizes["ep"] > 1 else ():
            if any(True for _ in expert_modules(block)):
                apply_to_transformers(block)
        self._ranks = sizes

    def be_counted(self, counted: Counted) -> None:
        """See `hp_trainer.model.Countable`."""
        count_attention(self.whole, counted)
        for _, experts in expert_modules(self):
            count_experts(experts, counted, num_ranks=self._ranks["tp"])

    def _plan_tensors(self, num_ranks: int) -> None:
        styles = styles_of(self.whole, self._listed, num_ranks)
        own = {str(index) for index in self.own_layers}
        self._styles = {p: style for p, style in styles.items() if p.split(".")[0] in own}
        declare_cuts(self._listed, self._styles)

    def cut(self, vocabulary: range, group: ProcessGroup) -> None:
        """See `hp_trainer.model.Spreading`: by the plan of transformers."""
        del vocabulary  # all ranks have all logits
        cut(self._listed, self._styles, group)
        self._counts_once = group.rank() == 0

    def spread_attention(self, context: ContextParallel, group: ProcessGroup) -> None:
        """See `hp_trainer.model.Spreading`: by transformers' registry."""
        spread(self.whole, context, group)
        self._shares_sequence, self._context = True, group
        forward = self.whole.forward
        self.whole.forward = update_wrapper(partial(self._in_trial, forward), forward)

    def try_documents(self) -> None:
        """See `hp_trainer.model.DocumentTrial`; where ranks share documents, hp-context tries them.

        Raises:
            hp_base.errors.ConfigError: When a document sees another.
        """
        if not (self._shares_sequence or is_dry()):
            require_documents_apart(self)

    def spread_experts(self, groups: Mapping[str, ProcessGroup], *, hidden: bool) -> None:
        """See `hp_trainer.model.Spreading`; one rank computes them as transformers does."""
        del hidden
        for block in self.blocks if "ep" in groups and groups["ep"].size() > 1 else ():
            if any(True for _ in expert_modules(block)):
                apply_to_transformers(block, groups["ep"], same_tokens=groups.get("tp"))

    def to_empty(self, *, device: Any, recurse: bool = True) -> "TransformersStage":
        """Give parameters and buffers memory, and stand-ins of those of others zeros without."""
        shared = places_of(self)
        super().to_empty(device=device, recurse=recurse)
        for (first, _), *others in shared.values():
            for name, module in others:  # each has got memory of its own
                setattr(module, name.rpartition(".")[2], self.get_parameter(first))
        self._require_products(torch.device(device))
        self._compute_blocks()
        if self.outline.head and self.is_last:
            head: Any = self.whole.get_submodule(self.outline.head)
            head.forward = partial(_head_of, head.forward)
        for module, leaf, shape in self._stand_ins:
            zero = torch.zeros((), dtype=self.compute_dtype, device=device)
            module.__dict__[leaf] = zero.expand(shape)
        return self

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage; see `Stage`.

        Args:
            x: Token ids int64 [B, S] on the first stage, what the stage before returned on others.
            microbatch: What travels with the call.
        """
        wants_logits = microbatch.targets is None or not self.outline.head
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": self._nothing_embedded(x)}
        inputs |= positions_of(
            self.whole, self.config, microbatch, x, is_shared=self._shares_sequence
        )
        balancing = self._balancing(x, microbatch)
        hidden = None if self.is_first else self._received(x, balancing)
        token = _call.set(_Call(hidden, wants_logits, balancing))
        try:
            y: Tensor = self._computing(self._outside, self._run, inputs, microbatch)
        except ValueError as error:
            if self._shares_sequence and not self._was_called:  # what hp-context cannot do
                raise not_spread(self.whole, error) from error
            raise
        finally:
            _call.reset(token)
        self._was_called = True
        if self.is_last and balancing is not None:
            balancing.finish(x.device, self._context)
        return y

    def _balancing(self, x: Tensor, microbatch: Microbatch) -> Balancing | None:
        """The loss that balances experts in this call; None outside training."""
        if self.balance is None:
            return None
        rows, columns = x.shape[0] * x.shape[1], self.balance.num_experts
        if rows < columns and not (self.is_first and self.is_last):
            raise ConfigError(
                f"train.microbatch_size x data.seq_len / mesh.cp ({rows}) must be >= "
                f"model.num_experts ({columns}) with output_router_logits and mesh.pp greater "
                "than 1: counts of experts travel beside that many hidden states"
            )
        if microbatch.key is None:
            return None
        weight = x.shape[0] / microbatch.num_sequences
        name = f"{self.outline.layers}.{self.own_layers[0]}"
        return Balancing(self.balance, microbatch, weight, name=name, is_told=self._counts_once)

    def _received(self, x: Tensor, balancing: Balancing | None) -> Tensor:
        """Hidden states of what has arrived."""
        if balancing is not None:
            x = balancing.receive(x)
        elif self.num_columns:
            x = x[..., : -self.num_columns].contiguous()
        hidden: Tensor = x.unflatten(2, self.outline.width)
        return hidden

    def _sent(self, hidden: Tensor) -> Tensor:
        """Return what leaves with hidden states [B, S, D]."""
        if (balancing := _call.get().balancing) is not None:
            return balancing.send(hidden)
        return F.pad(hidden, (0, self.num_columns)) if self.num_columns else hidden

    def _run(self, inputs: Mapping[str, Any], microbatch: Microbatch) -> Tensor:
        try:
            logits: Tensor = self.whole(**inputs, use_cache=False).logits
        except _LeftError as left:
            if not self.is_last:
                return self._sent(left.hidden.flatten(2))
            head = self.whole.get_submodule(self.outline.head)
            return self.predict(left.hidden, head.weight, microbatch.targets)
        return logits

    def _in_trial(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Be the forward of the whole model; see Note [A stage is tried as the whole is]."""
        if current_trial() is None:
            return forward(*args, **kwargs)
        hidden = None
        if not self.is_first:
            hidden = hidden_of(kwargs["input_ids"], self.outline.width).to(self.compute_dtype)
        token = _call.set(_Call(hidden, wants_logits=True))
        try:
            return forward(*args, **kwargs)
        except _LeftError as left:
            return left.hidden
        finally:
            _call.reset(token)

    def _nothing_embedded(self, x: Tensor) -> Tensor:
        """Say what a model gets in place of embeddings of tokens where nothing is made of them."""
        return x.new_zeros(*x.shape[:2], self.whole.get_input_embeddings().embedding_dim)

    def _skip(self, *_args: Any, **_kwargs: Any) -> Any:
        """Be a layer of a stage before: return what has arrived."""
        hidden = _call.get().hidden
        if self.outline.returned is None:
            return hidden
        kind, count = self.outline.returned
        return kind([hidden, *[None] * (count - 1)])

    def _require_products(self, device: torch.device) -> None:
        """Refuse experts in a dtype in which a GPU has no product of groups."""
        chosen = text_config_of(self.whole.config)._experts_implementation  # noqa: SLF001
        if device.type != "cuda" or self.compute_dtype == torch.bfloat16 or experts_of(self):
            return
        if chosen == "grouped_mm" and any(True for _ in expert_modules(self)):
            raise ConfigError(
                "train.dtype must be bfloat16 for experts of transformers on GPUs, where torch has "
                "no grouped product of others, or mesh.ep greater than 1"
            )

    def _compute_blocks(self) -> None:
        """Let what FSDP gathers at once be cast at once: blocks, and experts that were spread."""
        spread = {*experts_of(self)}
        inside_blocks = {part for block in self._listed for part in block.modules()}
        self._outside = [part for part in self.modules() if part not in inside_blocks]
        for part in (*self.blocks, *spread):
            inside = [p for p in part.modules() if p is part or p not in spread]
            part.forward = partial(self._computing, inside, part.forward)
        if self.balance is not None:
            self._balance_blocks(self.balance.routers)

    def _balance_blocks(self, routers: Mapping[str, int | None]) -> None:
        """Let the loss that balances experts see what routers return, and come along."""
        for path, place in routers.items():
            if self.outline.layer_of(path) in self.own_layers:
                self.whole.get_submodule(path).register_forward_hook(partial(_see, place))
        for index in self.own_layers:
            block = self._listed[index]
            block.forward = partial(_balanced, block.forward, index)

    def recompute(self, what: Recompute) -> None:
        """See `Stage.recompute`: what runs again finds the call that it is of."""
        for block in self.blocks if what == "full" else ():
            block.forward = partial(_recomputed_in_call, block.forward)

    def _computing(
        self,
        modules: Sequence[nn.Module],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call what reads parameters of some modules in `compute_dtype`."""
        with self.lifted(), _cast(modules, self.compute_dtype):
            return function(*args, **kwargs)

    def lifted(self) -> contextlib.AbstractContextManager[Any]:
        """In float64, let whatever asks for less get float64."""
        return lifting() if self.compute_dtype == torch.float64 else contextlib.nullcontext()

    def _is_here(self, name: str) -> bool:
        return self.outline.is_on(name, self.own_layers, first=self.is_first, last=self.is_last)

    def _take_away(self) -> list[tuple[nn.Module, str, torch.Size]]:
        """Take parameters of other stages from modules.

        Returns:
            Those that the model reads all the same, in front of layers: module, name and shape.
        """
        read = []
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for module in [*self.modules()]:
            for leaf, parameter in [*module.named_parameters(recurse=False)]:
                name = names[id(parameter)]
                if self._is_here(name):
                    continue
                module.register_parameter(leaf, None)
                if self.outline.layer_of(name) is None:
                    del module._parameters[leaf]  # noqa: SLF001 - what takes its place is no parameter
                    module.__dict__[leaf] = None
                    read.append((module, leaf, parameter.shape))
        return read


def _see(place: int | None, _module: nn.Module, _args: Any, output: Any) -> None:
    """Be a hook of a router."""
    if (balancing := _call.get().balancing) is not None:
        balancing.see(output if place is None else output[place])


def _balanced(forward: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> Any:
    """Call a layer, and let the loss of its router come along."""
    if (balancing := _call.get().balancing) is None:
        return forward(*args, **kwargs)
    balancing.begin()
    output = forward(*args, **kwargs)
    if isinstance(output, Tensor):
        return balancing.attach(index, output)
    return type(output)([balancing.attach(index, output[0]), *output[1:]])


def _recomputed_in_call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer that runs again in backward, in the call that it is of."""
    return recomputed(partial(_in_call, forward, _call.get()), *args, **kwargs)


def _in_call(forward: Callable[..., Any], call: _Call, *args: Any, **kwargs: Any) -> Any:
    token = _call.set(call)
    try:
        return forward(*args, **kwargs)
    finally:
        _call.reset(token)


def _leave(*args: Any, **kwargs: Any) -> NoReturn:
    """Be a layer of a stage behind."""
    raise _LeftError(args[0] if args else kwargs["hidden_states"])


def _head_of(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Be an output matrix that is not to be used, where a loss needs no logits."""
    if _call.get().wants_logits:
        return forward(x)
    raise _LeftError(x)


@contextlib.contextmanager
def _cast(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let modules find their parameters in a dtype; gradients are those of the parameters."""
    replaced = []
    for module in modules:
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype and parameter.is_floating_point():
                module.__dict__[leaf] = parameter.to(dtype)  # found before what is registered
                replaced.append((module, leaf))
    try:
        yield
    finally:
        for module, leaf in replaced:
            module.__dict__.pop(leaf, None)


def _require_cut(model: Any, outline: Outline, config: ModelConfig) -> None:
    """Refuse to cut a model whose stages would not compute what the whole computes."""
    name = f"{type(model).__name__} ({config.transformers})"
    if outline.beside:
        raise ConfigError(f"{name} cannot be cut into stages (mesh.pp must be 1): {outline.beside}")
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{name} cannot be cut into stages (mesh.pp must be 1): its forward takes no "
            "inputs_embeds, so it makes masks of token ids, which only the first stage has"
        )
