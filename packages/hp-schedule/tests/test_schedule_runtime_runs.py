"""Runs one after the other, whole batches, evaluation, shared parameters and several chains.

All scenarios run in one group of two ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform.testing import run_distributed
from hp_schedule import MetaStep, MetaStepType, Schedule, interleaved_1f1b, one_f_one_b
from hp_schedule.runtime import (
    PipelineContext,
    PipelineResult,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SharedParameterInfo,
    from_schedule,
    share_parameters,
)
from hp_schedule.runtime.batch import concat_outputs, split_args, split_kwargs
from hp_schedule.runtime.runtime import forward_part

WORDS, WIDTH = 7, 4

Found = dict[str, Any]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        weight = torch.randn(WORDS, WIDTH, generator=generator).double()
        self.table.weight = nn.Parameter(weight)

    def forward(self, words: Tensor, offset: Tensor | None = None) -> Tensor:
        y: Tensor = self.table(words)
        return y if offset is None else y + offset


class Middle(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).double())

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        y = x + torch.tanh(x @ self.weight)
        return y if offset is None else y + offset


class Head(Embedding):
    """Logits by the embedding's table."""

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        return x @ self.table.weight.t() + (0 if offset is None else offset.sum())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def modules_of(num_stages: int) -> list[nn.Module]:
    return [Embedding(), *map(Middle, range(num_stages - 2)), Head()]


def stages_of(
    num_stages: int, indices: Sequence[int], modules: Mapping[int, nn.Module]
) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [
        PipelineStage(modules[index], stage_index=index, num_stages=num_stages, device=cpu)
        for index in indices
    ]


def words(size: int) -> Tensor:
    return torch.randint(WORDS, (size, 3), generator=torch.Generator().manual_seed(size))


def grads_of(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


class Pipeline:
    """Two stages per rank on two ranks, of any class, and what its modules have by now."""

    def __init__(self, make: Callable[..., PipelineSchedule], num: int, **options: Any) -> None:
        rank = dist.get_rank()
        all_modules = modules_of(4)
        self.modules = {stage: all_modules[stage] for stage in (rank, rank + 2)}
        self.stages = stages_of(4, list(self.modules), self.modules)
        self.runtime = make(self.stages, num, loss_fn=loss_fn, **options)

    def run(self, size: int, **kwargs: Any) -> PipelineResult:
        """Run a batch of words of the given size; its targets are the same words."""
        return self._call(self.runtime.run, size, **kwargs)

    def evaluate(self, size: int, **kwargs: Any) -> PipelineResult:
        return self._call(self.runtime.evaluate, size, **kwargs)

    def grads(self) -> dict[str, Tensor]:
        return grads_of(self.modules)

    def _call(
        self, call: Callable[..., PipelineResult], size: int, **kwargs: Any
    ) -> PipelineResult:
        args = (words(size),) if dist.get_rank() == 0 else ()
        target = words(size) if dist.get_rank() == 1 else None
        return call(*args, target=target, **kwargs)


def uneven_batch() -> Found:
    pipeline = Pipeline(ScheduleInterleaved1F1B, 4, return_outputs=True)
    offset = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None, None]
    result = pipeline.run(10, offset=offset)
    return {"grads": pipeline.grads(), "losses": result.losses, "output": result.output}


def repeated_and_scaled() -> Found:
    pipeline = Pipeline(ScheduleInterleaved1F1B, 4, loss_scale=0.25)
    losses = pipeline.run(8).losses
    pipeline.runtime.loss_scale = 0.5
    pipeline.run(8)
    return {"grads": pipeline.grads(), "losses": losses}


def evaluated_between() -> Found:
    pipeline = Pipeline(ScheduleInterleaved1F1B, 2)
    before = pipeline.evaluate(6)
    untouched = pipeline.grads()
    pipeline.run(6)
    result = pipeline.evaluate(4)
    pipeline.run(6)
    return {
        "untouched": untouched,
        "first": before.losses,
        "outputs": result.output,
        "requires_grad": [x.requires_grad for x in result.outputs],
        "grads": pipeline.grads(),
        "evaluated": [str(s.step) for s in pipeline.evaluate(4, record=True).timeline],
    }


