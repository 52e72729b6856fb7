"""Work of the stages of a pipeline. No torch, but to run the model once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from msgspec import Struct

from hp_base.dtypes import BYTES
from hp_plan.costs.cache import cached
from hp_plan.costs.work import Kernel, Kernels, ModelWork, Work, alike, together
from hp_trainer.config import Config, ModelConfig
from hp_trainer.layout.schedules import layers_of_stages, placement
from hp_trainer.layout.vocabulary import logit_tile

Key: TypeAlias = tuple[ModelConfig, int, int, str, int, int]
"""Everything that learned costs depend on: configuration of the model, vocabulary, sequence length
and dtype; if the model cuts itself, tensor-parallel ranks and min(2, expert-parallel ranks)."""
_Counts: TypeAlias = tuple[tuple[Kernel, int], ...]


class StoredKernels(Struct, frozen=True):
    """Kernels of parts by name, in types that JSON has: of forward, of backward, and run again.

    Attributes:
        parts: Kernels of each part, each with its number.
    """

    parts: dict[str, tuple[_Counts, _Counts, _Counts]]

    @classmethod
    def of(cls, kernels: Mapping[str, Kernels]) -> StoredKernels:
        """Return the stored form of kernels."""
        return cls(
            {
                name: (
                    tuple(part.forward.items()),
                    tuple(part.backward.items()),
                    tuple(part.again.items()),
                )
                for name, part in kernels.items()
            }
        )

    @property
    def kernels(self) -> dict[str, Kernels]:
        """Return the kernels in their usual form."""
        return {
            name: Kernels(*(Counter(dict(way)) for way in ways))
            for name, ways in self.parts.items()
        }


def stage(config: Config, vocab_size: int, *, layers: range, first: bool, last: bool) -> Work:
    """Return the work of a pipeline stage; names of parameters are those of the whole model."""
    key, tiled = _key(config, vocab_size), is_tiled(config, vocab_size)
    return _stage(key, config.train.recompute, layers, first=first, last=last, tiled=tiled)


def whole_model(config: Config, vocab_size: int) -> Work:
    """Return the work of a model in one stage."""
    return stage(config, vocab_size, layers=range(config.model.num_layers), first=True, last=True)


def stages(config: Config, vocab_size: int, *, num_stages: int) -> tuple[Work, ...]:
    """Return the work of the stages of a pipeline.

    Stages with layers of the same kinds are one object, with the parameter names of the first.
    """
    key, tiled = _key(config, vocab_size), is_tiled(config, vocab_size)
    layers = tuple(layers_of_stages(config, num_stages))
    return _stages(key, config.train.recompute, layers, tiled=tiled)


def kernels(config: Config, vocab_size: int, *, num_stages: int) -> tuple[Kernels, ...]:
    """Return the kernels of the stages of a pipeline; see `hp_plan.costs.kernels`."""
    cut = tuple(layers_of_stages(config, num_stages))
    return _stage_kernels(_key(config, vocab_size), config.train.recompute, cut)


def require_stages(config: Config) -> None:
    """Refuse a model that cannot be cut into stages.

    Raises:
        hp_base.errors.ConfigError: When it cannot.
    """
    from hp_trainer.model.transformer import build_stage  # noqa: PLC0415 - imports torch

    build_stage(config.model, config.model.vocab_size, layers=range(1), first=True, last=False)


def is_tiled(config: Config, vocab_size: int) -> bool:
    """Tell whether a loss computes logits by tiles, see `hp_trainer.layout.vocabulary`."""
    last = placement(config.pipeline, num_ranks=config.mesh.pp)[-1]
    cut = 1 if config.model.transformers else config.mesh.tp_sizes[last]
    rows = -(-vocab_size // cut)
    return logit_tile(config.microbatch_tokens, rows, size=BYTES[config.train.dtype]) is not None


def kept_once(config: Config, *, tp: int, padded: float) -> float:
    """Return the bytes per token that the largest block keeps while backward recomputes it.

    Args:
        config: Configuration of the run.
        tp: Tensor-parallel ranks that share the tokens.
        padded: Rows of a buffer for experts, divided by the routed ones.
    """
    return _kept_once(_key(config, config.model.vocab_size or 1), tp, padded)


@lru_cache(maxsize=256)  # thousands of layouts ask for the same
def _kept_once(key: Key, tp: int, padded: float) -> float:
    blocks = set(_model(key).blocks.values())
    parts = [together((block.attend, block.feed, block.rest)) for block in blocks]
    return max(part.kept_bytes(1, tp=tp, padded=padded) for part in parts)


def _key(config: Config, vocab_size: int) -> Key:
    asked = config.model, vocab_size, config.data.seq_len, config.train.dtype
    if not config.model.transformers:
        return *asked, 1, 1
    return *asked, config.mesh.tp, min(config.mesh.ep, 2)


@lru_cache(maxsize=64)
def _model(key: Key) -> ModelWork:
    """Return the work of a model, in which layers of a kind have one and the same work."""

    def learn() -> ModelWork:
        from hp_plan.costs.meta_run import run  # noqa: PLC0415 - imports torch

        model, vocab_size, seq_len, dtype, tp, ep = key
        return run(model, vocab_size, seq_len=seq_len, dtype=dtype, sizes={"tp": tp, "ep": ep})

    # A model of one's own is code that may change.
    found = learn() if key[0].is_own else cached(key, ModelWork, learn)
    layers = {f"layers.{i}": found.blocks[f"layers.{of}"] for i, of in alike(key[0]).items()}
    return replace(found, blocks={**layers, **found.blocks})


@lru_cache(maxsize=4096)  # thousands of layouts cut a model in few ways
def _block(key: Key, recompute: str, name: str) -> Work:
    """Return the work of a block under its name, with recomputation as the config asks for."""
    block, model = _model(key).blocks[name], key[0]
    size = BYTES[key[3]]
    attend, feed, rest = block.attend, block.feed, block.rest
    # Recomputation stops once backward has all it needs: before a sum at the end of the part.
    ends_in_sum = feed.summed > 0 and not model.is_own
    size *= key[4]  # see Note [Costs of a stage that cuts itself]
    if recompute == "full":
        # Dropout at the end of a layer needs its input.
        last = ends_in_sum and not model.dropout
        whole = _repeated(together((attend, feed, rest)), model.dim, size, but_last_sum=last)
        return whole.under(f"{name}.")
    if recompute == "selective":
        whole = _repeated(together((attend, feed, rest)), model.dim, size, but_last_sum=False)
        scores, rows = (elements * size for elements in _products(model, name))
        return replace(whole, kept=whole.kept + scores + rows, routed=rows).under(f"{name}.")
    if recompute == "attention":
        attend = _repeated(attend, model.dim, size, but_last_sum=True)
    elif recompute == "feed_forward":
        feed = _repeated(feed, model.dim, size, but_last_sum=ends_in_sum)
    return together((attend, feed, rest)).under(f"{name}.")


def _products(model: ModelConfig, name: str) -> tuple[float, float]:
    """Return the elements per token of the outputs of attention and of the products of experts."""
    width = model.num_heads * (
        model.v_head_dim
        if model.attention == "mla"
        else model.head_dim or model.dim // model.num_heads
    )
    layer = int(name.rpartition(".")[2]) if name.startswith("layers.") else model.num_layers
    if model.is_dense(layer):
        return float(width), 0.0
    return float(width), float(model.top_k * (2 * model.expert_hidden + model.dim))


def _repeated(work: Work, dim: int, size: int, *, but_last_sum: bool) -> Work:
    """Return a part that runs again in backward: it keeps only its input of width `dim`."""
    again = replace(work, summed=work.summed - dim) if but_last_sum and work.summed else work
    return replace(work, kept=float(dim * size), whole=0.0, routed=0.0, again=again)


@lru_cache(maxsize=1024)
def _stage(
    key: Key, recompute: str, layers: range, *, first: bool, last: bool, tiled: bool
) -> Work:
    model = _model(key)
    parts = [model.before] if first else []
    if last and not first:
        parts.append(Work(model.tied))
    parts += [_block(key, recompute, f"layers.{i}") for i in layers]
    if last:
        parts += [model.after, model.tiled_loss if tiled else model.loss]
        behind = (name for name in model.blocks if not name.startswith("layers."))
        parts += [_block(key, recompute, name) for name in behind]
    return together(parts)


@lru_cache(maxsize=1024)
def _stages(key: Key, recompute: str, cut: tuple[range, ...], *, tiled: bool) -> tuple[Work, ...]:
    known: dict[object, Work] = {}
    found = []
    for index, layers in enumerate(cut):
        ends = index == 0, index == len(cut) - 1
        kinds = (*(_model(key).blocks[f"layers.{i}"] for i in layers), *ends)
        if kinds not in known:
            first, last = ends
            known[kinds] = _stage(key, recompute, layers, first=first, last=last, tiled=tiled)
        found.append(known[kinds])
    return tuple(found)


@lru_cache(maxsize=64)
def _kernels(key: Key) -> dict[str, Kernels]:
    """Return the kernels of the parts of a model, with one layer of each kind."""

    def learn() -> StoredKernels:
        from hp_plan.costs import kernels  # noqa: PLC0415 - imports torch

        model, vocab_size, seq_len, dtype, tp, ep = key
        layers, sizes = sorted({*alike(model).values()}), {"tp": tp, "ep": ep}
        return StoredKernels.of(
            kernels.learn(model, vocab_size, layers, seq_len=seq_len, dtype=dtype, sizes=sizes)
        )

    return (learn() if key[0].is_own else cached(key, StoredKernels, learn)).kernels


@lru_cache(maxsize=1024)
def _stage_kernels(key: Key, recompute: str, cut: tuple[range, ...]) -> tuple[Kernels, ...]:
    learned, same = _kernels(key), alike(key[0])
    found = []
    for index, layers in enumerate(cut):
        names = [f"layers.{same[layer]}" for layer in layers]
        parts = [_block_kernels(learned, recompute, name) for name in names]
        if index == 0:
            parts.append(learned["before"])
        if index == len(cut) - 1:
            behind = (n for n in learned if n.startswith("mtp.") and n.endswith("block"))
            parts += [_block_kernels(learned, recompute, name) for name in behind]
            if "loss" in learned:  # else the stage returns logits, and "before" has the loss
                parts.append(learned["loss"])
        found.append(Kernels.of(parts))
    return tuple(found)


def _block_kernels(learned: dict[str, Kernels], recompute: str, name: str) -> Kernels:
    """Return the kernels of a block, with those that its backward runs again."""
    parts = {kind: learned[name + kind] for kind in _PARTS_OF_BLOCKS if name + kind in learned}
    again: Counter[Kernel] = Counter()
    for kind, part in parts.items():
        if recompute in ("full", _PARTS_OF_BLOCKS[kind]):
            again += part.forward
        elif recompute == "selective":
            again += Counter({k: n for k, n in part.forward.items() if k.kind not in _KEPT_KINDS})
    return Kernels.of(parts.values())._replace(again=again)


_KEPT_KINDS = ("attention", "grouped")
"""Kinds of kernels that "selective" does not run again."""

_PARTS_OF_BLOCKS = {
    "": "full",
    ".attend": "attention",
    ".feed": "feed_forward",
    ".dense": "feed_forward",
}
"""Value of `train.recompute` that runs each part of a block again."""


def model_flops(config: Config, *, vocab_size: int) -> float:
    """Return the operations of forward and backward per token; backward counts as two forwards.

    Args:
        config: Config of the run.
        vocab_size: Rows of the embedding.
    """
    return 3.0 * whole_model(config, vocab_size).flops
