"""The training job on two machines: two network namespaces, torchrun in each, a cable between.

Needs root and the program `ip`. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks import namespaces as spaces
from benchmarks.namespaces import connect, namespaces, switch_on

from hp_base.folder import Folder
from hp_trainer.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("forked_programs")

STEPS = 4
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RUN_SECONDS = 180.0
SETTINGS = (
    *("model.dim=32", "model.expert_hidden=32", "model.vocab_size=260", "data.seq_len=32"),
    *("train.global_batch_size=8", "train.microbatch_size=2", "train.sample_tokens=0"),
    *("train.eval_every=0", f"train.steps={STEPS}"),
    *("launch.threads_per_process=1", "launch.init_timeout_seconds=120"),
)  # beside the quickstart's pp 2 x dp 2 with ep 2: a stage on each machine


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces whose only way to each other is a cable; their processes end with them."""
    names = [f"hptrain{os.getpid()}{end}" for end in "ab"]
    with namespaces(names):
        connect(names[0], "cable", to=names[1], end="cable")
        for name, address in zip(names, ADDRESSES, strict=True):
            switch_on(name, "cable", address=f"{address}/24")
        yield names


def torchrun(name: str, folder: Path, *, node: int) -> subprocess.Popen[bytes]:
    """Start the agent of one node and its two ranks; both nodes have the host name of this one."""
    inside = (spaces.__file__, name)  # each program goes there: those forked are not there yet
    command = [
        *(sys.executable, *inside, "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"),
        *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", ADDRESSES[node]),
        *(*inside, "hp_train", "train", *SETTINGS),
        *(f"run.output_dir={folder}", "run.name=two"),
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    rows = (row for _, row in read_metrics(Folder.open(run_dir)))
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need ip (iproute2)")
def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    one = [sys.executable, "-m", "hp_train", "train", *SETTINGS]
    one += [f"run.output_dir={tmp_path}", "run.name=one"]
    subprocess.run(one, check=True, timeout=RUN_SECONDS, stdout=subprocess.DEVNULL)
    with two_nodes() as names:
        agents = [torchrun(name, tmp_path, node=node) for node, name in enumerate(names)]
        assert [agent.wait(RUN_SECONDS) for agent in agents] == [0, 0]
    found = curve(tmp_path / "two")
    assert len(found) == STEPS
    assert found == curve(tmp_path / "one")
