"""All layouts that a config allows, where there are few."""

import itertools
from collections.abc import Iterator, Sequence

from hp_plan.layouts.space import Axis, Choice, enumerate_meshes, layouts_of_mesh
from hp_trainer.config import Config


def enumerate_layouts(
    config: Config, *, num_processes: range, axes: Sequence[Axis]
) -> Iterator[tuple[Choice, Config]]:
    """Yield every layout that the rules allow, in the order of the axes' values.

    Args:
        config: Everything else comes from it; allowed itself.
        num_processes: How many there may be.
        axes: Axes to vary, those of the mesh first.
    """
    rest = [axis for axis in axes if not axis.key.startswith("mesh.")]
    choices = list(itertools.product(*(axis.choices for axis in rest)))
    for sizes, placed in enumerate_meshes(config, num_processes=num_processes, axes=axes):
        for others, found in layouts_of_mesh(placed, axes=rest, choices=choices):
            yield (*sizes, *others), found
