"""The trial of a stage that finds out if documents of a sequence stay apart in it.

Note [Documents are tried]. What carries a state from token to token is known by convolutions and by
names of classes, and a stranger's code may have another name for it. So before it trains on packed
documents, a stage runs once on two short sequences. The second document of one is the first of the
other, and the other documents differ. Wherever a tensor enters or leaves a module, what it has of
the common document must be alike in both: nothing of the document in front may be in it, nor the
place of the document in its sequence. What differs is made equal there, as in a trial of
hp-context, so that the module named is the one whose code did it. What chooses more keys than the
sequences have would choose all of them, and show nothing; there it chooses fewer.

Shape symbols: S positions of the trial, D width of the stream.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hp_base.errors import ConfigError
from hp_context import Documents
from hp_context.hugging_face.mixers import Comparison, length_of_trial
from hp_trainer.model import Microbatch
from hp_trainer.model.casts import forget_casts
from hp_transformers.stages.sequence import hidden_of

if TYPE_CHECKING:
    from hp_transformers.stages.stage import TransformersStage

_LENGTHS = (61, 31, 13, 7)
"""Primes, to be told from other sizes."""


def require_documents_apart(stage: "TransformersStage") -> None:
    """Try a stage; see Note [Documents are tried]. All ranks that share the stage call it.

    Args:
        stage: Stage with its weights, on its device.

    Raises:
        hp_base.errors.ConfigError: When one document sees another.
    """
    trial = _Trial(stage)
    with trial.watched(), _FewChosen(trial.seq_len), torch.compiler.set_stance("force_eager"):
        stage(trial.inputs(), microbatch=trial.microbatch)
    forget_casts(stage)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    if trial.found is not None:
        raise ConfigError(
            f'data.documents must be "joined" with {type(stage.whole).__name__}: {trial.found}, '
            "though positions say where documents end"
        )


class _FewChosen(TorchFunctionMode):
    """A mode in which `topk` of all keys of a sequence chooses a part of them.

    Args:
        seq_len: Positions of a sequence, S.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self._seq = seq_len

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function."""
        kwargs = dict(kwargs or {})
        if func in (torch.topk, Tensor.topk):
            k = kwargs.pop("k") if "k" in kwargs else args[1]
            few = max(1, self._seq // 4) if k == self._seq else k
            return func(args[0], few, *args[2:], **kwargs)
        return func(*args, **kwargs)


class _Trial(Comparison):
    """One run of a stage on two sequences of two documents, one of which they have in common."""

    def __init__(self, stage: "TransformersStage") -> None:
        self.seq_len = seq_len = length_of_trial(stage.whole, _LENGTHS)
        self._common = seq_len // 2
        kept = torch.arange(seq_len - self._common, seq_len)
        super().__init__(stage, kept, torch.arange(self._common), seq_len=seq_len)
        self._stage = stage

    @property
    def microbatch(self) -> Microbatch:
        """Says where documents end."""
        others = self._seq - self._common
        lengths = ((others, self._common), (self._common, others))
        return Microbatch(2, documents=tuple(map(Documents, lengths)))

    def inputs(self) -> Tensor:
        """Return what the stage gets: tokens int64 [2, S], or hidden states [2, S, D] of them."""
        drawn = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._stage.config.vocab_size, (2, self._seq), generator=drawn)
        tokens[1, self._moved] = tokens[0, self._kept]
        if self._stage.is_first:
            return tokens.to(self.device)
        hidden = hidden_of(tokens.to(self.device), self._stage.outline.width)
        hidden = hidden.to(self._stage.compute_dtype).flatten(2)
        return F.pad(hidden, (0, self._stage.num_columns))

    def _sequence_dim(self, x: Tensor) -> int | None:
        # What has queries and keys of a sequence has other keys in each of them.
        return super()._sequence_dim(x) if list(x.shape).count(self._seq) == 1 else None
