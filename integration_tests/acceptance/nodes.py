r"""Layouts over several machines: torchrun starts the kit once on each of them.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m integration_tests.acceptance --out SHARED/FOLDER

The kits agree on each layout, and each starts torchrun again for the ranks of its machine, so that
a layout that crashes or hangs ends no other. `--out` must be a folder that all machines see.
"""

import os
import socket
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hp_base.command_line import say
from hp_base.errors import ConfigError, DifferenceError
from hp_base.session import last_lines, status_of
from hp_platform import Runtime, all_gather_json, initialize, shutdown
from hp_trainer.config.options import resolve
from integration_tests.acceptance import process
from integration_tests.acceptance.cases import Case, Place, cases_over, chosen, slug
from integration_tests.acceptance.outcome import BAD, Found, Outcome
from integration_tests.acceptance.page import write_result

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def main(options: Namespace) -> int:
    """Run the layouts over several machines as the kit of one of them.

    Args:
        options: Parsed flags of the command.

    Returns:
        0: all passed. 8: some did not.
    """
    runtime = initialize(device_type="cpu", timeout=timedelta(minutes=options.minutes + 30))
    try:
        return _Nodes(runtime, options).run()
    finally:
        shutdown()


class _Nodes:
    """The kits of all machines, as one of them sees it."""

    def __init__(self, runtime: Runtime, options: Namespace) -> None:
        info = runtime.info
        if info.local_world_size != 1 or info.world_size < 2:
            raise ConfigError(
                f"torchrun must start one kit (--nproc-per-node 1, not {info.local_world_size}) on "
                "each of at least two machines"
            )
        self._runtime, self._node, self._num_nodes = runtime, info.rank, info.world_size
        self._options = options
        self._deadline = time.monotonic() + options.minutes * 60
        self._out = Path(options.out) / "nodes"
        self._work = self._out.resolve() / "work"

    def run(self) -> int:
        self._work.mkdir(parents=True, exist_ok=True)
        machine, who = self._work / f"machine-{self._node}", f"node {self._node}"
        figures = process.look(self._work, machine, self._options, who=who, env=_environment())
        place = msgspec.convert(figures["place"], type=Place)
        each = min(self._told(max(1, place.num_gpus)))  # on a CPU one rank
        total = self._num_nodes * each
        place = replace(place, num_gpus=total if place.num_gpus else 0)
        outcomes = []
        for case in chosen(cases_over(self._num_nodes, each), self._options.only, quick=False):
            outcomes.append(self._outcome(case, place, each))
            if self._node == 0:
                write_result(self._out, figures["facts"], outcomes)
                last = outcomes[-1]
                say(f"{last.status:<10}{last.name}: {last.summary}")
        return DifferenceError.exit_code if any(o.status in BAD for o in outcomes) else 0

    def _outcome(self, case: Case, place: Place, each: int) -> Outcome:
        began = time.monotonic()
        seconds = min(case.seconds, self._deadline - began)
        config = ""
        found = Found(status="not run", summary="the minutes were up")
        if self._node == 0 and seconds > 0:
            found = self._do("request", case, place, seconds=seconds)
            config = found.figures.get("config", "")
        # The first node decides for all.
        mine, group = (config, _free_port(), seconds), self._runtime.control
        config, port, seconds = all_gather_json(mine, of=tuple[str, int, float], group=group)[0]
        if config:
            statuses = self._told(self._ranks(case, config, each, port=port, seconds=seconds))
            if self._node == 0:
                found = self._do("compare", case, place, seconds=case.seconds)
                if any(statuses):
                    texts = ", ".join(f"node {n}: {s}" for n, s in enumerate(statuses) if s)
                    found = Found(status="error", summary=f"ranks ended with a status: {texts}")
        log = last_lines(self._folder(case) / process.LOG) if found.status in BAD else ""
        found = replace(found, figures={k: v for k, v in found.figures.items() if k != "config"})
        return Outcome.of(case, found, seconds=time.monotonic() - began, log=log)

    def _do(self, work: str, case: Case, place: Place, *, seconds: float) -> Found:
        task = {"work": str(self._work), "case": asdict(case) | {"work": work}, "place": place}
        folder = self._work / "cases" / f"{slug(case.name)}-{work}"
        return process.run(task, folder, seconds=seconds, env=_environment())

    def _ranks(self, case: Case, config: str, each: int, *, port: int, seconds: float) -> int:
        """Run the ranks of this machine; returns torchrun's exit status, -1 where it took long."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"),
            *("--nnodes", str(self._num_nodes), "--node-rank", str(self._node)),
            *("--nproc-per-node", str(each), "--master-port", str(port)),
            *("--master-addr", os.environ["MASTER_ADDR"], "-m", __name__, config),
        ]
        folder = self._folder(case)
        folder.mkdir(parents=True, exist_ok=True)
        status = status_of(
            command,
            folder / process.LOG,
            seconds=seconds,
            env=process.checking(folder) | _environment(),
        )
        return -1 if status is None else status

    def _folder(self, case: Case) -> Path:
        return self._work / "cases" / f"{slug(case.name)}-node-{self._node}"

    def _told(self, number: int) -> list[int]:
        """What each node has to say."""
        return all_gather_json(number, of=int, group=self._runtime.control)


def _environment() -> dict[str, str]:
    """Variables of this process without those by which torchrun placed it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_OF_TORCHRUN)}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def be_rank(config: str) -> int:
    """Be one rank of a layout: record what it computes."""
    from hp_train.verify.rank import ENTRY  # noqa: PLC0415 - of ranks alone
    from hp_trainer.launch import external  # noqa: PLC0415 - of ranks alone

    return external.run(resolve(config), entry=ENTRY)


if __name__ == "__main__":
    sys.exit(be_rank(sys.argv[1]))
