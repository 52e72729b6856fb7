"""Modules of a model that mix positions besides its attention, found by trying the model once.

Every model of transformers is tried before its first forward on a part of the sequence. It carries
the question as a hook of its own, which asks once and removes itself. Models that exist when
attention is registered get it then, others as soon as their first part is put in. Models that never
call the registered attention are asked too: these would be the wrong ones.

Shape symbols: S positions of the trial, H query heads, G key/value heads, E head size of values.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from inspect import Parameter, signature

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from hp_platform import outside_graph

# Positions of a trial: primes, to be told from other sizes; the largest that the model has places
# for. Published models that compress keys do so for 128 tokens at most.
_LENGTHS = (257, 127, 61, 31, 13, 7)
_MOST_ROUNDING = 2**-6  # two steps of bfloat16, of the largest value
# What layers of transformers hand on to any attention, and what changes nothing of the numbers.
_HANDED_ON = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "sliding_window",
    "use_cache",
}

_MIXES = "computes for a token what changes with other tokens, or with its place in a rank's part"

_trial: ContextVar["Trial | None"] = ContextVar("hp_context_trial", default=None)


def current_trial() -> "Trial | None":
    """Return the trial that this call is part of; None outside of trials."""
    return _trial.get()


def find_mixer(model: nn.Module) -> str | None:
    """Find modules of a model that mix positions besides its attention, by trying it once.

    Tokens of a rank's part go through all of a model but its attention as if they were the whole
    sequence. That is right as long as everything but attention treats positions one by one: a
    convolution, a scan, a shift, a sum over the sequence, or a module that counts positions by
    itself would see this rank's part alone, and nothing would tell. No list of names can know them
    all, so the model runs once, before its first forward, on two short sequences. They have some
    tokens in common, at other places, with their position ids; all others differ. Attention is
    taken out: its place takes a function that gives each position its own value. Then whatever is
    computed for a common token must be alike in both sequences, wherever it stands.

    It is compared wherever a tensor enters or leaves a module, and made equal there, so that
    neither rounding nor a change of experts adds up from layer to layer, and what differs first is
    the work of the module whose code ran just before.

    Every rank that holds a part of the model calls: sharded weights are gathered as in a forward.

    Args:
        model: Model of transformers, on its device. Modes, gradients and random numbers are left
            as they are.

    Returns:
        Path and class of the first module that mixes positions or counts them by itself, and what
        it does; None when there is only attention that this package computes.

    Raises:
        ValueError: The model cannot be run on tokens alone.
    """
    trial = Trial(model)
    modes = [(module, module.training) for module in model.modules()]
    token = _trial.set(trial)
    try:
        with trial.watched():
            for module, _ in modes:
                module.training = False
            model(**trial.inputs())
    except Exception as error:
        if trial.found is not None:
            return trial.found
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{type(model).__name__} must run on tokens alone with hp_context, which tries it "
            f"once to find what mixes positions: {reason}"
        ) from error
    finally:
        _trial.reset(token)
        for module, mode in modes:
            module.training = mode
    return trial.found


class Comparison:
    """One run of a model on two sequences that have tokens in common, at other places.

    Args:
        model: Model, on its device.
        kept: Places of the common tokens in the first sequence.
        moved: Their places in the second.
        seq_len: Positions of a sequence, S.

    Attributes:
        found: The first module that computes something else for them; None: none so far.
        device: Device of the model.
    """

    def __init__(self, model: nn.Module, kept: Tensor, moved: Tensor, *, seq_len: int) -> None:
        self._model, self._kept, self._moved, self._seq = model, kept, moved, seq_len
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        self._eps = 0.0
        self.found: str | None = None
        self.device = next(model.parameters()).device

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every module, without gradients; random numbers are left as they are."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            for module in self._names:
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        args, kwargs = _mapped(self._same, args), _mapped(self._same, kwargs)
        self._running.append(module)
        return args, kwargs

    def _leave(self, module: nn.Module, _: object, output: object) -> object:
        output = _mapped(self._same, output)
        self._running.remove(module)
        return output

    def _same(self, x: Tensor) -> Tensor:
        """Compare a tensor of both sequences at the common tokens, and make it equal there."""
        dim = self._sequence_dim(x)
        if dim is None:
            return x
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        kept, moved = (places.to(whole.device) for places in (self._kept, self._moved))
        one = whole[0].index_select(dim - 1, kept)
        other = whole[1].index_select(dim - 1, moved)
        self._eps = max(self._eps, torch.finfo(x.dtype).eps)
        worst = (one - other).double().abs().amax()
        # Rounding is below; what sees other tokens is far above. NaN is not told from NaN.
        bound = min(self._eps**0.5, _MOST_ROUNDING) * one.double().abs().amax()
        if bool(worst > bound):
            self._blame(_MIXES)
        if isinstance(x, DTensor):
            return x
        equal = x.clone()
        equal[1].index_copy_(dim - 1, moved, one)
        return equal

    def _blame(self, why: str) -> None:
        """Name the module whose code runs, unless another was named before."""
        culprit = self._running[-1] if self._running else self._model
        name = self._names[culprit] or "the model"
        self.found = self.found or f"{name} ({type(culprit).__name__}) {why}"

    def _sequence_dim(self, x: Tensor) -> int | None:
        """Return the dim of the sequence in a tensor of both sequences; None if it is uncertain."""
        if not x.is_floating_point() or x.ndim < 3 or x.size(0) != 2 or x.numel() == 0:
            return None
        return next((dim for dim in range(1, x.ndim) if x.size(dim) == self._seq), None)


class Trial(Comparison):
    """One run of a model whose attention is taken out: nothing else may mix positions."""

    def __init__(self, model: nn.Module) -> None:
        seq_len = length_of_trial(model)
        kept = torch.arange(0, seq_len, 2)
        super().__init__(model, kept, (5 * kept + 3) % seq_len, seq_len=seq_len)

    def inputs(self) -> dict[str, object]:
        """Return two sequences of random tokens and their position ids [2, S]."""
        rows = self._model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        drawn = torch.Generator().manual_seed(0)
        # All others of a sequence are alike, so that their sum or mean differs as much as they do.
        ids = torch.tensor([[rows // 3], [rows // 2]]).repeat(1, self._seq)
        ids[0, self._kept] = torch.randint(rows, self._kept.shape, generator=drawn)
        ids[1, self._moved] = ids[0, self._kept]
        positions = torch.arange(self._seq).repeat(2, 1)
        positions[1, (5 * positions[0] + 3) % self._seq] = positions[0]
        given = {"input_ids": ids.to(self.device), "position_ids": positions.to(self.device)}
        known = signature(self._model.forward).parameters
        takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
        return given | ({"use_cache": False} if takes_any or "use_cache" in known else {})

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, others: Mapping[str, object]
    ) -> tuple[Tensor, None]:
        """Take the place of attention: [2, S, H, E], of each position its own value.

        Args:
            query: [2, H, S, D].
            key: [2, G, S, D].
            value: [2, G, S, E].
            others: Further arguments of the layer, which attention of this package does not take.
        """
        for tensor in (query, key, value):
            self._same(tensor)
        unknown = [n for n, x in others.items() if x is not None and n not in _HANDED_ON]
        if unknown:
            self._blame(f"asks its attention for {', '.join(unknown)}")
        if value.size(2) != query.size(2):
            self._blame("attends to keys that are not those of its own tokens")
            return query.new_zeros(*query.shape[:3], value.size(3)).transpose(1, 2), None
        groups = query.size(1) // value.size(1)
        return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def length_of_trial(model: nn.Module, lengths: Sequence[int] = _LENGTHS) -> int:
    """Return the number of positions of a model's trial, the first of `lengths` that it takes."""
    config: object = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(config, "max_position_embeddings", None) or _LENGTHS[0]
    return next((length for length in lengths if length <= most), lengths[-1])


