"""Scripts of torchtitan and Megatron in more layouts, each beside itself in one process."""

import os
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count, product
from pathlib import Path

from integration_tests.jobs.search.cases import Job

_FOLDER = Path(__file__).parents[1] / "libraries"
_PORTS = count(23500)


def cases() -> Iterator[Job]:
    """Return layouts of torchtitan's Llama and of Megatron's GPT on two and four ranks."""
    for ranks, tp in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        yield _job("titan", ranks, "", f"--tp {tp}" if tp > 1 else "")
    clips = ("", "--clip 0.1", "--clip 0")
    for ranks, tp, clip in product((2, 4), (1, 2, 4), clips):
        for more in ("", "--distributed-optimizer"):
            for sequence in ("", "--sequence-parallel") if tp > 1 else ("",):
                if tp <= ranks:
                    yield _job("megatron", ranks, clip, f"--tp {tp} {sequence} {more}")


def _job(name: str, ranks: int, same: str, arguments: str) -> Job:
    told = " ".join([f"{ranks} ranks", *arguments.split(), *same.split()])
    return Job(
        f"{name} {told}",
        partial(_run, name, f"{same} {arguments}", next(_PORTS)),
        partial(_run, name, same, next(_PORTS)),
        f"{name}{same}",
        ranks,
        meets=False,
        start=name == "titan",
    )


def _run(name: str, arguments: str, port: int) -> None:
    os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"] = str(port), "localhost"
    script = _FOLDER / f"{name}_job.py"
    sys.path.insert(0, str(_FOLDER))
    sys.argv = [str(script), *arguments.split()]
    runpy.run_path(str(script), run_name="__main__")
