"""`hp train` as a person meets it: a process, its output, its exit status, its files."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hp_trainer.launch.heartbeats import Heartbeats
from integration_tests.reliability.strangers import snapshot
from integration_tests.runs import write_corpus

pytestmark = pytest.mark.usefixtures("forked_programs")

TINY = {
    "launch.hang_seconds": 60,
    "mesh.pp": 2,
    "mesh.dp_replicate": 2,
    "mesh.ep": 2,
    "pipeline.stages_per_rank": 2,
    "model.dim": 32,
    "model.expert_hidden": 16,
    "model.num_experts": 4,
    "model.dropout": 0.1,
    "data.seq_len": 16,
    "data.eval_fraction": 0.2,
    "train.steps": 12,
    "train.global_batch_size": 8,
    "train.microbatch_size": 2,
    "train.warmup_steps": 2,
    "train.log_every": 1,
    "train.eval_every": 6,
    "train.eval_batches": 1,
    "train.save_every": 6,
    "train.sample_tokens": 4,
}


def start(
    arguments: Sequence[str], env: Mapping[str, str] = MappingProxyType({}), /, **settings: object
) -> subprocess.Popen[str]:
    keys = [f"--{key}={value}" for key, value in settings.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "hp_train", "train", *arguments, *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | env,
    )


def finish(process: subprocess.Popen[str], *, timeout: float = 120) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("runs")
    return TINY | {"data.paths": str(write_corpus(folder)), "run.output_dir": str(folder / "out")}


@pytest.fixture(scope="module")
def whole(tiny: dict[str, object]) -> tuple[Path, str]:
    """A run from beginning to end, and what it printed."""
    status, output = finish(start([], **tiny))
    assert status == 0, output
    return Path(output.splitlines()[-1]), output


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers_of(run: Path) -> list[tuple[float, ...]]:
    """What must be the same in every repetition of a run."""
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in metrics_of(run)]


def test_a_run_says_what_it_is_and_where_it_is_kept(whole: tuple[Path, str]) -> None:
    run, output = whole
    assert "pp 2 x dp_replicate 2 (ep 2)" in output
    assert "4 processes on" in output
    for step in range(1, 13):
        assert f"step {step:>5}  loss" in output
    assert "sample:" in output
    assert run.is_dir()


def test_a_run_leaves_metrics_pictures_and_a_checkpoint(whole: tuple[Path, str]) -> None:
    run, _ = whole
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    keys = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"}
    assert all(keys | {"peak_memory_bytes"} <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12]
    for name in ("config.toml", "loss.svg", "timeline.svg", "timeline.json"):
        assert (run / name).stat().st_size > 100, name
    trace = json.loads((run / "timeline.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
    assert names == {"planned", "actual"}
    assert (run / "checkpoints").is_dir()


def test_a_stopped_run_is_resumed_bit_exactly(
    tiny: dict[str, object], whole: tuple[Path, str]
) -> None:
    settings = tiny | {"run.name": "stopped", "train.save_every": 2}
    process = start([], **settings)
    metrics = Path(str(tiny["run.output_dir"])) / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 75, output
    assert "stopped on request after step" in output
    run = metrics.parent
    done = len(metrics_of(run))
    assert 2 <= done < 12
    status, output = finish(start(["--resume", str(run)]))
    assert status == 0, output
    assert f"resumed from {run}" in output
    assert numbers_of(run) == numbers_of(whole[0])


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_are_touched(
    tiny: dict[str, object],
) -> None:
    settings = tiny | {"train.learning_rate": "1e30", "train.max_grad_norm": 0}
    status, output = finish(start([], **settings))
    assert status == 6, output
    assert "not finite" in output


def test_text_that_cannot_be_read_ends_every_rank_with_one_line(
    tiny: dict[str, object], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": 1}\n')
    status, output = finish(start([], **tiny | {"data.paths": str(bad)}))
    assert status == 3, output
    assert "bad.jsonl:2" in output
    assert "Traceback" not in output


def test_torchrun_starts_the_same_run(tiny: dict[str, object], whole: tuple[Path, str]) -> None:
    settings = tiny | {"run.name": "torchrun", "launch.num_processes": 0}
    keys = [f"--{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    process = subprocess.Popen(
        [*command, "-m", "hp_train", "train", *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    status, output = finish(process)
    assert status == 0, output
    run = Path(str(tiny["run.output_dir"])) / "torchrun"
    assert numbers_of(run) == numbers_of(whole[0])


def test_a_finished_run_is_left_as_it_is(whole: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    before = snapshot(run)
    newest = Path("checkpoints", "step-00000012")
    said = f"nothing to do: all of train.steps (12) are in {newest}\n{run}\n"
    assert finish(start(["--resume", str(run)])) == (0, said)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    ranks = subprocess.run(
        [*command, "-m", "hp_train", "train", "--resume", str(run)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (ranks.returncode, ranks.stdout) == (0, said), ranks.stderr
    assert snapshot(run) == before
    with (run / newest / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    status, output = finish(start(["--resume", str(run)]))
    assert status == 0, output
    assert "skipped damaged checkpoint" in output
    assert numbers_of(run) == numbers_of(whole[0])


def test_more_steps_than_a_run_had_are_told_with_the_rate_and_the_last_one_is_printed(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "longer"
    shutil.copytree(whole[0], run)
    more = ["--train.steps", "14", "--train.log_every", "100", "--train.eval_every", "0"]
    status, output = finish(start(["--resume", str(run), *more]))
    assert status == 0, output
    before, now = (row["lr"] for row in metrics_of(run)[11:13])
    assert now > 1.3 * before
    assert f"note: the learning rate of step 13 is {now:.3g}, and would have been" in output
    assert "train.steps was 12, is 14; to go on with it: --train.learning_rate" in output
    assert "step    13  loss" not in output
    assert "step    14  loss" in output


def test_a_rank_of_torchrun_says_that_the_run_directory_is_gone(
    tiny: dict[str, object], tmp_path: Path
) -> None:
    one = dict.fromkeys(("mesh.pp", "mesh.dp_replicate", "mesh.ep"), 1)
    settings = tiny | one | {"run.output_dir": tmp_path, "run.name": "run", "train.steps": 100_000}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = start([], env, **settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    status, output = finish(process)
    assert status == 9, output
    assert f"the run directory ({tmp_path / 'run'}) is gone: it was removed or" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.sample
def test_tokenising_may_take_longer_than_any_time_out(
    tiny: dict[str, object], tmp_path: Path
) -> None:
    seconds, megabytes = 10, 100
    words = [f"{number * number:x}" for number in range(5000)]
    text = (" ".join(words) + "\n") * (megabytes * 10**6 // len(" ".join(words)))
    (tmp_path / "text.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    keys = {
        "data.paths": str(tmp_path / "text.txt"),
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "data.eval_fraction": 0.001,
        "data.cache_gib": 0,
        "launch.hang_seconds": seconds,
        "launch.step_timeout_seconds": seconds,
        "launch.max_restarts": 0,
        "run.name": "tokenises",
        "train.steps": 1,
    }
    status, output = finish(start([], **tiny | keys), timeout=1000)
    assert status == 0, output
    told = re.findall(r"tokenised (\d+) of 1\d\d MB, [\d.]+ MB/s, .* left", output)
    # A line every five seconds: longer than the time-outs.
    assert len(told) * 5 > seconds, output
    assert list(map(int, told)) == sorted(map(int, told))


def _at_work(process: subprocess.Popen[str], run: Path, *, steps: int) -> list[int]:
    """Process ids of the ranks, once they have done some steps."""
    deadline = time.monotonic() + 90
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        heartbeat = run / "heartbeat"
        if heartbeat.exists() and heartbeat.stat().st_size:
            slots = Heartbeats.attach(heartbeat, rank=0).slots()
            if all(slot.step >= steps for slot in slots):
                return [slot.pid for slot in slots]
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("signum", "status", "says"),
    [
        (signal.SIGKILL, 7, "rank 2 was lost at step"),
        (signal.SIGSTOP, 5, "rank 2 is stopped at step"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_job_and_is_named(
    tiny: dict[str, object], signum: signal.Signals, status: int, says: str
) -> None:
    name = signum.name.lower()
    process = start(
        [],
        **tiny
        | {
            "run.name": name,
            "launch.hang_seconds": 3,
            "launch.max_restarts": 0,
            "train.steps": 100_000,
        },
    )
    ranks = _at_work(process, Path(str(tiny["run.output_dir"])) / name, steps=2)
    os.kill(ranks[2], signum)
    began = time.monotonic()
    got, output = finish(process, timeout=200)
    assert got == status, output
    assert says in output
    assert time.monotonic() - began < 100  # 5 s on a quiet machine; 100,000 steps take hours
    for pid in ranks:
        assert not Path(f"/proc/{pid}").exists()
