"""The layout of a run over ranks: axes of the mesh, stages, schedules, groups, sequences."""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_trainer.layout.uneven import uneven_edges

__all__ = ["uneven_edges"]

__getattr__, __dir__ = lazily(__name__, {"uneven_edges": "hp_trainer.layout.uneven"})
