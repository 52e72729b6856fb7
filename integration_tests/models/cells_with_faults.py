"""Run cells of the table of models, each once with a mistake in hp-train that its kind must find.

`python cells_with_faults.py OUT.json CASE ...`: a case is `TYPE|KIND` or `TYPE|KIND|fault`. All of
them are forked from this process, which has imported torch and transformers once.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from torch import Tensor

from hp_context.hugging_face.attention import SpreadAttention
from hp_expert.hugging_face.modules import DispatchedExperts
from hp_trainer.model.recompute import recomputed
from hp_trainer.training import trainer as training
from hp_trainer.training.batches import Batches, Share
from hp_trainer.training.gradients import reduce_gradients
from hp_transformers.stages import call as transformers_call
from hp_transformers.stages import tensor_parallel
from hp_transformers.stages.stage import TransformersStage
from integration_tests.models.architectures import task
from integration_tests.models.architectures.examine import examine, prepare, run_in_fork

OFF = 1 + 1e-9
"""What something is multiplied by that is a little wrong."""


@contextmanager
def one_gradient_is_off(_rank: int) -> Iterator[None]:
    """The first parameter of a rank gets another gradient."""

    def reduced(parameters: Any, mesh: Any) -> Any:
        norms = reduce_gradients(parameters, mesh)
        parameters[0].local.grad.mul_(OFF)
        return norms

    with patch.object(training, "reduce_gradients", reduced):
        yield


@contextmanager
def recomputed_is_other(_rank: int) -> Iterator[None]:
    """A block gives something else in backward than it did in forward."""

    def off(part: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            first, *others = args
            return part(first * OFF if calls > 1 else first, *others, **kwargs)

        return recomputed(counted, *args, **kwargs)

    with patch.object(transformers_call, "recomputed", off):
        yield


@contextmanager
def share_is_other(change: Callable[[Share, int], Share], rank: int) -> Iterator[None]:
    """A rank gets another share of a batch."""
    cut = Batches.cut

    def other(self: Batches, *args: Any, **kwargs: Any) -> Share:
        return change(cut(self, *args, **kwargs), rank)

    with patch.object(Batches, "cut", other):
        yield


def no_documents(share: Share, _rank: int) -> Share:
    """Attention sees over the ends of documents."""
    kwargs = [
        {"microbatch": dataclasses.replace(k["microbatch"], documents=None)} for k in share.kwargs
    ]
    return share._replace(kwargs=kwargs)


def own_count(share: Share, rank: int) -> Share:
    """A rank divides its loss by a number of its own."""
    return share._replace(num_targets=share.num_targets + rank)


@contextmanager
def message_is_off(_rank: int) -> Iterator[None]:
    """A stage gets other hidden states than were sent."""
    forward = TransformersStage.forward

    def off(self: TransformersStage, x: Tensor, **kwargs: Any) -> Tensor:
        return forward(self, x if self.is_first else x * OFF, **kwargs)

    with patch.object(TransformersStage, "forward", off):
        yield


@contextmanager
def answer_is_off(_rank: int) -> Iterator[None]:
    """A stage gets another gradient than was sent."""
    forward = TransformersStage.forward

    def off(self: TransformersStage, x: Tensor, **kwargs: Any) -> Tensor:
        output = forward(self, x, **kwargs)
        if self.is_first and output.requires_grad:
            output.register_hook(lambda gradient: gradient * OFF)
        return output

    with patch.object(TransformersStage, "forward", off):
        yield


@contextmanager
def sum_is_off(rank: int) -> Iterator[None]:
    """A rank adds something else to what tensor-parallel ranks sum."""
    summed = tensor_parallel._sum

    def off(x: Tensor, group: Any) -> Tensor:
        return summed(x * OFF if rank else x, group)

    with patch.object(tensor_parallel, "_sum", off):
        yield


@contextmanager
def keys_are_off(rank: int) -> Iterator[None]:
    """Attention of a rank reads other keys than it was given."""
    call = SpreadAttention.__call__

    def off(
        self: SpreadAttention, module: Any, query: Tensor, key: Tensor, *others: Any, **more: Any
    ) -> Any:
        return call(self, module, query, key * OFF if rank else key, *others, **more)

    with patch.object(SpreadAttention, "__call__", off):
        yield


@contextmanager
def experts_are_off(rank: int) -> Iterator[None]:
    """Experts of a rank give something else."""
    forward = DispatchedExperts.forward

    def off(self: DispatchedExperts, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return output * OFF if rank else output

    with patch.object(DispatchedExperts, "forward", off):
        yield


def _of_share(change: Callable[[Share, int], Share]) -> Callable[[int], Any]:
    return lambda rank: share_is_other(change, rank)


FAULTS: dict[str, Callable[[int], Any]] = {
    "one process": one_gradient_is_off,
    "recompute": recomputed_is_other,
    "packed": _of_share(no_documents),
    "fsdp 2": _of_share(own_count),
    "pp 2 gpipe": message_is_off,
    "pp 2 1f1b": answer_is_off,
    "pp 2 zero bubble": answer_is_off,
    "tp 2": sum_is_off,
    "cp 2 heads": keys_are_off,
    "cp 2 gather": keys_are_off,
    "cp 2 ring": keys_are_off,
    "ep 2": experts_are_off,
    "tp 2 x ep 2": experts_are_off,
    "hsdp 2 x 2": _of_share(own_count),
    "pp 2 x fsdp 2": _of_share(own_count),
}


def main() -> None:
    """Run the cases that are asked for."""
    out, *cases = sys.argv[1:]
    prepare()
    found = {}
    with tempfile.TemporaryDirectory() as text:
        data = Path(text) / "data"
        assert not run_in_fork(lambda: task.make_data(data), Path(text) / "log")
        for case in cases:
            name, kind, *faulty = case.split("|")
            fault = FAULTS[kind] if faulty else None
            one = examine(name, data, [kind], fault=fault)
            found[case] = [one.reason, *map(msgspec.to_builtins, one.cells)]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
