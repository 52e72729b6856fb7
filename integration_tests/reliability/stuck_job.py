"""`hp train` in which one rank gets stuck.

python -m integration_tests.reliability.stuck_job RANK train ...
"""

import os
import sys
import time
from typing import Any

from hp_train.cli import main
from hp_trainer.training.train import Trainer


def get_stuck(trainer: Trainer, *args: Any) -> None:
    """Take the place of the third update of one rank."""
    if trainer.step == 2 and trainer.mesh.rank == int(sys.argv[1]):
        time.sleep(3600)
    update(trainer, *args)


update = Trainer._update
if __name__ == "__main__":
    Trainer._update = get_stuck  # type: ignore[method-assign, assignment]
    os._exit(main(sys.argv[2:]))
