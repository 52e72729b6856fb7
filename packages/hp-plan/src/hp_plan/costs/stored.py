"""Costs in types that JSON has; equal parts are stored once. No torch."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from msgspec import Struct

from hp_plan.costs.work import BlockWork, Kernel, Kernels, ModelWork, Weight, Work
from hp_trainer.config import ModelConfig

Key = tuple[ModelConfig, int, int, str, int, int]
"""Everything that learned costs depend on: configuration of the model, vocabulary, sequence length
and dtype; if the model cuts itself, tensor-parallel ranks and min(2, expert-parallel ranks)."""


class StoredModel(Struct, frozen=True):
    """A `ModelWork` whose works are stored once each, and named by their index.

    Attributes:
        works: All works, each once.
        blocks: Indices of the three parts of each block.
        before: Index of `ModelWork.before` in `works`.
        after: Index of `ModelWork.after` in `works`.
        loss: Index of `ModelWork.loss`.
        tiled_loss: Index of `ModelWork.tiled_loss`.
        tied: `ModelWork.tied`.
    """

    works: tuple[Work, ...]
    blocks: dict[str, tuple[int, int, int]]
    before: int
    after: int
    loss: int
    tiled_loss: int
    tied: tuple[Weight, ...]

    def __post_init__(self) -> None:
        """Refuse indices out of range, as a file may have been changed."""
        named = (self.before, self.after, self.loss, self.tiled_loss, *chain(*self.blocks.values()))
        if not all(0 <= place < len(self.works) for place in named):
            raise ValueError(f"places must be below the number of works ({len(self.works)})")

    @classmethod
    def of(cls, model: ModelWork) -> "StoredModel":
        """Return the stored form of a model."""
        places: dict[Work, int] = {}

        def place(work: Work) -> int:
            return places.setdefault(work, len(places))

        blocks = {
            name: (place(block.attend), place(block.feed), place(block.rest))
            for name, block in model.blocks.items()
        }
        before, after, loss, tiled_loss = (
            place(work) for work in (model.before, model.after, model.loss, model.tiled_loss)
        )
        return cls(
            works=tuple(places),
            blocks=blocks,
            before=before,
            after=after,
            loss=loss,
            tiled_loss=tiled_loss,
            tied=model.tied,
        )

    @property
    def model(self) -> ModelWork:
        """Return the model in its usual form."""
        works = self.works
        return ModelWork(
            before=works[self.before],
            blocks={
                name: BlockWork(*(works[place] for place in block))
                for name, block in self.blocks.items()
            },
            after=works[self.after],
            loss=works[self.loss],
            tiled_loss=works[self.tiled_loss],
            tied=self.tied,
        )


_Counts = tuple[tuple[Kernel, int], ...]


class StoredKernels(Struct, frozen=True):
    """Kernels of parts by name: of forward, of backward, and those that run again.

    Attributes:
        parts: Kernels of each part, each with its number.
    """

    parts: dict[str, tuple[_Counts, _Counts, _Counts]]

    @classmethod
    def of(cls, kernels: Mapping[str, Kernels]) -> "StoredKernels":
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
