"""Documents of a packed sequence, as models of transformers learn of them.

Note [Documents are tried]. Layers that carry a state from token to token are recognised by
convolutions and names of classes, and a stranger's code may have other names. So before it trains
on packed documents, a stage runs once on two short sequences. The second document of one is the
first document of the other, and the other two documents differ. Wherever a tensor enters or leaves
a module, its values at the common document must be alike in both sequences: they may depend neither
on the document in front nor on the offset of the document in its sequence. Values that differ are
made equal there, as in a trial of hp-context, so that the module that is named is the one whose
code did it. A `topk` of at least as many keys as a sequence has would choose all of them and show
nothing; in the trial it chooses fewer.

Shape symbols: B sequences, S positions of them or of the trial, D width of the stream.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from hp_base.errors import ConfigError, told
from hp_context import Documents
from hp_context.hugging_face.mixers import Comparison, length_of_trial
from hp_trainer.config import ModelConfig
from hp_trainer.model import Microbatch, Stage
from hp_trainer.model.stage import forget_casts
from hp_transformers.stages.model import CausalModel, by_folder, on_meta
from hp_transformers.stages.outline import Answers, outline_of

_CARRIES = re.compile(
    r"mamba|rwkv|recurrent|rglru|lightning|deltanet|xlstm|shortconv|linearattention"
    r"|compressor",
    re.IGNORECASE,
)
"""Names of classes that carry a state from token to token, or join keys of a sequence."""


def positions_of(
    model: CausalModel, config: ModelConfig, microbatch: Microbatch, x: Tensor, *, is_shared: bool
) -> dict[str, Tensor]:
    """Return the arguments of a model for positions of its tokens; none for whole sequences.

    Args:
        model: Model of transformers.
        config: Model configuration with the folder.
        microbatch: Microbatch, with the lengths of documents if these are packed.
        x: Input of the stage, [B, S, ...].
        is_shared: Whether other ranks have other positions of the same sequences.

    Raises:
        hp_base.errors.ConfigError: When the model would not keep documents apart.
    """
    if microbatch.documents is None and not is_shared:
        return {}
    name = type(model).__name__
    if is_shared and "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(f"mesh.cp must be 1 with {name}, which takes no positions")
    positions = microbatch.positions if is_shared else None
    if microbatch.documents is None:
        assert positions is not None
        return {"position_ids": positions[None]}
    # Attention of hp-context reads positions by itself.
    if not is_shared and (why := _why_not(config)):
        raise ConfigError(f'data.documents must be "joined" with {name}: {why}')
    rows = []
    for documents in microbatch.documents:
        assert isinstance(documents, Documents)
        rows.append(torch.cat([torch.arange(length) for length in documents.lengths]))
    whole = torch.stack(rows).to(x.device)
    return {"position_ids": whole if positions is None else whole[:, positions]}


class _AtFirstLayerError(Exception):
    """Raised when the forward of a model comes to its first layer."""


@by_folder
def _why_not(config: ModelConfig) -> str:
    """Return the reason why a model does not keep documents apart; empty: it does, or may.

    Transformers recognises packed sequences by positions that begin with 0 in every document: the
    functions that make masks for attention look for that. A model that takes positions may still
    make masks without them, and a layer that carries a state from token to token has no mask.
    Neither raises an error, so both are looked for: by running the model on the meta device up to
    its first layer, and by the classes and convolutions of its layers. A model that passes both
    checks is run on real documents, see Note [Documents are tried].
    """
    from transformers import masking_utils  # noqa: PLC0415 - of those who have it

    model, path = on_meta(config, torch.float32), outline_of(config).layers
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions and so knows no documents"
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    for name, part in layers.named_modules():
        if isinstance(part, nn.Conv1d) or _CARRIES.search(type(part).__name__):
            return f"{path}.{name} ({type(part).__name__}) mixes tokens whatever positions say"
    found = []
    look = masking_utils.find_packed_sequence_indices

    def looked(position_ids: Tensor) -> Tensor | None:
        found.append(position_ids)
        packed: Tensor | None = look(position_ids)
        return packed

    def leave(*_args: object, **_kwargs: object) -> NoReturn:
        raise _AtFirstLayerError

    layers[0].forward = leave
    masking_utils.find_packed_sequence_indices = looked
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        with Answers():
            model(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
    except _AtFirstLayerError:
        pass
    except Exception as error:  # noqa: BLE001 - models may raise anything
        return f"whether its masks depend on positions cannot be found out: {told(error, 120)}"
    finally:
        masking_utils.find_packed_sequence_indices = look
    return "" if found else "its masks do not depend on positions"


_LENGTHS = (61, 31, 13, 7)
"""Lengths of a sequence, primes, so that no other size of a model is likely to be the same."""
_TOPK: tuple[Callable[..., object], ...] = (torch.topk, Tensor.topk)


def require_documents_apart(
    stage: Stage,
    model: CausalModel,
    input_of: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
) -> None:
    """Try a stage; see Note [Documents are tried]. All ranks that share the stage call it.

    Args:
        stage: Stage with its weights, on its device.
        model: Model that the stage runs.
        input_of: Function that maps token ids int64 [2, S] to the input of the stage.
        vocab_size: V, above all token ids.

    Raises:
        hp_base.errors.ConfigError: When one document sees another.
    """
    trial = _Trial(stage, length_of_trial(model, _LENGTHS))
    with trial.watched(), _FewChosen(trial.seq_len), torch.compiler.set_stance("force_eager"):
        stage(input_of(trial.tokens(vocab_size)), microbatch=trial.microbatch)
    forget_casts(stage)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    if trial.found is not None:
        raise ConfigError(
            f'data.documents must be "joined" with {type(model).__name__}: {trial.found}, '
            "though positions say where documents end"
        )


class _FewChosen(TorchFunctionMode):
    """A mode in which `topk` of all keys of a sequence chooses a part of them.

    Args:
        seq_len: Number of positions of a sequence, S.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self._seq = seq_len

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if func in _TOPK:
            k = kwargs.pop("k") if "k" in kwargs else args[1]
            few = max(1, self._seq // 4) if k == self._seq else k
            return func(args[0], few, *args[2:], **kwargs)
        return func(*args, **kwargs)


class _Trial(Comparison):
    """One run of a stage on two sequences of two documents, one of which they have in common.

    Args:
        stage: Stage with its weights, on its device.
        seq_len: Number of positions of a sequence, S.
    """

    def __init__(self, stage: Stage, seq_len: int) -> None:
        self.seq_len, self._common = seq_len, seq_len // 2
        last = torch.arange(seq_len - self._common, seq_len)
        super().__init__(stage, last, torch.arange(self._common), seq_len=seq_len)

    @property
    def microbatch(self) -> Microbatch:
        """Return a microbatch that says where documents end."""
        others = self.seq_len - self._common
        lengths = ((others, self._common), (self._common, others))
        return Microbatch(2, documents=tuple(map(Documents, lengths)))

    def tokens(self, vocab_size: int) -> Tensor:
        """Return token ids of both sequences, int64 [2, S]."""
        drawn = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size, (2, self.seq_len), generator=drawn)
        tokens[1, self._moved] = tokens[0, self._kept]
        return tokens.to(self.device)

    def _sequence_dim(self, x: Tensor) -> int | None:
        # A tensor with both queries and keys of a sequence has other keys in each sequence.
        return super()._sequence_dim(x) if list(x.shape).count(self.seq_len) == 1 else None
