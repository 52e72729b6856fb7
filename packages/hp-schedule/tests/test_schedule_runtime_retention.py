"""RECOMPUTE, OFFLOAD and RELOAD on torch: the same bits, in less memory."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_platform import linear
from hp_platform.testing import LiveBytes, RankError, run_distributed
from hp_schedule import (
    Schedule,
    add_offload,
    add_recompute,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    pair_overlap,
    zbv,
    zero_bubble,
)
from hp_schedule.runtime import (
    GraphCuttingSplitter,
    PipelineStage,
    TensorSpec,
    from_schedule,
)

CPU = torch.device("cpu")
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


Found = tuple[list[Tensor], dict[str, Tensor]]


def run(
    schedule: Schedule,
    make: Callable[[int], nn.Module] = Layer,
    *,
    specs: bool = False,
    **options: Any,
) -> Found:
    """Run this rank's part twice; return losses and accumulated gradients."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    spec = TensorSpec((ROWS, WIDTH)) if specs else None
    stages = [
        PipelineStage(
            make(index),
            stage_index=index,
            num_stages=schedule.num_stages,
            device=CPU,
            input_spec=spec if index else None,
            **options,
        )
        for index in schedule.stages_of(rank)
    ]
    runtime = from_schedule(schedule, stages, loss_fn=loss_fn)
    num = schedule.num_microbatches
    generator = torch.Generator().manual_seed(7)
    xs = torch.randn(num, ROWS, WIDTH, generator=generator)
    kwargs = [{"shift": torch.full((WIDTH,), 0.1 * index)} for index in range(num)]
    losses = []
    for _ in range(2):
        result = runtime.run_microbatches([(x,) for x in xs], kwargs, list(xs.flip(0)))
        losses += result.losses
    grads = {
        f"{stage.stage_index}.{name}": parameter.grad
        for stage in stages
        for name, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }
    assert len(grads) == 2 * len(stages)
    return losses, grads


def same(found: Found, expected: Found) -> bool:
    assert found[1].keys() == expected[1].keys()
    pairs = [*zip(found[0], expected[0], strict=True)]
    pairs += [(found[1][name], expected[1][name]) for name in expected[1]]
    return all(torch.equal(one, other) for one, other in pairs)


def choices(schedule: Schedule, seed: int) -> list[Schedule]:
    """Everything run again, everything copied away, and a choice for each."""
    rng = random.Random(seed)
    places = [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
    rng.shuffle(places)
    third = len(places) // 3
    mixed = add_offload(schedule, places[:third], ahead=rng.randrange(3))
    return [
        add_recompute(schedule),
        add_offload(schedule, places),
        add_recompute(mixed, places[third : 2 * third]),
    ]


SCHEDULES = {
    "gpipe": gpipe(2, num_microbatches=3),
    "1f1b": one_f_one_b(2, num_microbatches=4),
    "interleaved": interleaved_1f1b(2, num_microbatches=4),
    "zero_bubble": zero_bubble(2, num_microbatches=4),
    "interleaved_zero_bubble": interleaved_zero_bubble(2, num_microbatches=4),
    "zbv": zbv(2, num_microbatches=3),
    "dualpipe_v": dualpipe_v(2, num_microbatches=4),
    "pairs": pair_overlap(interleaved_1f1b(2, num_microbatches=4)),
}


def compared(name: str, specs: bool) -> list[bool]:
    schedule = SCHEDULES[name]
    expected = run(schedule, specs=specs)
    return [same(run(chosen, specs=specs), expected) for chosen in choices(schedule, len(name))]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("specs", [True, False], ids=["specs", "told"])
@pytest.mark.sample(
    "specs-gpipe", "told-1f1b", "specs-interleaved", "told-zero_bubble", "specs-dualpipe_v",
    "specs-pairs",
)  # fmt: skip
def test_all_choices_give_the_bits_of_none(name: str, specs: bool) -> None:
    assert run_distributed(compared, name, specs, world_size=2) == [[True] * 3] * 2


def test_a_cut_graph_and_blocks_that_run_again_inside_give_the_same_bits() -> None:
    class Inside(Layer):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, shift, use_reentrant=False)
            return y

    schedule = interleaved_1f1b(1, num_microbatches=4, num_stages_per_rank=2)
    expected = run(schedule)
    for chosen in choices(schedule, 1):
        assert same(run(chosen, Inside), expected)
    split = interleaved_zero_bubble(1, num_microbatches=4)
    expected = run(split, splitter=GraphCuttingSplitter())
    for chosen in choices(split, 2):
        assert same(run(chosen, splitter=GraphCuttingSplitter()), expected)