def _mapped(function: Callable[[Tensor], Tensor], value: object) -> object:
    """Put every tensor of nested arguments through a function."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple(_mapped(function, item) for item in value)
    if type(value) is list:
        return [_mapped(function, item) for item in value]
    if type(value) is dict:
        return {name: _mapped(function, item) for name, item in value.items()}
    if isinstance(value, Mapping):  # what a model returns: its tensors are looked at, and left
        for item in value.values():
            _mapped(function, item)
    return value


_names: set[str] = set()  # registered by this package
_watching: list[RemovableHandle] = []  # one at most, of the process
_MARK = "_hp_context_watched"


def watch_models(name: str, base: type[nn.Module]) -> None:
    """Try every model that selects an attention, before its first forward.

    Args:
        name: Name under which the attention was registered.
        base: Class of all models of transformers.
    """
    _names.add(name)
    if _watching:
        return

    def attach(module: nn.Module, *_: object) -> None:
        if isinstance(module, base) and _MARK not in module.__dict__:
            module.__dict__[_MARK] = module.register_forward_pre_hook(outside_graph(_ask))

    for found in gc.get_objects():
        if issubclass(type(found), base):
            attach(found)
    _watching.append(register_module_module_registration_hook(attach))


def _ask(model: nn.Module, _: object) -> None:
    """Refuse a model that mixes positions elsewhere than in attention."""
    if current_trial() is not None or not _selected(model):
        return
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    found = find_mixer(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard() if part is model else part.reshard()
    if found is not None:
        raise ValueError(
            f"{found}: all of a model but attention by transformers' registry must treat "
            "positions one by one with hp_context"
        )
    for part in model.modules():
        handle = part.__dict__.pop(_MARK, None)
        if handle is not None:
            handle.remove()


def _selected(model: nn.Module) -> bool:
    """Tell whether a model, or a model in it, has chosen attention of this package."""
    configs = (getattr(part, "config", None) for part in model.modules() if _MARK in part.__dict__)
    return any(getattr(config, "_attn_implementation", None) in _names for config in configs)
