"""Operators of DTensor on a mesh of 2 x 2 ranks, against plain tensors, both passes."""

from collections.abc import Iterator
from functools import partial

from torch.distributed.tensor import Partial, Replicate, Shard

from integration_tests.jobs.search.cases import Case
from integration_tests.jobs.search.operator_catalogue import GROUPS
from integration_tests.jobs.search.operators import compared, name_of

_PAIRS = (
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Partial(), Shard(0)),
    (Shard(1), Partial()),
    (Partial("max"), Partial()),
)
"""Placements of the first tensor; those behind it are on every rank, or cut alike."""


def cases() -> Iterator[Case]:
    """Return every operator with some placements of its tensors on 2 x 2 ranks."""
    for operators, shapes in GROUPS:
        for name, operator in operators.items():
            for kind, shape in list(shapes.items())[:1]:
                if kind not in operator.shapes:
                    continue
                others = operator.made(shape)[1:]
                for pair in _PAIRS:
                    told = ", ".join(map(name_of, pair))
                    placements = [pair, *[(Replicate(), Replicate()) for _ in others]]
                    work = partial(compared, operator, shape, placements, 2, 2)
                    yield Case(f"{name} {kind} {told}", work, ranks=4)
                    alike = all(each.shape == shape and each.is_floating_point() for each in others)
                    if others and alike and not any(each.is_partial() for each in pair):
                        work = partial(compared, operator, shape, [pair] * (len(others) + 1), 2, 2)
                        yield Case(f"{name} {kind} {told}, all alike", work, ranks=4)
