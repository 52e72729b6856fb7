"""Loading of a verified checkpoint: each rank reads the parts that it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_checkpoint.boxes import Part
from hp_checkpoint.checkpoint import Checkpoint, listed
from hp_checkpoint.collective import gathered, on_all_ranks, on_first_rank
from hp_checkpoint.save import parts_of
from hp_platform.failures.messages import as_form


def load(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, group: ProcessGroup | None
) -> None:
    """Fill the tensors of all ranks in place. Every rank of `group` calls.

    Args:
        checkpoint: Checkpoint to load, already verified.
        tensors: Tensors of this rank, by global name; see `parts_of`. The names of all ranks
            together must be those of the checkpoint, with the same dtypes and shapes.
        group: CPU group; None: this rank is alone.

    Raises:
        CheckpointError: On all ranks, if one failed; names it and its error.
        RuntimeError: If a rank is gone.
    """

    def fitting() -> dict[str, Part]:
        parts = parts_of(tensors)
        checkpoint.require_fit(parts)
        return parts

    parts = on_all_ranks(fitting, group=group)
    wanted = gathered(json.dumps(sorted(tensors)), of=str, group=group)

    def require_all() -> str:
        names = {name for text in wanted for name in as_form(list[str], json.loads(text))}
        if unexpected := checkpoint.manifest.tensors.keys() - names:
            raise CheckpointError(f"the checkpoint has {listed(unexpected)}, which no rank wants")
        return ""

    on_first_rank(require_all, of=str, group=group)
    on_all_ranks(lambda: checkpoint.fill(parts), group=group)
