"""The training job on two machines: two network namespaces, torchrun in each, a cable between.

Needs root and the program `ip`. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hp_train.metrics import read_metrics

STEPS, SAVE_EVERY, KILL_AFTER = 80, 4, 10
ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_SECONDS, RESTART_SECONDS, RUN_SECONDS = 120.0, 90.0, 180.0
SETTINGS = (
    *("model.dim=32", "model.expert_hidden=32", "model.vocab_size=260", "data.seq_len=32"),
    *("train.global_batch_size=16", "train.microbatch_size=2", "train.sample_tokens=0"),
    *("train.eval_every=0", f"train.save_every={SAVE_EVERY}", f"train.steps={STEPS}"),
    *("launch.threads_per_process=1", "launch.init_timeout_seconds=120"),
)  # beside the quickstart's pp 2 x dp 2 with ep 2: a stage on each machine


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Two namespaces whose only way to each other is a cable; their processes end with them."""
    names = [f"hptrain{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(remove, name)
        first, second = names
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names


def remove(name: str) -> None:
    kill_all(name)
    ip("netns", "del", name)


def kill_all(name: str) -> None:
    """Kill every process of a namespace until there is none."""
    while pids := ip("netns", "pids", name).stdout.split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def torchrun(name: str, folder: Path, *, node: int) -> subprocess.Popen[bytes]:
    """Start the agent of one node and its two ranks; both nodes have the host name of this one."""
    command = [
        *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"),
        *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", ADDRESSES[node]),
        *("-m", "hp_train", "train", *SETTINGS),
        *(f"run.output_dir={folder}", "run.name=two"),
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def wait_for_step(metrics: Path, step: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not any(row["step"] >= step for row in read_metrics(metrics)):
        assert time.monotonic() < deadline, f"step {step} not reached in {seconds} s"
        time.sleep(0.02)


def curve(metrics: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(metrics)]


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need ip (iproute2)")
def test_two_nodes_train_as_one_and_survive_the_loss_of_one(tmp_path: Path) -> None:
    one = [sys.executable, "-m", "hp_train", "train", *SETTINGS]
    one += [f"run.output_dir={tmp_path}", "run.name=one"]
    subprocess.run(one, check=True, timeout=RUN_SECONDS, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "two" / "metrics.jsonl"
    with two_nodes() as (first, second):
        stays = torchrun(first, tmp_path, node=0)
        lost = torchrun(second, tmp_path, node=1)
        wait_for_step(metrics, KILL_AFTER, START_SECONDS)
        kill_all(second)
        lost.wait()
        replaced = torchrun(second, tmp_path, node=1)  # what a cluster does
        done = len(curve(metrics))
        assert done < STEPS
        wait_for_step(metrics, done + 1, RESTART_SECONDS)
        assert [stays.wait(RUN_SECONDS), replaced.wait(RUN_SECONDS)] == [0, 0]
    said = (tmp_path / f"{first}.log").read_text()
    assert said.count("resumed from") == 1, said
    assert curve(metrics) == curve(tmp_path / "one" / "metrics.jsonl")
