"""Cut an unmodified Hugging Face causal language model into pipeline stages.

Each stage is the model's own class with layers left out: its own code makes the causal masks and
the rotary embeddings, from the hidden states instead of token embeddings after the first stage.
Nothing of a model's arithmetic is written down here a second time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from hp_schedule.runtime.shared import SharedParameterInfo

MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Models of these types treat the embeddings that are passed to them as hidden states; others, for
example Gemma, scale them first."""

_OF_THE_LOSS: Final = ("labels", "num_items_in_batch", "logits_to_keep")
"""Arguments that only the last stage uses."""


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Stages that a model was cut into.

    Attributes:
        modules: One per stage. The first takes token ids `[batch, sequence]`, the others hidden
            states `[batch, sequence, hidden]`, and all the model's other arguments by name, for
            example ``attention_mask`` and ``position_ids``, the same on every stage. The last
            returns logits `[batch, sequence, vocabulary]`, or the model's own loss if it is given
            ``labels``. Names of parameters are those of the whole model.
        shared_parameters: Parameters that several stages have: tied embeddings.
    """

    modules: tuple[nn.Module, ...]
    shared_parameters: tuple[SharedParameterInfo, ...]


def split_model(model: nn.Module, layers: int | Sequence[int]) -> SplitModel:
    """Cut a `transformers` model into stages.

    The stages have the parameters of the model, not copies of them; the model itself stays whole.
    Every rank takes those of the modules that a schedule places on it and drops the rest. Sharding,
    compiling and `defer_weight_gradients` come after the cut, `gradient_checkpointing_enable`
    before or after. Keys and values are not cached.

    Args:
        model: A causal language model of one of `MODEL_TYPES`, for example `LlamaForCausalLM` or
            `Qwen3ForCausalLM`. May be on the meta device.
        layers: Number of layers of each stage, or a number of stages that share the layers evenly,
            the last ones taking one less where it does not divide.

    Raises:
        ValueError: If the model is of another kind or the layers do not add up.
    """
    decoder = _decoder(model)
    total = len(decoder.layers)
    counts = _even(total, layers) if isinstance(layers, int) else list(layers)
    if sum(counts) != total or min(counts, default=-1) < 0:
        raise ValueError(f"layers ({counts}) must be >= 0 and add up to the model's ({total})")
    starts = [sum(counts[:index]) for index in range(len(counts))]
    modules = tuple(
        _stage(
            model,
            range(start, start + count),
            is_first=index == 0,
            is_last=index == len(counts) - 1,
        )
        for index, (start, count) in enumerate(zip(starts, counts, strict=True))
    )
    return SplitModel(modules, _shared(modules))


class _Layers(nn.Module):
    """Some layers of a model under the numbers they have in it; a sequence of them."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(list(self.children()))

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        return list(self.children())[index]


def _decoder(model: nn.Module) -> Any:
    """Return the part of a model that has the layers."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in MODEL_TYPES:
        raise ValueError(f"type of model ({kind}) must be one of {', '.join(MODEL_TYPES)}")
    decoder = getattr(model, "base_model", model)
    missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(decoder, name)]
    if decoder is model or missing:
        raise ValueError(
            f"model ({type(model).__name__}) must be one with a language modelling head, for "
            "example LlamaForCausalLM"
        )
    return decoder


def _even(total: int, num_stages: int) -> list[int]:
    if num_stages < 1:
        raise ValueError(f"layers ({num_stages}) must be >= 1")
    return [total // num_stages + (index < total % num_stages) for index in range(num_stages)]


def _stage(model: nn.Module, kept: range, *, is_first: bool, is_last: bool) -> nn.Module:
    """Return a copy of the model with the layers of a range only; tensors are not copied."""
    memo: dict[int, object] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    memo |= {id(x): None for i, x in enumerate(_decoder(model).layers) if i not in kept}
    stage: Any = deepcopy(model, memo)
    decoder = _decoder(stage)
    # Its own configuration, of which the layers' is no part: it counts and names the layers.
    decoder.config = deepcopy(decoder.config)
    decoder.config.num_hidden_layers = len(kept)
    if getattr(decoder.config, "layer_types", None) is not None:
        decoder.config.layer_types = [decoder.config.layer_types[index] for index in kept]
    decoder.layers = _Layers({index: decoder.layers[index] for index in kept})
    if not is_first:
        decoder.embed_tokens = None
    if not is_last:
        decoder.norm = nn.Identity()
        stage.set_output_embeddings(None)
    forward = type(stage).forward if is_last else _hidden_states
    stage.forward = partial(_forward, partial(forward, stage), is_first)
    return stage  # type: ignore[no-any-return]


def _forward(
    forward: Callable[..., Sequence[Tensor]], is_first: bool, x: Tensor, **kwargs: object
) -> Tensor:
    given = {"input_ids" if is_first else "inputs_embeds": x}
    # The first value is the loss if there are labels, else the logits or hidden states.
    return forward(use_cache=False, **given, **kwargs)[0]


def _hidden_states(stage: Any, **kwargs: object) -> Sequence[Tensor]:
    """Return the hidden states of a stage that is not the last, in a sequence of one."""
    for name in _OF_THE_LOSS:
        kwargs.pop(name, None)
    output: Sequence[Tensor] = stage.base_model(**kwargs)
    return output


def _shared(modules: Sequence[nn.Module]) -> tuple[SharedParameterInfo, ...]:
    places: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            places.setdefault(id(parameter), {})[stage] = name
    return tuple(SharedParameterInfo(names) for names in places.values() if len(names) > 1)
