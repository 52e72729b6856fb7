"""RECOMPUTE and OFFLOAD on a GPU that is not there: device bytes fall as the simulator says."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from hp_dry import DryDevice, check_streams
from hp_platform import linear
from hp_schedule import Costs, Schedule, add_offload, add_recompute, fit_memory, gpipe, simulate
from hp_schedule.runtime import PipelineScheduleRuntime, PipelineStage

ROWS, WIDTH = 16, 8


class Layer(nn.Module):
    """Saves views, its output, a parameter of another shape, and drops at random."""

    scale: Tensor

    def __init__(self, seed: int, *, drop: float = 0.25) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH, generator=generator))
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, generator=generator) / 4)
        self.register_buffer("scale", torch.rand(WIDTH, generator=generator))
        self.drop = drop
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        self.calls += 1
        gate, up = linear(x, self.up).chunk(2, -1)
        hidden = nn.functional.dropout(nn.functional.silu(gate) * up, self.drop)
        y: Tensor = torch.tanh(hidden @ self.down) * self.scale + x
        return y if shift is None else y + shift


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def _live(schedule: Schedule, device: str) -> tuple[list[int], int]:
    """Return device bytes that are held at the start of each compute step, and the most."""
    held: list[int] = []
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(DryDevice())
        place = torch.device(device, 0)
        stage = PipelineStage(
            Layer(0, drop=0.0).to(place),
            stage_index=0,
            num_stages=1,
            device=place,
            preserve_rng_state=False,
        )
        runtime = PipelineScheduleRuntime(
            [stage],
            schedule,
            pipeline_rank=0,
            loss_fn=loss_fn,
            on_step=lambda _: held.append(gpu.storages.live_bytes),
        )
        num = schedule.num_microbatches
        xs = torch.randn(num, ROWS * 64, WIDTH, device=place)
        # Gradients are there, so that only what microbatches keep comes and goes.
        for parameter in stage.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        runtime.run_microbatches([(x,) for x in xs], None, list(xs))
        del runtime, stage
        assert check_streams(gpu.trace) == []
    return [value - held[0] for value in held], max(held) - held[0]


def test_bytes_on_a_gpu_fall_as_the_simulator_says() -> None:
    """By a dry run: what the real code asks for and gives back on CUDA."""
    schedule = gpipe(1, num_microbatches=5)
    plain, top = _live(schedule, "cuda")
    activation = plain[1]
    assert plain[:6] == [index * activation for index in range(6)]
    again, _ = _live(add_recompute(schedule), "cuda")
    small = again[1]  # the loss that a forward reports
    assert small <= 512
    assert again[:6] == [index * small for index in range(6)]
    away, _ = _live(add_offload(schedule, [(0, 1), (0, 2)], ahead=1), "cuda")
    steps = [str(step) for step in add_offload(schedule, [(0, 1), (0, 2)], ahead=1).steps[0]]
    third = steps.index("0F3")
    rest = away[third] - activation  # what two microbatches leave on the device
    assert rest < 0.45 * activation  # the output, in the graph
    costs = Costs(activation=float(activation), kept_input=float(small))
    for chosen in (schedule, add_recompute(schedule), add_recompute(schedule, [(0, 0), (0, 3)])):
        found, _ = _live(chosen, "cuda")
        planned = simulate(chosen, costs).peak_activations[0]
        assert max(found) == pytest.approx(planned, rel=0.02, abs=1024)
    moved = activation - rest / 2
    costs = Costs(activation=float(activation), offloaded=moved)
    for places in ([(0, 1), (0, 2)], [(0, 0), (0, 1), (0, 2)]):
        chosen = add_offload(schedule, places, ahead=0)
        found, _ = _live(chosen, "cuda")
        planned = simulate(chosen, costs).peak_activations[0]
        # A copy back is held at the start of the step behind it.
        assert max(found) == pytest.approx(planned, rel=0.02)
    assert top == max(plain)


def test_a_fitted_schedule_keeps_its_limit_on_a_gpu() -> None:
    schedule = gpipe(1, num_microbatches=6)
    activation = float(_live(schedule, "cuda")[0][1])
    limit = 3 * activation
    for ways in (("recompute",), ("offload",)):
        costs = Costs(activation=activation, offloaded=0.5 * activation)
        fit = fit_memory(schedule, costs, limit, ways=ways)
        if fit is not None:
            assert max(_live(fit.schedule, "cuda")[0]) <= limit * 1.02
    assert fit_memory(schedule, Costs(activation=activation), limit, ways=("recompute",))
