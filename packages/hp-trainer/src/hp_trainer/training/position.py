"""Where a run stands, as its checkpoints tell it beside the tensors.

A checkpoint whose hashes fit may still be one that somebody wrote by hand, so nothing here is taken
as it comes: a type, a negative number or one that no run can reach is refused by name.
"""

from typing import Annotated

import msgspec

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import Loaded
from hp_trainer.config import LARGEST

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs to go on, besides tensors.

    Attributes:
        step: Updates done, those that were skipped included.
        next_sequence: Global index of the first sequence that was not read.
        skipped: Steps that changed nothing.
        skipped_in_a_row: Number of skipped steps in a row at the end.
        data: Digest of the tokens; None: not known, as the checkpoint was imported.
    """

    step: _Count
    next_sequence: _Count
    data: str | None
    skipped: _Count = 0
    skipped_in_a_row: _Count = 0

    @classmethod
    def of(cls, loaded: Loaded) -> "Position":
        """The position of a checkpoint.

        Raises:
            CheckpointError: Naming what is wrong with it.
        """
        try:
            position = msgspec.convert(loaded.extra, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{loaded.path}: extra: {error}") from None
        if problem := position._problem(loaded.step):  # noqa: SLF001 - of this class
            raise CheckpointError(f"{loaded.path}: extra: {problem}")
        return position

    def _problem(self, step: int) -> str:
        if self.step != step:
            return f"step ({self.step}) must equal that of the manifest ({step})"
        if self.skipped > self.step:
            return f"skipped ({self.skipped}) must be at most step ({self.step})"
        if self.skipped_in_a_row > self.skipped:
            return (
                f"skipped_in_a_row ({self.skipped_in_a_row}) must be at most skipped "
                f"({self.skipped})"
            )
        most = self.step * LARGEST
        if self.next_sequence > most:
            return (
                f"next_sequence ({self.next_sequence}) must be at most what {self.step} steps can "
                f"read ({most})"
            )
        return ""
