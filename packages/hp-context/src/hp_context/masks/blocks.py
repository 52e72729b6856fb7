"""Blocks of a mask that a rank computes, as data: no tensors here.

A block is a run of query positions against a run of key positions. Blocks that nobody sees are
left out; long runs of queries are cut where their mask says so (documents, windows), and the keys
where what the queries see begins or ends, so that most blocks need no mask tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hp_context.masks import BlockKind, Mask

MIN_RUN = 64  # positions; a kernel call for fewer costs more than it saves


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys that a run of queries attends to.

    Attributes:
        key: Positions of the keys.
        start: Index of the first one in the tensor of keys.
        kind: FULL, CAUSAL or PARTIAL.
    """

    key: range
    start: int
    kind: BlockKind


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Queries at consecutive positions, with all the blocks that they see.

    Attributes:
        query: Positions of the queries.
        start: Index of the first one in the tensor of queries.
        blocks: Blocks of keys that the queries see, in the order of the keys; empty where they see
            nothing.
    """

    query: range
    start: int
    blocks: tuple[KeyBlock, ...]

    @property
    def calls(self) -> list[tuple[slice, KeyBlock]]:
        """Return the blocks as kernels take them, each with the place of its keys in their tensor.

        FULL blocks side by side are one: where they are in the sequence makes no difference to
        them. (Of the key block that stands for them only its kind has a meaning.)
        """
        calls: list[tuple[slice, KeyBlock]] = []
        for block in self.blocks:
            at = slice(block.start, block.start + len(block.key))
            if calls and block.kind is BlockKind.FULL:
                before, other = calls[-1]
                if other.kind is BlockKind.FULL and before.stop == at.start:
                    calls[-1] = slice(before.start, at.stop), other
                    continue
            calls.append((at, block))
        return calls

    @property
    def cost(self) -> int:
        """Return the number of scores to compute; a causal square counts up to its diagonal."""
        return sum(_cost(len(self.query), block) for block in self.blocks)


def plan(
    mask: Mask, queries: Sequence[range], keys: Sequence[range], *, min_run: int = MIN_RUN
) -> list[QueryRun]:
    """Return the blocks of queries x keys that are not empty.

    Args:
        mask: Description of the keys that a query may see.
        queries: Positions of the queries, as runs in the order of their tensor.
        keys: Positions of the keys, as runs in the order of their tensor.
        min_run: Runs are not cut any shorter than this.
    """
    keys = joined(keys)
    planned = []
    start = 0
    for run in joined(queries):
        for query in _cut(run, mask.query_cuts(run), min_run):
            planned.append(QueryRun(query, start, tuple(_key_blocks(mask, query, keys, min_run))))
            start += len(query)
    return planned


def _key_blocks(
    mask: Mask, query: range, keys: Sequence[range], min_run: int
) -> Iterable[KeyBlock]:
    start = 0
    square = mask.block(query, query) is BlockKind.CAUSAL
    for run in keys:
        cuts = mask.key_cuts(query)
        if square and query.start in run and query[-1] in run:
            cuts = {cut for cut in cuts if cut not in query} | {query.start, query.stop}
        parts = [(key, mask.block(query, key)) for key in _cut(run, cuts, 1)]
        for key, kind in _merged(parts, min_run):
            yield KeyBlock(key, start + key.start - run.start, kind)
        start += len(run)


def _merged(
    parts: Iterable[tuple[range, BlockKind]], min_run: int
) -> list[tuple[range, BlockKind]]:
    """Drop empty parts; join neighbours of one kind, and short ones with any neighbour."""
    merged: list[tuple[range, BlockKind]] = []
    for key, kind in parts:
        if kind is BlockKind.EMPTY:
            continue
        if merged and merged[-1][0].stop == key.start:
            before, kind_before = merged[-1]
            joined = range(before.start, key.stop)
            short = min(len(before), len(key)) < min_run
            if kind is kind_before and kind is not BlockKind.CAUSAL:
                merged[-1] = (joined, kind)
                continue
            if short and BlockKind.CAUSAL not in (kind, kind_before):
                merged[-1] = (joined, BlockKind.PARTIAL)
                continue
        merged.append((key, kind))
    return merged


def joined(runs: Sequence[range]) -> list[range]:
    """Join runs that follow each other both in the tensor and in the sequence."""
    longer: list[range] = []
    for run in runs:
        if longer and longer[-1].stop == run.start:
            longer[-1] = range(longer[-1].start, run.stop)
        else:
            longer.append(run)
    return longer


def _cut(run: range, cuts: Iterable[int], min_run: int) -> list[range]:
    """Cut a run at those of `cuts` that leave no piece shorter than `min_run`."""
    ends = [run.start]
    for cut in sorted(cuts):
        if cut - ends[-1] >= min_run and run.stop - cut >= min_run:
            ends.append(cut)
    return [range(a, b) for a, b in pairwise([*ends, run.stop])]


def _cost(num_queries: int, block: KeyBlock) -> int:
    if block.kind is BlockKind.CAUSAL:
        return num_queries * (num_queries + 1) // 2
    return num_queries * len(block.key)
