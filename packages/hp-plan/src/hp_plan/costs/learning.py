"""Learn what a model costs, by running it without memory."""

from collections.abc import Callable
from typing import Final, TypeVar

from hp_plan.costs.kernels import learn
from hp_plan.costs.meta_run import run
from hp_plan.costs.stored import Key, StoredKernels, StoredModel
from hp_plan.costs.work import alike
from hp_trainer.config import ModelConfig
from hp_trainer.model.transformer import build_stage

T = TypeVar("T", StoredModel, StoredKernels)


def learned(kind: type[T], key: Key) -> T:
    """Return what the parts of a model do, or launch; not inside of a dry device."""
    return _LEARN[kind](key)  # type: ignore[return-value]


def _model(key: Key) -> StoredModel:
    model, vocab_size, seq_len, dtype, tp, ep = key
    sizes = {"tp": tp, "ep": ep}
    return StoredModel.of(run(model, vocab_size, seq_len=seq_len, dtype=dtype, sizes=sizes))


def _kernels(key: Key) -> StoredKernels:
    model, vocab_size, seq_len, dtype, tp, ep = key
    layers, sizes = sorted({*alike(model).values()}), {"tp": tp, "ep": ep}
    found = learn(model, vocab_size, layers, seq_len=seq_len, dtype=dtype, sizes=sizes)
    return StoredKernels.of(found)


_LEARN: Final[dict[type, Callable[[Key], StoredModel | StoredKernels]]] = {
    StoredModel: _model,
    StoredKernels: _kernels,
}


def require_stages(model: ModelConfig) -> None:
    """See whether a model can be cut into stages.

    Raises:
        hp_base.errors.ConfigError: When it cannot.
    """
    build_stage(model, model.vocab_size, layers=range(1), first=True, last=False)
