"""`hp train` in which one rank gets stuck.

python -m integration_tests.reliability.stuck_job RANK train ...
"""

import os
import sys
import time
from typing import Any

import torch.distributed as dist

from hp_train.cli import main
from hp_trainer.training.optimizer import Update


def get_stuck(self: Update, *args: Any, **kwargs: Any) -> None:
    """Take the place of the third update of one rank."""
    calls.append(None)
    if len(calls) == 3 and dist.get_rank() == int(sys.argv[1]):
        time.sleep(3600)
    apply(self, *args, **kwargs)


calls: list[None] = []
apply = Update.apply
if __name__ == "__main__":
    Update.apply = get_stuck  # type: ignore[method-assign]
    os._exit(main(sys.argv[2:]))
