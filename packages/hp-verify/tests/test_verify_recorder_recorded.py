"""What one process of a job writes down: launches, own gradients, evaluations, norms, closures."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_platform.testing import run_distributed
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, Step, join, numbers_of
from hp_verify.recording import parts
from hp_verify.recording.begin import begin
from hp_verify.recording.digests import digest_of
from hp_verify.recording.events import (
    CLIPPED,
    EVALUATION,
    FORWARD,
    GRADIENT,
    NORM,
    OWN,
    START,
    Log,
    Number,
    steps_in,
)
from hp_verify.recording.launches import Launches
from hp_verify.recording.notes import Notes
from hp_verify.recording.parts import keep_weights, read_weights
from hp_verify.recording.request import Focus, Request
from hp_verify.recording.second_run import SecondRunRecorder
from hp_verify.recording.values import Part, Whole, whole_of


def test_a_launch_goes_on_from_those_that_have_ended_alone(tmp_path: Path) -> None:
    living = Launches(tmp_path, 0)
    living.count(3)
    assert Launches(tmp_path, 1).steps == 0
    for number in (1, 2):  # as a process does when it ends
        (tmp_path / f"alive-0000{number}-1.count").write_text(f"{number:8d}")
    assert Launches(tmp_path, 2).steps == 2


def test_own_gradients_are_those_of_their_step(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for step in (1, 2):
        like = (2,), torch.float64
        notes.own(("w", ((0, 2),)), like).append(digest_of(step * values, ((0, 2),)))
        notes.flush(step)
    steps = join(tmp_path).steps
    norms = [steps[step].tensors[OWN]["w"].norm for step in (1, 2)]
    assert norms == pytest.approx([5**0.5, 20**0.5])


def test_a_step_is_whole_when_all_ranks_have_recorded_it() -> None:
    facts = [{"rank": str(rank), "ranks": "2"} for rank in range(2)]
    steps = {1: Step(updated={"a", "b"}), 2: Step(updated={"a"})}
    recording = Recording(steps, facts)
    assert recording.is_whole(1)
    assert not recording.is_whole(2)
    assert not recording.is_whole(3)


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        (24, [*range(1, 25)]),
        (25, [*range(1, 17), 18, 20, 22, 23, 24, 25]),
        (100, [*range(1, 17), 32, 48, 64, 80, 96, 98, 99, 100]),
        (5000, [*range(1, 17), *range(1024, 4998, 1024), 4998, 4999, 5000]),
    ],
    ids=str,
)
def test_of_a_long_job_the_first_steps_some_and_the_last_are_kept(
    made: int, kept: list[int], tmp_path: Path
) -> None:
    log = Log(tmp_path, "00000-1", Request(str(tmp_path)).wanted())
    most = 0
    for step in range(1, made + 1):
        log.add(Number(step, NORM, "", 1.0))
        log.flush()
        most = max(most, len(steps_in(tmp_path))) if step % 7 == 0 else most
    assert sorted(steps_in(tmp_path)) == kept
    assert most <= 16 + 8 + 3
    beside = Request("", reference=str(tmp_path)).wanted()
    assert [step for step in range(made + 9) if beside.has(step)] == [*kept, made + 1]
    assert beside.are_over(made + 2)
    first = Request("", reference=str(tmp_path), steps=20).wanted()
    assert first.has(20)
    assert (first.are_over(20), first.are_over(21)) == (False, True)
    around = Request("", reference=str(tmp_path), focus=Focus(64, NORM, "")).wanted()
    assert [step for step in range(100) if around.has(step)] == [63, 64]


@pytest.mark.parametrize(
    ("steps", "made", "over"),
    [
        ([1, 2, 3], 3, "3 steps"),
        ([1], 1, "1 step"),
        ([1, 2], 6, "steps 1-2 of 6"),
        ([1], 6, "step 1 of 6"),
        ([], 6, "step 0 of 6"),
        ([1, 2, 4, 6], 6, "steps 1-2 and 2 of 4 others, the last among them"),
        ([1, 2, 4], 6, "steps 1-2 and 1 of 4 others"),
    ],
)
def test_the_verdict_says_which_steps_of_how_many(steps: list[int], made: int, over: str) -> None:
    assert Comparison(steps=steps, num_made=made).over == over
    assert Comparison(steps=steps, num_made=made, is_cut=True).over.startswith(f"{over}, until")


def _recorded(folder: Path, job: Callable[[], None]) -> None:
    with closing(begin(Request(str(folder), steps=2))):
        job()


def record(folder: Path, job: Callable[[], None], *, ranks: int = 1) -> Recording:
    folder.mkdir()
    run_distributed(partial(_recorded, folder, job), world_size=ranks)
    return join(folder)


def train_and_evaluate() -> None:
    """Two steps, after the first of which the model and an average of its weights are called."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(torch.ones(4, 3) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step == 0:
            with torch.no_grad():
                model(torch.ones(1, 3))
                average(torch.ones(1, 3))


