"""Costs as JSON can have them: what stands in several places is written once. No torch."""

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from msgspec import Struct

from hp_plan.costs.work import BlockWork, Kernel, Kernels, ModelWork, Weight, Work
from hp_trainer.config import ModelConfig

Key = tuple[ModelConfig, int, int, str, int, int]
"""What a run of the model depends on: its configuration, vocabulary, sequence length and dtype;
and where it cuts itself, how many ranks share its matrices, and whether they share its experts: 2
where they do, whatever their number."""


class StoredModel(Struct, frozen=True):
    """A `ModelWork`: works are told apart by identity, so others name them by their places.

    Attributes:
        works: All of them, each once.
        blocks: Places of the three parts of each block.
        before: Place of that of `ModelWork`, as the three that follow.
        after: See there.
        loss: See there.
        tiled_loss: See there.
        tied: Those of `ModelWork`.
    """

    works: tuple[Work, ...]
    blocks: dict[str, tuple[int, int, int]]
    before: int
    after: int
    loss: int
    tiled_loss: int
    tied: tuple[Weight, ...]

    def __post_init__(self) -> None:
        """Refuse places where there is nothing: of a file that somebody has written into."""
        named = (self.before, self.after, self.loss, self.tiled_loss, *chain(*self.blocks.values()))
        if not all(0 <= place < len(self.works) for place in named):
            raise ValueError(f"places must be below the number of works ({len(self.works)})")

    @classmethod
    def of(cls, model: ModelWork) -> "StoredModel":
        """Of what was learned."""
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
        """Return what was learned."""
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
    """Kernels of parts by name: in forward, in backward, and what runs again.

    Attributes:
        parts: Each kernel with its number.
    """

    parts: dict[str, tuple[_Counts, _Counts, _Counts]]

    @classmethod
    def of(cls, kernels: Mapping[str, Kernels]) -> "StoredKernels":
        """Of what was learned."""
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
        """Return what was learned."""
        return {
            name: Kernels(*(Counter(dict(way)) for way in ways))
            for name, ways in self.parts.items()
        }