def tied() -> Found:
    shared = [SharedParameterInfo({0: "table.weight", 3: "table.weight"})]
    rank = dist.get_rank()
    all_modules = modules_of(4)
    modules = {stage: all_modules[stage] for stage in (rank, rank + 2)}
    if rank == 1:
        with torch.no_grad():
            all_modules[3].table.weight.zero_()  # type: ignore[union-attr,operator]
    stages = stages_of(4, list(modules), modules)
    runtime = ScheduleInterleaved1F1B(stages, 3, loss_fn=loss_fn, shared_parameters=shared)
    args = (words(6),) if rank == 0 else ()
    for _ in range(2):
        runtime.run(*args, target=words(6))
    runtime.evaluate(*args, target=words(6))
    return {"grads": grads_of(modules)}


class Backwards(PipelineSchedule):
    """GPipe whose backwards go from the last microbatch to the first."""

    def construct_exec_order(self) -> list[list[MetaStep]]:
        def steps(kind: str, stage: int) -> list[MetaStep]:
            order = range(self.num_microbatches)
            return [
                MetaStep.from_str(f"{stage}{kind}{microbatch}")
                for microbatch in (order if kind == "F" else reversed(order))
            ]

        return [
            [*steps("F", rank), *steps("F", rank + 2), *steps("B", rank + 2), *steps("B", rank)]
            for rank in range(self.num_ranks)
        ]


def own_order() -> Found:
    pipeline = Pipeline(Backwards, 3)
    pipeline.run(6)
    return {"grads": pipeline.grads()}


def both_ways(num: int) -> Schedule:
    """Two chains over two ranks, one in each direction, forward and backward by turns."""
    rows = []
    for first, second in ((0, 3), (1, 2)):
        texts = [f"{s}F{m}" for m in range(num) for s in (first, second)]
        texts += [f"{s}B{m}" for m in range(num) for s in (first, second)]
        rows.append([MetaStep.from_str(text) for text in texts])
    return Schedule.from_steps(
        rows, stage_to_rank=[0, 1, 1, 0], num_microbatches=num, chains=[[0, 1], [2, 3]]
    )


def two_chains() -> Found:
    schedule = both_ways(2)
    all_modules = [Embedding(), Head(), Embedding(), Head()]
    modules = {s: all_modules[s] for s in schedule.stages_of(dist.get_rank())}
    runtime = from_schedule(schedule, stages_of(4, list(modules), modules), loss_fn=loss_fn)
    result = runtime.run(words(8), target=words(8))
    return {"grads": grads_of(modules), "losses": result.losses}


def overlapped_in_threads() -> Found:
    """Halves of overlaps run at the same time, on both ranks, with messages between them."""
    texts = (
        "0F0 0F1 (0B0;0F2)OVERLAP_B_F 0B1 0B2",
        "1F0 (1B0;1F1)OVERLAP_B_F (1B1;1F2)OVERLAP_B_F 1B2",
    )
    rows = [[MetaStep.from_str(word) for word in text.split()] for text in texts]
    schedule = Schedule.from_steps(rows, stage_to_rank=[0, 1], num_microbatches=3)
    rank = dist.get_rank()
    modules: dict[int, nn.Module] = {rank: [Embedding(), Head()][rank]}
    runtime = from_schedule(schedule, stages_of(2, [rank], modules), loss_fn=loss_fn)

    def together(step: MetaStep, context: PipelineContext) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(context.run, step.sub_steps))

    runtime.register_custom_function(MetaStepType.OVERLAP_B_F, together)
    args = (words(6),) if rank == 0 else ()
    for _ in range(5):
        runtime.run(*args, target=words(6))
    return {"grads": grads_of(modules)}


def own_loss() -> Found:
    """The last stage returns the loss; no loss function and no targets."""

    class Loss(Head):
        def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
            return super().forward(x, offset).square().sum()

    rank = dist.get_rank()
    modules: dict[int, nn.Module] = {rank: Embedding() if rank == 0 else Loss()}
    runtime = Schedule1F1B(stages_of(2, [rank], modules)[0], 2)
    result = runtime.run(*((words(4),) if rank == 0 else ()))
    return {"grads": grads_of(modules), "losses": result.losses}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        uneven_batch,
        repeated_and_scaled,
        evaluated_between,
        tied,
        own_order,
        two_chains,
        overlapped_in_threads,
        own_loss,
    )
}


def run_scenarios() -> dict[str, Found]:
    return {name: scenario() for name, scenario in SCENARIOS.items()}


@cache
def scenarios() -> list[dict[str, Found]]:
    return run_distributed(run_scenarios, world_size=2, timeout=60)


