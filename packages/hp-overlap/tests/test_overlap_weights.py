"""Weight gradients that a pair puts off until its forward side waits for counts."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_overlap import CommComputeOverlap, HookCoordinator
from hp_platform import linear


class Dispatcher:
    """Rows stay where they are; `prepare` is in two parts, between which counts would travel."""

    def __init__(self) -> None:
        self.between: list[str] = []

    def start_prepare(self, x: Tensor) -> Tensor:
        self.between.append("started")
        return x

    def finish_prepare(self, started: Tensor) -> tuple[Tensor, None]:
        self.between.append("finished")
        return started, None

    def prepare(self, x: Tensor) -> tuple[Tensor, None]:
        return self.finish_prepare(self.start_prepare(x))

    def launch_dispatch(self, rows: Tensor, state: None) -> tuple[Tensor, None]:
        return rows + 0, state

    def launch_combine(self, y: Tensor, state: None) -> Tensor:
        del state
        return y + 0


class Chunk(nn.Module):
    """Layers whose experts are linears, of which some may be dense; notes whose gradient came."""

    def __init__(self, dispatcher: Any, num_layers: int, come: list[str], *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dispatcher = dispatcher
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            layer.weight.register_hook(partial(self._note, come, f"weight {index}"))

    @staticmethod
    def _note(come: list[str], name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # torch calls hooks of what is put off, too
            come.append(name)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(x)
            if self.dispatcher is None:
                x = linear(x, layer.weight, layer.bias)
                continue
            rows, state = self.dispatcher.prepare(x)
            rows, state = self.dispatcher.launch_dispatch(rows, state)
            x = self.dispatcher.launch_combine(linear(rows, layer.weight, layer.bias), state)
        return x


def pair(
    *,
    puts_off: bool,
    overlapped: bool = True,
    dense: bool = False,
    layers: tuple[int, int] = (3, 3),
) -> tuple[list[Tensor], list[str], list[str]]:
    """Gradients, the order in which weights got theirs and counts were read, and the trace."""
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), puts_off_weight_gradients=puts_off)
    plain, came = Dispatcher(), list[str]()
    plain.between = came
    backward = Chunk(overlap.wrap_dispatcher(Dispatcher()), layers[1], came, seed=1)
    forward = Chunk(None if dense else overlap.wrap_dispatcher(plain), layers[0], [], seed=2)
    x0, x1 = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    loss = backward(x0).square().sum()
    came.clear()
    outputs: list[Tensor] = []
    run: Callable[[], object] = lambda: outputs.append(forward(x1))  # noqa: E731
    if overlapped:
        overlap.run(run, loss.backward)
    else:
        loss.backward()
        run()
    gradients = [p.grad for p in backward.parameters() if p.grad is not None]
    assert len(gradients) == 2 * layers[1]
    return [outputs[0].detach(), *gradients], came, [entry.section for entry in overlap.trace]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("layers", [(3, 3), (1, 4), (4, 1)])
def test_gradients_have_the_bits_of_one_after_the_other(
    layers: tuple[int, int], dense: bool
) -> None:
    expected, _, _ = pair(puts_off=False, overlapped=False, dense=dense, layers=layers)
    actual, _, _ = pair(puts_off=True, dense=dense, layers=layers)
    assert all(map(torch.equal, actual, expected))


def test_a_layer_s_weights_get_theirs_while_the_next_counts_travel() -> None:
    _, came, trace = pair(puts_off=True)
    # Layer 2 is the first of the backward: its weight waits for the counts of the second layer.
    started = [index for index, what in enumerate(came) if what == "started"]
    finished = [index for index, what in enumerate(came) if what == "finished"]
    assert started[1] < came.index("weight 2") < finished[1]
    assert started[2] < came.index("weight 1") < finished[2]
    assert came.index("weight 0") > finished[2]
    assert trace.count("weight gradients") == 3


def test_they_are_not_put_off_unless_asked_for() -> None:
    _, came, _ = pair(puts_off=False)
    started = [index for index, what in enumerate(came) if what == "started"]
    assert came.index("weight 2") < started[1]


def test_beside_a_dense_forward_those_of_one_layer_are_kept_at_most() -> None:
    kept: list[int] = []
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), puts_off_weight_gradients=True)
    came: list[str] = []
    backward = Chunk(overlap.wrap_dispatcher(Dispatcher()), 5, came, seed=1)
    loss = backward(torch.randn(4, 8, requires_grad=True)).square().sum()
    meet = overlap.coordinator.hook

    def hook(direction: Any, name: Any) -> None:
        if (direction, name) == ("backward", "A"):
            kept.append(len(kept) + 1 - len(came))
        meet(direction, name)

    overlap.coordinator.hook = hook  # type: ignore[method-assign]
    overlap.run(lambda: None, loss.backward)
    assert len(kept) == 5
    assert kept == [1] * 5
    assert len(came) == 5


def test_a_weight_gradient_that_fails_ends_the_pair() -> None:
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), puts_off_weight_gradients=True)
    chunk = Chunk(overlap.wrap_dispatcher(Dispatcher()), 2, [], seed=1)
    forward = Chunk(overlap.wrap_dispatcher(Dispatcher()), 2, [], seed=2)

    def fail(gradient: Tensor | None) -> None:
        if gradient is not None:
            raise ArithmeticError("of weight 1")

    chunk.layers[1].weight.register_hook(fail)  # type: ignore[operator]
    loss = chunk(torch.randn(4, 8)).square().sum()
    with pytest.raises(ArithmeticError, match="of weight 1") as raised:
        overlap.run(lambda: forward(torch.randn(4, 8)), loss.backward)
    assert any("forward side" in note for note in raised.value.__notes__)
    assert not [t for t in threading.enumerate() if t.name == "hp-overlap-backward"]
    # Nothing is left of what was put off.
    overlap.run(lambda: forward(torch.randn(4, 8)), forward(torch.randn(4, 8)).sum().backward)
