"""Work of the stages of a pipeline. No torch, but to run the model once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from hp_base.dtypes import BYTES
from hp_plan.costs.kept import kept
from hp_plan.costs.stored import Key, StoredKernels, StoredModel
from hp_plan.costs.work import BlockWork, Kernel, Kernels, ModelWork, Work, alike, together
from hp_trainer.config import Config, ModelConfig
from hp_trainer.layout.schedules import layers_of_stages, placement
from hp_trainer.layout.vocabulary import logit_tile

T = TypeVar("T", StoredModel, StoredKernels)


def stage(config: Config, vocab_size: int, *, layers: range, first: bool, last: bool) -> Work:
    """A pipeline stage; names of parameters are those of the whole model."""
    key, tiled = _key(config, vocab_size), is_tiled(config, vocab_size)
    return _stage(key, config.train.recompute, layers, first=first, last=last, tiled=tiled)


def whole_model(config: Config, vocab_size: int) -> Work:
    """All of it in one stage."""
    return stage(config, vocab_size, layers=range(config.model.num_layers), first=True, last=True)


def stages(config: Config, vocab_size: int, *, num_stages: int) -> tuple[Work, ...]:
    """The stages of a pipeline; those with layers of the same kinds are one and the same.

    Names of their parameters are those of the first of them.
    """
    key, tiled = _key(config, vocab_size), is_tiled(config, vocab_size)
    layers = tuple(layers_of_stages(config, num_stages))
    return _stages(key, config.train.recompute, layers, tiled=tiled)


def kernels(config: Config, vocab_size: int, *, num_stages: int) -> tuple[Kernels, ...]:
    """Return what the stages of a pipeline have a GPU launch; see `hp_plan.costs.kernels`."""
    cut = tuple(layers_of_stages(config, num_stages))
    return _stage_kernels(_key(config, vocab_size), config.train.recompute, cut)


def require_stages(config: Config) -> None:
    """See whether a model can be cut into stages.

    Raises:
        hp_base.errors.ConfigError: When it cannot.
    """
    from hp_plan.costs import learning  # noqa: PLC0415 - imports torch

    learning.require_stages(config.model)


def is_tiled(config: Config, vocab_size: int) -> bool:
    """Say if a loss holds a tile of the logits at once, see `hp_trainer.layout.vocabulary`."""
    last = placement(config.pipeline, num_ranks=config.mesh.pp)[-1]
    tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
    cut = 1 if config.model.transformers else config.mesh.tp_sizes[last]
    rows = -(-vocab_size // cut)
    return logit_tile(tokens, rows, size=BYTES[config.train.dtype]) is not None


def kept_once(config: Config, *, tp: int, padded: float) -> float:
    """Bytes per token that the largest block keeps while backward computes it again.

    Args:
        config: Configuration of the run.
        tp: Ranks that share them.
        padded: Rows of a buffer for experts, by those that are routed.
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
    return _known(StoredModel, key).model


def _known(kind: type[T], key: Key) -> T:
    """Return what this run learns, or others have; a model of one's own is code that may change."""

    def learn() -> T:
        from hp_plan.costs.learning import learned  # noqa: PLC0415 - imports torch

        return learned(kind, key)

    return learn() if key[0].is_own else kept(key, kind, learn)


@lru_cache(maxsize=4096)  # thousands of layouts cut a model in few ways
def _block(key: Key, recompute: str, name: str) -> Work:
    """A block under its name, less what backward computes again."""
    block, model = _model(key).blocks[name], key[0]
    size = BYTES[key[3]]
    attend, feed, rest = block.attend, block.feed, block.rest
    # Backward stops to run a part again when it has what it needs: before a sum that ends the part.
    ends_in_sum = feed.summed > 0 and not model.is_own
    size *= key[4]  # see Note [Costs of a stage that cuts itself]
    if recompute == "full":
        # Dropout at the end of a layer needs what it drops from.
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
    """Elements per token that attention proper returns, and the products of experts."""
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
    """A part that runs again in backward: it keeps its input of width `dim` and nothing else."""
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
        kinds = (_kinds(key, layers), *ends)
        if kinds not in known:
            first, last = ends
            known[kinds] = _stage(key, recompute, layers, first=first, last=last, tiled=tiled)
        found.append(known[kinds])
    return tuple(found)


def _kinds(key: Key, layers: Sequence[int]) -> tuple[BlockWork, ...]:
    """Blocks that are equal are one kind."""
    return tuple(_model(key).blocks[f"layers.{index}"] for index in layers)


@lru_cache(maxsize=64)
def _learned(key: Key) -> tuple[dict[str, Kernels], dict[int, int]]:
    """Kernels of parts by name, and the layer that each one is like."""
    return _known(StoredKernels, key).kernels, alike(key[0])


@lru_cache(maxsize=1024)
def _stage_kernels(key: Key, recompute: str, cut: tuple[range, ...]) -> tuple[Kernels, ...]:
    learned, same = _learned(key)
    found = []
    for index, layers in enumerate(cut):
        names = [f"layers.{same[layer]}" for layer in layers]
        parts = [_block_kernels(learned, recompute, name) for name in names]
        if index == 0:
            parts.append(learned["before"])
        if index == len(cut) - 1:
            behind = (n for n in learned if n.startswith("mtp.") and n.endswith("block"))
            parts += [_block_kernels(learned, recompute, name) for name in behind]
            if "loss" in learned:  # of logits that a stage returns it is counted in front
                parts.append(learned["loss"])
        found.append(Kernels.of(parts))
    return tuple(found)


def _block_kernels(learned: dict[str, Kernels], recompute: str, name: str) -> Kernels:
    """A block with what its backward runs again."""
    parts = {kind: learned[name + kind] for kind in _PARTS_OF_BLOCKS if name + kind in learned}
    again: Counter[Kernel] = Counter()
    for kind, part in parts.items():
        if recompute in ("full", _PARTS_OF_BLOCKS[kind]):
            again += part.forward
        elif recompute == "selective":
            again += Counter({k: n for k, n in part.forward.items() if k.kind not in _KEPT_KINDS})
    return Kernels.of(parts.values())._replace(again=again)


_KEPT_KINDS = ("attention", "grouped")
"""Of kernels that "selective" does not run again."""

_PARTS_OF_BLOCKS = {
    "": "full",
    ".attend": "attention",
    ".feed": "feed_forward",
    ".dense": "feed_forward",
}
"""What `train.recompute` calls them."""


def model_flops(config: Config, *, vocab_size: int) -> float:
    """Return operations of forward and backward per token; backward is two forwards.

    Args:
        config: Config of the run.
        vocab_size: Rows of the embedding.
    """
    return 3.0 * whole_model(config, vocab_size).flops
