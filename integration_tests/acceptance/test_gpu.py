"""On GPUs, what the acceptance kit leaves to a test: a run across devices.

Ranks take a GPU each; where there are fewer, several share one, through NCCL from 2.30 on and
through Gloo before. In fp64 only the order of sums differs: 1e-10. In fp32 a sum of 32 products of
numbers of size one differs in its last bits, and five steps of Adam carry that on: 1e-3.
"""

from pathlib import Path

import pytest
import torch

from hp_platform import backend_for
from integration_tests.layouts.test_layouts_agree import LAYOUTS
from integration_tests.reliability.test_train_command import TINY, finish, metrics_of, start
from integration_tests.runs import config_of, train_in, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUT = LAYOUTS["pp2-ep2-interleaved"]


def test_a_run_on_gpus_goes_on_from_its_checkpoint_on_one_cpu(tmp_path: Path) -> None:
    train = {"dtype": "float64", "steps": 4}
    expected = train_in(config_of(train=train), tmp_path / "cpu")
    saved = train_in(config_of(LAYOUT, train=train), tmp_path / "gpu", until=2, device="cuda")
    resumed = train_in(config_of(train=train), tmp_path / "gpu")
    assert saved.losses + resumed.losses == pytest.approx(expected.losses, rel=1e-10)
    again = train_in(config_of(LAYOUT, train=train), tmp_path / "gpu", until=4, device="cuda")
    assert again.losses == pytest.approx(resumed.losses, rel=1e-10)


def test_the_command_that_trains_on_a_cpu_trains_and_resumes_on_gpus(tmp_path: Path) -> None:
    corpus = {"data.paths": str(write_corpus(tmp_path))}
    runs: dict[str, Path] = {}
    for device in ("cpu", "cuda"):
        out = {"run.output_dir": str(tmp_path / device), "launch.device": device}
        sharers = -(-4 // torch.cuda.device_count())
        if backend_for(torch.device(device), ranks_per_device=sharers) == "gloo":
            out["launch.backend"] = "gloo"
        status, output = finish(start([], **TINY, **corpus, **out), timeout=300)
        assert status == 0, output
        assert f"4 processes on {device}" in output
        runs[device] = Path(output.splitlines()[-1])
    expected, actual = (metrics_of(runs[device]) for device in ("cpu", "cuda"))
    assert [row["loss"] for row in actual] == pytest.approx(
        [row["loss"] for row in expected], rel=1e-3
    )
    assert all(0 <= row["bubble"] < 1 and row["peak_memory_bytes"] > 0 for row in actual)
    steps = len(expected) + 2
    more = {"train.steps": steps}
    status, output = finish(start(["--resume", str(runs["cuda"])], **more), timeout=300)
    assert status == 0, output
    assert [row["step"] for row in metrics_of(runs["cuda"])] == list(range(1, steps + 1))
