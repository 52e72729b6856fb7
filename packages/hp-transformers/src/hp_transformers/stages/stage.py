"""A pipeline stage of a causal language model of transformers, which is run by its own code.

Every stage has the modules of the whole model, but parameters of its own layers alone; the first
stage also has the parameters in front of the layers, and the last those behind them. A stage calls
the forward of the whole model. The layers of stages before are skipped: the first of them returns
the hidden states that have arrived, whatever the model made of the token ids. Parameters in front
of the layers, which the model reads for that, are zeros without memory. The first layer of the
stages behind leaves the forward with its input. So masks, positions and all else that a layer takes
are computed by the model itself, and there is no code here for any architecture. Models for which
that would not be right are refused: see `hp_transformers.stages.outline`.

Shape symbols: B sequences, S positions, D width of the stream, V vocabulary.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from math import prod
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hp_base.errors import ConfigError
from hp_context import ContextParallel
from hp_context.hugging_face.mixers import current_trial
from hp_expert import apply_to_transformers
from hp_expert.hugging_face.modules import expert_modules
from hp_platform.dry_device import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.config.transformers_folder import text_config_of
from hp_trainer.model import Counted, Microbatch, Stage
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.recompute import Recompute
from hp_trainer.model.stage import experts_of
from hp_transformers.stages.balance import COLUMNS, Balancing, balance_of
from hp_transformers.stages.call import (
    Call,
    LeftError,
    balanced,
    current_call,
    in_call,
    leave,
    leave_without_logits,
    observe_router,
    recomputed_in_call,
)
from hp_transformers.stages.counted import count_attention, count_experts
from hp_transformers.stages.documents import positions_of, require_documents_apart
from hp_transformers.stages.first_weights import fill
from hp_transformers.stages.model import (
    CausalModel,
    choose_experts,
    on_meta,
    owners_of,
    require_same_in_every_layout,
)
from hp_transformers.stages.outline import Outline, outline_of
from hp_transformers.stages.parameters import (
    declare_all,
    declare_experts,
    parameters_in,
    promoting,
    take_away,
)
from hp_transformers.stages.sequence import hidden_of, not_spread, spread
from hp_transformers.stages.tensor_parallel import (
    Alone,
    Style,
    cut,
    declare_cuts,
    styles_of,
)

P = ParamSpec("P")
R = TypeVar("R")


class TransformersStage(Stage):
    """One pipeline stage of the model in `model.transformers`; see `Stage`.

    Args:
        config: Configuration of the whole model.
        vocab_size: V, which the folder says as well.
        layers: Global indices of the layers of this stage.
        first: Whether this is the first stage.
        last: Whether this is the last stage.
        compute_dtype: Dtype of activations; parameters may be wider.

    Raises:
        hp_base.errors.ConfigError: When the model cannot be cut, or depends on the layout.
    """

    whole: CausalModel
    _listed: nn.ModuleList

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
            # The product: a model may have several residual streams.
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
        self.__dict__["whole"] = model  # no child: its children are, so that names are the model's
        for name, child in model.named_children():
            self.add_module(name, child)
        self.__dict__["_listed"] = model.get_submodule(self.outline.layers)  # below a child
        outside = self.outline.layer_of
        self._stand_ins = take_away(self, self._is_here, lambda name: outside(name) is not None)
        self._styles: Mapping[str, Style] = {}
        self._shares_sequence = self._was_called = False
        self._outside: list[nn.Module] = []  # modules in none of the blocks
        self._reports_loss = True  # of ranks with the same tokens, the first alone does
        self._context: ProcessGroup | None = None
        self._ranks: Mapping[str, int] = {"tp": 1, "ep": 1}  # of which this process is one, or all
        for index, layer in enumerate(self._listed):
            if index not in self.own_layers:
                layer.forward = self._skip if index < self.own_layers[0] else leave
        declare_all(self)

    @staticmethod
    def tied_parameters(config: ModelConfig) -> tuple[str, ...]:
        """Return the global names of parameters that both the first and the last stage have."""
        return outline_of(config).tied

    @property
    def layers(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        """Return the blocks of this stage, by their index in the whole model."""
        return {str(index): self._listed[index] for index in self.own_layers}

    def units(self, *, by_block: bool) -> Sequence[nn.Module]:
        """See `Stage.units`; FSDP shards what layers share with all outside of blocks.

        Raises:
            hp_base.errors.ConfigError: When the backward of the model runs layers by itself.
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
        """See `Stage.kept_buffers`: buffers of this stage that transformers saves."""
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
            hp_base.errors.ConfigError: When ranks cannot share experts or layers of the model.
        """
        if sizes["ep"] > 1:
            declare_experts(self, self.blocks)
        if sizes["tp"] > 1:
            self._plan_tensors(sizes["tp"])

    def stand_alone(self, sizes: Mapping[str, int], exchange: Callable[[float], None]) -> None:
        """See `hp_trainer.model.Countable`."""
        if sizes["tp"] > 1:
            cut(self._listed, self._styles, Alone(sizes["tp"], exchange))
        if sizes["ep"] > 1:
            self._spread_experts(None, None)
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
        self._reports_loss = group.rank() == 0

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
            vocab_size = self.config.vocab_size
            require_documents_apart(self, self.whole, self._trial_input, vocab_size=vocab_size)

    def spread_experts(self, groups: Mapping[str, ProcessGroup], *, hidden: bool) -> None:
        """See `hp_trainer.model.Spreading`; one rank computes them as transformers does."""
        del hidden
        if "ep" in groups and groups["ep"].size() > 1:
            self._spread_experts(groups["ep"], groups.get("tp"))

    def _spread_experts(self, ranks: ProcessGroup | None, same_tokens: ProcessGroup | None) -> None:
        for block in self.blocks:
            if any(True for _ in expert_modules(block)):
                apply_to_transformers(block, ranks, same_tokens=same_tokens)

    def to_empty(
        self, *, device: str | torch.device | int | None, recurse: bool = True
    ) -> "TransformersStage":
        """Allocate parameters and buffers; stand-ins of other stages' parameters take no memory."""
        owners = owners_of(self)
        super().to_empty(device=device, recurse=recurse)
        for (first, _), *others in owners.values():
            for name, module in others:  # each name has got memory of its own
                setattr(module, name.rpartition(".")[2], self.get_parameter(first))
        self._require_grouped_products(device)
        self._compute_blocks()
        if self.outline.head and self.is_last:
            head = self.whole.get_submodule(self.outline.head)
            head.forward = partial(leave_without_logits, head.forward)
        for module, leaf, shape in self._stand_ins:
            zero = torch.zeros((), dtype=self.compute_dtype, device=device)
            module.__dict__[leaf] = zero.expand(shape)
        return self

    def forward(self, x: Tensor, *, microbatch: Microbatch) -> Tensor:
        """Run the stage; see `Stage`.

        Args:
            x: Token ids int64 [B, S] on the first stage, output of the stage before on others.
            microbatch: Targets, documents and positions of the call.
        """
        wants_logits = microbatch.targets is None or not self.outline.head
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": self._no_embeddings(x)}
        inputs |= positions_of(
            self.whole, self.config, microbatch, x, is_shared=self._shares_sequence
        )
        balancing = self._balancing(x, microbatch)
        hidden = None if self.is_first else self._received(x, balancing)
        call = Call(hidden, wants_logits, balancing)
        try:
            y = in_call(call, self._computing, self._outside, self._run, inputs, microbatch)
        except ValueError as error:
            if self._shares_sequence and not self._was_called:  # what hp-context cannot do
                raise not_spread(self.whole, error) from error
            raise
        self._was_called = True
        if self.is_last and balancing is not None:
            balancing.finish(x.device, self._context)
        return y

    def _balancing(self, x: Tensor, microbatch: Microbatch) -> Balancing | None:
        """Return the loss that balances experts in this call; None outside training."""
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
        return Balancing(self.balance, microbatch, weight, name=name, reports=self._reports_loss)

    def _received(self, x: Tensor, balancing: Balancing | None) -> Tensor:
        """Return the hidden states in what the stage before has sent."""
        if balancing is not None:
            x = balancing.receive(x)
        elif self.num_columns:
            x = x[..., : -self.num_columns].contiguous()
        hidden: Tensor = x.unflatten(2, self.outline.width)
        return hidden

    def _sent(self, hidden: Tensor) -> Tensor:
        """Return hidden states [B, S, D] as the next stage takes them."""
        if (balancing := current_call().balancing) is not None:
            return balancing.send(hidden)
        return F.pad(hidden, (0, self.num_columns)) if self.num_columns else hidden

    def _run(self, inputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        try:
            logits: Tensor = self.whole(**inputs, use_cache=False).logits
        except LeftError as left:
            if not self.is_last:
                return self._sent(left.hidden.flatten(2))
            weight = self.whole.get_submodule(self.outline.head).weight
            assert isinstance(weight, Tensor)
            return self.predict(left.hidden, weight, microbatch.targets)
        return logits

    def _in_trial(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run the forward of the whole model; see `hp_transformers.stages.sequence`."""
        if current_trial() is None:
            return forward(*args, **kwargs)
        tokens, hidden = kwargs["input_ids"], None
        if not self.is_first and isinstance(tokens, Tensor):
            hidden = hidden_of(tokens, self.outline.width).to(self.compute_dtype)
        try:
            return in_call(Call(hidden), forward, *args, **kwargs)
        except LeftError as left:
            return left.hidden

    def _trial_input(self, tokens: Tensor) -> Tensor:
        """Return the input of this stage for tokens of a trial, int64 [B, S]."""
        if self.is_first:
            return tokens
        hidden = hidden_of(tokens, self.outline.width).to(self.compute_dtype).flatten(2)
        return F.pad(hidden, (0, self.num_columns))

    def _no_embeddings(self, x: Tensor) -> Tensor:
        """Return zeros in place of embeddings of tokens, of which a skipped layer makes nothing."""
        return x.new_zeros(*x.shape[:2], self.whole.get_input_embeddings().embedding_dim)

    def _skip(self, *_args: object, **_kwargs: object) -> object:
        """Take the place of a layer of a stage before: return what that stage has sent."""
        hidden = current_call().hidden
        if self.outline.returned is None:
            return hidden
        kind, count = self.outline.returned
        return kind([hidden, *[None] * (count - 1)])

    def _require_grouped_products(self, device: str | torch.device | int | None) -> None:
        """Refuse experts in a dtype in which torch has no grouped matrix product on a GPU."""
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if not on_gpu or self.compute_dtype == torch.bfloat16 or experts_of(self):
            return
        chosen = text_config_of(self.whole.config)._experts_implementation  # noqa: SLF001
        if chosen == "grouped_mm" and any(True for _ in expert_modules(self)):
            raise ConfigError(
                "train.dtype must be bfloat16 for experts of transformers on GPUs, where torch has "
                "no grouped product of others, or mesh.ep greater than 1"
            )

    def _compute_blocks(self) -> None:
        """Cast together what FSDP gathers together: each block, and experts that ranks share."""
        shared = {*experts_of(self)}
        inside_blocks = {part for block in self._listed for part in block.modules()}
        self._outside = [part for part in self.modules() if part not in inside_blocks]
        for part in (*self.blocks, *shared):
            inside = [p for p in part.modules() if p is part or p not in shared]
            part.forward = partial(self._computing, inside, part.forward)
        if self.balance is not None:
            self._balance_blocks(self.balance.routers)

    def _balance_blocks(self, routers: Mapping[str, int | None]) -> None:
        """Let the loss that balances experts see router logits and be attached to layers."""
        for path, place in routers.items():
            if self.outline.layer_of(path) in self.own_layers:
                self.whole.get_submodule(path).register_forward_hook(partial(observe_router, place))
        for index in self.own_layers:
            block = self._listed[index]
            block.forward = partial(balanced, block.forward, index)

    def recompute(self, what: Recompute) -> None:
        """See `Stage.recompute`; a block that runs again does so within the same call."""
        for block in self.blocks if what == "full" else ():
            block.forward = partial(recomputed_in_call, block.forward)

    def _computing(
        self,
        modules: Sequence[nn.Module],
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a function that reads parameters of some modules in `compute_dtype`."""
        with promoting(self.compute_dtype), parameters_in(modules, self.compute_dtype):
            return function(*args, **kwargs)

    def _is_here(self, name: str) -> bool:
        return self.outline.is_on(name, self.own_layers, first=self.is_first, last=self.is_last)


def _require_cut(model: CausalModel, outline: Outline, config: ModelConfig) -> None:
    """Refuse to cut a model whose stages would not compute the same as the whole model."""
    name = f"{type(model).__name__} ({config.transformers})"
    if why_not := outline.why_not:
        raise ConfigError(f"{name} cannot be cut into stages (mesh.pp must be 1): {why_not}")
    if "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{name} cannot be cut into stages (mesh.pp must be 1): its forward takes no "
            "inputs_embeds, so it makes masks of token ids, which only the first stage has"
        )
