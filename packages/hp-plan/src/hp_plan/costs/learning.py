"""Learn what a model costs: run it, here or in a process of its own.

A process is in one dry device at a time. Inside of one, as a rank of a dry run is whose config
leaves open how parameters are gathered, another process learns for it.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from hp_plan.costs.kernels import learn
from hp_plan.costs.meta_run import run
from hp_plan.costs.modules import Key
from hp_plan.costs.stored import StoredKernels, StoredModel
from hp_plan.costs.work import alike
from hp_platform.device.dry import is_dry
from hp_trainer.config import ModelConfig
from hp_trainer.model.transformer import build_stage

T = TypeVar("T", StoredModel, StoredKernels)


def learned(kind: type[T], key: Key) -> T:
    """Return what the parts of a model do, or launch."""
    if not is_dry():
        return _LEARN[kind](key)  # type: ignore[return-value]
    answer = subprocess.run(  # noqa: S603 - itself
        # -P: a file of the folder that this was started in must not be taken for a module.
        [sys.executable, "-P", "-m", __name__, kind.__name__],
        input=msgspec.json.encode(key),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(answer.stdout, type=kind)


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


def main(name: str) -> None:
    """Read a key, write what was learned for it."""
    key = msgspec.json.decode(sys.stdin.buffer.read(), type=Key)
    (kind,) = (kind for kind in _LEARN if kind.__name__ == name)
    sys.stdout.buffer.write(msgspec.json.encode(_LEARN[kind](key)))


if __name__ == "__main__":
    main(sys.argv[1])
