"""A trial run of a stage that finds out if documents of a sequence stay apart in it.

Note [Documents are tried]. Layers that carry a state from token to token are recognised by
convolutions and names of classes, and a stranger's code may have other names. So before it trains
on packed documents, a stage runs once on two short sequences. The second document of one is the
first document of the other, and the other two documents differ. Wherever a tensor enters or leaves
a module, its values at the common document must be alike in both sequences: they may depend neither
on the document in front nor on the offset of the document in its sequence. Values that differ are
made equal there, as in a trial of hp-context, so that the module that is named is the one whose
code did it. A `topk` of at least as many keys as a sequence has would choose all of them and show
nothing; in the trial it chooses fewer.

Shape symbols: S positions of the trial, D width of the stream.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from hp_base.errors import ConfigError
from hp_context import Documents
from hp_context.hugging_face.mixers import Comparison, length_of_trial
from hp_trainer.model import Microbatch, Stage
from hp_trainer.model.stage import forget_casts
from hp_transformers.stages.model import CausalModel

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
