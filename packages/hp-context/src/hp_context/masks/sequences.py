"""A mask for each sequence of a batch, for documents that are packed in another way in each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_context.masks import BlockKind, Both, Mask


@dataclass(frozen=True, slots=True)
class EachSequence(Mask):
    """A mask for each sequence of a batch, as `Documents` whose lengths differ are.

    `Causal() & EachSequence(documents)` limits the keys of every sequence by both.

    Args:
        masks: One for each sequence of the batch, in order.

    Raises:
        ValueError: There is none, or one of them is for a batch itself.

    Example:
        >>> mask = Causal() & EachSequence((Documents((5, 3)), Documents((8,))))
    """

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if not self.masks:
            raise ValueError(f"EachSequence masks ({self.masks}) must be one or more")
        if any(mask.of_batch for mask in self.masks):
            raise ValueError(f"EachSequence masks ({self.masks}) must be of one sequence each")

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`; [B, 1, ...] for a batch of B sequences and any head."""
        return torch.stack([mask.allowed(query, key) for mask in self.masks]).unsqueeze(1)

    def seen(self, query: range) -> range:
        """Return a run that holds the keys seen in any sequence; see `Mask.seen`."""
        seen = [mask.seen(query) for mask in self.masks]
        return range(min(keys.start for keys in seen), max(keys.stop for keys in seen))

    @property
    def causal(self) -> bool:
        """Tell whether all of them are."""
        return all(mask.causal for mask in self.masks)

    @property
    def of_batch(self) -> bool:
        """True."""
        return True

    def block(self, query: range, key: range) -> BlockKind:
        """Return the kind of a block in all sequences; PARTIAL where they differ."""
        kinds = {mask.block(query, key) for mask in self.masks}
        return kinds.pop() if len(kinds) == 1 else BlockKind.PARTIAL

    def check(self, seq_len: int) -> None:
        """Check all of them."""
        for mask in self.masks:
            mask.check(seq_len)


def of_sequences(mask: Mask, batch: int) -> tuple[Mask, ...]:
    """Return the mask of each sequence of a batch.

    Args:
        mask: For all of them, or with one for each.
        batch: Number of sequences.

    Raises:
        ValueError: The mask is for a batch of another size.
    """
    if isinstance(mask, Both) and mask.of_batch:
        parts = (of_sequences(mask.first, batch), of_sequences(mask.second, batch))
        return tuple(a & b for a, b in zip(*parts, strict=True))
    if not isinstance(mask, EachSequence):
        return (mask,) * batch
    if len(mask.masks) != batch:
        raise ValueError(
            f"EachSequence masks ({len(mask.masks)}) must be one for each sequence of q ({batch})"
        )
    return mask.masks