def test_forwards_run_as_often_as_the_schedule_says() -> None:
    modules = [Layer(0), Layer(1)]
    schedule = interleaved_1f1b(1, num_microbatches=4, num_stages_per_rank=2)
    run(add_recompute(schedule, [(0, 1), (0, 2), (1, 3)]), modules.__getitem__)
    assert [module.calls for module in modules] == [2 * (4 + 2), 2 * (4 + 1)]


def test_random_numbers_after_a_recompute_are_those_of_none() -> None:
    schedule = gpipe(1, num_microbatches=2)
    run(schedule)
    expected = torch.rand(3)
    run(add_recompute(schedule))
    assert torch.equal(torch.rand(3), expected)
    # Without the state of the generators a module that drops gets other numbers.
    again = run(add_recompute(schedule), preserve_rng_state=False)
    assert not same(again, run(schedule))


def test_both_runs_are_inside_contexts_that_belong_together() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def noted(word: str) -> Iterator[None]:
        log.append(word)
        yield
        log.append(f"end of {word}")

    made = iter(range(9))

    def contexts() -> tuple[Any, Any]:
        number = next(made)
        return noted(f"forward {number}"), noted(f"again {number}")

    schedule = add_recompute(gpipe(1, num_microbatches=2), [(0, 1)])
    run(schedule, context_fn=contexts)
    once = [f"{end}{word} {{}}" for word in ("forward", "again") for end in ("", "end of ")]
    assert log == [word.format(number) for number in (0, 1) for word in once]


def test_a_copy_on_a_cpu_is_real_and_what_was_copied_is_released() -> None:
    module = Layer(0, drop=0.0)
    stage = PipelineStage(module, stage_index=0, num_stages=1, device=CPU)
    x = torch.randn(256, WIDTH, requires_grad=True)
    with LiveBytes() as live:
        kept = stage.saved_tensors((x,))
        with kept.saving():
            y = stage.forward_one_chunk((x,), {})
        kept.stay([y])
        before = live.now
        copied = kept.offload()
        assert copied > 3 * x.nbytes
        assert live.now == before  # as much on the host as was released
        with pytest.raises(RuntimeError, match="must be brought back before its backward"):
            y.sum().backward(retain_graph=True)
        kept.reload()
        kept.wait()
        assert live.now == before
        y.sum().backward()
    mine = [p.grad for p in module.parameters()]
    other = Layer(0, drop=0.0)
    other(x.detach()).sum().backward()
    for grad, parameter in zip(mine, other.parameters(), strict=True):
        assert grad is not None
        assert parameter.grad is not None
        assert torch.equal(grad, parameter.grad)


def test_only_what_a_stage_says_is_moved() -> None:
    stage = PipelineStage(
        Layer(0, drop=0.0),
        stage_index=0,
        num_stages=1,
        device=CPU,
        is_offloaded=lambda x: x.shape[-1] == 2 * WIDTH,
    )
    x = torch.randn(4, WIDTH)
    kept = stage.saved_tensors((x,))
    with kept.saving():
        y = stage.forward_one_chunk((x,), {})
    # Both halves of the first product in one storage, the activated gate, their product.
    assert kept.offload() == (4 + 2 + 2) * WIDTH * 4 * 4
    assert y.requires_grad


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    class Writes(Layer):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            y = super().forward(x, shift)
            z = y * 2
            w: Tensor = z * self.down.sum()
            z.sin_()
            return w

    schedule = add_offload(gpipe(1, num_microbatches=3), [(0, 0)])
    with pytest.raises(RuntimeError, match="was changed in place"):
        run(schedule, Writes)


def failing() -> None:
    class Fails(Layer):
        seen: ClassVar[set[int]] = set()

        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            if x.data_ptr() in self.seen and dist.get_rank() == 1:
                raise ValueError("not twice")
            self.seen.add(x.data_ptr())
            return super().forward(x, shift)

    run(add_recompute(one_f_one_b(2, num_microbatches=4)), Fails)


def test_an_error_of_a_recompute_names_its_place_on_all_ranks() -> None:
    words = r"stage 1, microbatch 0: in step 1RECOMPUTE0"
    with pytest.raises(RankError, match=words) as caught:
        run_distributed(failing, world_size=2)
    assert "not twice" in str(caught.value)


def test_an_evaluation_keeps_nothing_anyway() -> None:
    schedule = add_offload(add_recompute(gpipe(1, num_microbatches=3), [(0, 0)]), [(0, 1)])
    module = Layer(0, drop=0.0)
    stage = PipelineStage(module, stage_index=0, num_stages=1, device=CPU)
    runtime = from_schedule(schedule, [stage], loss_fn=loss_fn)
    xs = torch.randn(6, ROWS, WIDTH)
    assert len(runtime.evaluate(xs, target=xs).losses) == 3
    assert module.calls == 3