def test_what_is_evaluated_after_an_update_is_of_the_next_step(tmp_path: Path) -> None:
    steps = record(tmp_path / "job", train_and_evaluate).steps
    assert EVALUATION not in steps[1].tensors
    assert EVALUATION in steps[2].tensors


def test_a_model_that_is_first_called_after_an_update_has_no_first_weights(tmp_path: Path) -> None:
    steps = record(tmp_path / "job", train_and_evaluate).steps
    assert {*steps[1].tensors[START]} == {"weight", "bias"}
    assert START not in steps[2].tensors
    assert {"model2.weight", "model2.bias"} <= {*steps[2].tensors[EVALUATION]}


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        spectrum = torch.fft.rfft(x)
        return {"all": spectrum, "loudest": spectrum.abs().argmax(-1), "sum": spectrum.abs().sum()}


def train_a_spectrum() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Spectrum())
    model(torch.randn(2, 3))["sum"].backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_complex_outputs_are_compared_and_neither_indices_nor_sums(tmp_path: Path) -> None:
    (step, *_) = record(tmp_path / "job", train_a_spectrum).steps.values()
    names = {name for name in step.tensors[FORWARD] if name.startswith("1")}
    assert names == {"1:all"}
    assert not step.tensors[FORWARD]["1:all"].problem


def train_with_a_closure() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return float(loss)

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # of which an update makes nothing
    model(torch.ones(4, 3))
    optimizer.step(closure)


def test_gradients_that_a_closure_computes_are_not_read_before(tmp_path: Path) -> None:
    (step, *_) = record(tmp_path / "job", train_with_a_closure).steps.values()
    gradients = step.tensors.get(GRADIENT, {})
    assert all(gradient.norm > 0 for gradient in gradients.values())


def clip_shards() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    norm = torch.linalg.vector_norm(weight.grad)
    assert isinstance(norm, DTensor)
    assert norm.placements[0].is_partial()
    nn.utils.clip_grads_with_norm_([weight], 1.0, norm)
    optimizer.step()
    model(torch.ones(2, 4))


def test_a_norm_of_shards_is_that_of_all(tmp_path: Path) -> None:
    step = record(tmp_path / "job", clip_shards, ranks=2).steps[1]
    mine, theirs = numbers_of(step, NORM)
    assert mine == theirs
    assert mine == pytest.approx(step.tensors[GRADIENT]["weight"].norm, rel=1e-5)


def test_a_second_run_takes_a_limit_of_any_kind_of_number(tmp_path: Path) -> None:
    recorder = SecondRunRecorder(Request(str(tmp_path), focus=Focus(1, CLIPPED, "weight")))
    recorder._before_clipping([], np.float32(0.5))
    assert recorder._facts["max norm"] == 0.5


def test_of_replicas_of_first_weights_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, read = torch.arange(6.0).view(2, 3), list[int]()
    for rank in range(3):
        keep_weights(tmp_path, rank, 1, {"weight": weight})

    def counted(parts: Sequence[Part]) -> Whole:
        read.append(len(parts))
        return whole_of(parts)

    monkeypatch.setattr(parts, "whole_of", counted)
    assert torch.equal(read_weights(tmp_path)["weight"], weight)
    assert read == [1]
