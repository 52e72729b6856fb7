"""What importing the training loop loads: nothing that only some runs, or no run, needs."""

import json
import subprocess
import sys

MOST_MODULES = 280
_PROGRAM = """
import json, sys
import hp_trainer.training.train
print(json.dumps([name for name in sys.modules if name.startswith("hp_")]))
"""


def test_the_training_loop_loads_few_modules_and_none_of_planner_or_verifier() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    assert len(modules) <= MOST_MODULES
    packages = {name.partition(".")[0] for name in modules}
    assert not packages & {"hp_dry", "hp_plan", "hp_packing", "hp_transformers", "hp_verify"}
    # Stages of unequal sizes, overlapped pairs and a search load when a run asks for them.
    rooms = {".".join(name.split(".")[:2]) for name in modules}
    assert not rooms & {"hp_vtp.transport", "hp_overlap.overlap", "hp_schedule.searching"}
