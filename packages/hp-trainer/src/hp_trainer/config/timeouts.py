"""Time-outs, where the config leaves them to the size of the job.

What grows with the ranks is counted: processes that start from one file system, the groups that
each of them joins one after the other, the shares of a checkpoint. `inductor` compiles in the first
step, and not on all ranks for as long.
"""

from typing import NamedTuple

from hp_trainer.config import Config

_COMPILE_SECONDS = 300.0


class Timeouts(NamedTuple):
    """In seconds.

    Attributes:
        init: Time for processes to start and find each other.
        step: Time for one collective or message between ranks.
        hang: Time without progress of any rank after which the run is ended.
    """

    init: float
    step: float
    hang: float

    @classmethod
    def of(cls, config: Config) -> "Timeouts":
        """Return those of the config, and for what is 0 there those of a job of its size."""
        launch, ranks = config.launch, config.world_size
        compiling = _COMPILE_SECONDS if config.train.compile == "inductor" else 0.0
        return cls(
            init=launch.init_timeout_seconds or 60.0 + ranks / 4,
            step=launch.step_timeout_seconds or 300.0 + ranks / 2 + compiling,
            hang=launch.hang_seconds or 120.0 + ranks / 2 + compiling,
        )