def found(scenario: Callable[[], Found]) -> list[Found]:
    return [ranks[scenario.__name__] for ranks in scenarios()]


def one_process(
    size: int,
    *,
    scale: float = 1.0,
    modules: Sequence[nn.Module] | None = None,
    offset: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return gradients, loss and output of a whole batch at once."""
    modules = modules_of(4) if modules is None else modules
    output: Any = words(size)
    for module in modules:
        output = module(output, offset)
    loss = loss_fn(output, words(size))
    torch.autograd.backward(loss * scale)
    return grads_of(dict(enumerate(modules))), loss.detach(), output.detach()


def assert_grads(ranks: Sequence[Found], expected: Mapping[str, Tensor]) -> None:
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    torch.testing.assert_close(grads, dict(expected), rtol=1e-12, atol=1e-12)


def test_a_batch_that_does_not_divide_is_cut_as_even_as_can_be() -> None:
    ranks = found(uneven_batch)
    offset = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None, None]
    grads, losses, outputs = {}, [], []
    modules = modules_of(4)
    for part, shift in zip(words(10).tensor_split(4), offset.tensor_split(4), strict=True):
        output: Any = part
        for module in modules:
            output = module(output, shift)
        loss = loss_fn(output, part)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        outputs.append(output.detach())
    grads = grads_of(dict(enumerate(modules)))
    assert_grads(ranks, grads)
    torch.testing.assert_close(ranks[1]["losses"], losses, rtol=1e-14, atol=0)
    torch.testing.assert_close(ranks[1]["output"], torch.cat(outputs), rtol=1e-14, atol=1e-14)
    assert ranks[0]["output"] is None


def test_scaled_losses_accumulate_over_runs_and_are_reported_as_they_are() -> None:
    ranks = found(repeated_and_scaled)
    grads, loss, _ = one_process(8, scale=0.75)
    assert_grads(ranks, grads)
    torch.testing.assert_close(sum(ranks[1]["losses"]), loss, rtol=1e-12, atol=0)


def test_evaluation_between_steps_touches_no_gradient() -> None:
    ranks = found(evaluated_between)
    grads, loss, _ = one_process(6, scale=2.0)
    assert_grads(ranks, grads)
    assert ranks[0]["untouched"] == ranks[1]["untouched"] == {}
    torch.testing.assert_close(sum(ranks[1]["first"]), loss, rtol=1e-12, atol=0)
    _, _, output = one_process(4)
    torch.testing.assert_close(ranks[1]["outputs"], output, rtol=1e-12, atol=1e-12)
    assert ranks[1]["requires_grad"] == [False, False]
    computed = [text for text in ranks[0]["evaluated"] if "RECV" not in text]
    assert sorted(computed) == ["0F0", "0F1", "2F0", "2F1"]


def test_tied_parameters_are_one_in_value_and_gradient_over_several_runs() -> None:
    ranks = found(tied)
    modules = modules_of(4)
    modules[3].table.weight = modules[0].table.weight  # type: ignore[union-attr]
    for _ in range(2):
        one_process(6, modules=modules)
    expected = grads_of({stage: modules[stage] for stage in range(4)})
    assert_grads(ranks, expected)
    same = ranks[0]["grads"]["0.table.weight"], ranks[1]["grads"]["3.table.weight"]
    torch.testing.assert_close(*same, rtol=0, atol=0)


def test_a_subclass_gives_the_order_and_nothing_else() -> None:
    assert_grads(found(own_order), one_process(6)[0])


def test_chains_in_both_directions_share_the_ranks_and_each_has_its_losses() -> None:
    ranks = found(two_chains)
    expected: dict[str, Tensor] = {}
    losses = []
    for chain, part in enumerate(words(8).chunk(2)):
        modules = {2 * chain: Embedding(), 2 * chain + 1: Head()}
        for microbatch in part.chunk(2):
            output: Any = microbatch
            for module in modules.values():
                output = module(output)
            loss = loss_fn(output, microbatch)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        expected |= grads_of(modules)
    assert_grads(ranks, expected)
    torch.testing.assert_close(ranks[1]["losses"], losses[:2], rtol=1e-12, atol=0)
    torch.testing.assert_close(ranks[0]["losses"], losses[2:], rtol=1e-12, atol=0)


def test_halves_of_an_overlap_may_run_in_threads_on_every_rank() -> None:
    assert_grads(
        found(overlapped_in_threads),
        one_process(6, scale=5.0, modules=[Embedding(), Head()])[0],
    )


def test_without_a_loss_function_the_last_stage_returns_the_loss() -> None:
    ranks = found(own_loss)
    modules = {0: Embedding(), 1: Head()}
    loss = modules[1](modules[0](words(4))).square().sum()
    torch.autograd.backward(loss)
    assert_grads(ranks, grads_of(modules))
    torch.testing.assert_close(sum(ranks[1]["losses"]), loss.detach(), rtol=1e-12, atol=0)


def test_parameters_shared_on_one_rank_are_one_object() -> None:
    modules: dict[int, nn.Module] = dict(enumerate(modules_of(3)))
    stages = stages_of(3, [0, 1, 2], modules)
    schedule = interleaved_1f1b(1, num_microbatches=2, num_stages_per_rank=3)
    infos = [SharedParameterInfo({0: "table.weight", 2: "table.weight"})]
    share_parameters(infos, stages, schedule=schedule)
    assert modules[0].get_parameter("table.weight") is modules[2].get_parameter("table.weight")
    with pytest.raises(ValueError, match=r"stages \(\[0, 3\]\) of a shared parameter"):
        share_parameters([SharedParameterInfo({0: "a", 3: "b"})], stages, schedule=schedule)
    with pytest.raises(ValueError, match=r"shape \(\[4, 4\]\) of weight of stage 1"):
        share_parameters(
            [SharedParameterInfo({0: "table.weight", 1: "weight"})], stages, schedule=schedule
        )


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    modules: dict[int, nn.Module] = {0: Embedding()}
    runtime = from_schedule(one_f_one_b(1, num_microbatches=1), stages_of(1, [0], modules))
    with pytest.raises(ValueError, match=r"loss \(\[2, 3, 4\]\) must be a scalar"):
        runtime.run(words(2))


def test_a_given_schedule_must_fit_the_pipeline() -> None:
    modules: dict[int, nn.Module] = {0: Embedding()}
    with pytest.raises(ValueError, match=r"num_ranks \(2\) of the schedule must equal"):
        from_schedule(one_f_one_b(2, num_microbatches=1), stages_of(2, [0], modules))
    with pytest.raises(ValueError, match=r"len\(stages\) \(0\) must be >= 1"):
        from_schedule(one_f_one_b(1, num_microbatches=1), [])
    with pytest.raises(ValueError, match=r"pipelines \(\[\[1\]\]\) must contain rank 0"):
        Schedule1F1B(stages_of(1, [0], modules), 1, pipelines=[[1]])


def test_batches_are_cut_along_their_dims_and_put_together_again() -> None:
    x, y = torch.arange(10).reshape(5, 2), torch.arange(6).reshape(2, 3)
    parts = split_args([x, y, "name", (x, [y, None])], 2, dims=[0, 1, 0, None])
    assert [part[0].tolist() for part in parts] == [x[:3].tolist(), x[3:].tolist()]
    assert [part[1].shape for part in parts] == [(2, 2), (2, 1)]
    assert all(part[2] == "name" and part[3][0] is x for part in parts)
    nested = split_kwargs({"a": {"x": x, "n": 3}, "b": [x], "whole": x}, 5, dims={"whole": None})
    assert [part["a"]["n"] for part in nested] == [3] * 5
    assert all(part["whole"] is x for part in nested)
    assert torch.equal(concat_outputs([part["b"][0] for part in nested]), x)
    assert torch.equal(concat_outputs([{"x": part["a"]["x"]} for part in nested])["x"], x)
    with pytest.raises(ValueError, match=r"size \(2\) of argument 0 along dim 0 must be >="):
        split_args([y], 3)
    with pytest.raises(ValueError, match=r"len\(args_batch_dim\) \(1\) must equal len\(args\)"):
        split_args([x, y], 2, dims=[0])
    with pytest.raises(ValueError, match=r"batch dim \(0\) of argument s must be a dim of \[\]"):
        split_kwargs({"s": torch.tensor(1)}, 2)


def test_the_forward_part_gathers_parameters_where_a_forward_needs_them() -> None:
    text = (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD (0F1;0B0)OVERLAP_F_B 0RESHARD 0UNSHARD 0B1 0RESHARD "
        "0REDUCE_GRAD"
    )
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(word) for word in text.split()]], stage_to_rank=[0], num_microbatches=2
    )
    row = forward_part(schedule).steps[0]
    assert " ".join(map(str, row)) == "0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0RESHARD"
