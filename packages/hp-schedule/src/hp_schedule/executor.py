"""The one loop that runs a schedule, whatever the machine behind it.

The torch runtime, the simulator and the tests' tracer drive this loop: they say what a forward or
a send is; the order in which things happen is here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hp_schedule.schedule import DeadlockError, Row
from hp_schedule.steps import (
    FIRST_OVERLAP,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    TYPES,
    MetaStep,
    MetaStepType,
    halves,
    unpack,
)

Handler = Callable[[MetaStep], None]
"""Takes the place of a driver's own execution of a step."""


class Driver(Protocol):
    """One rank's machine. Steps of a rank start in the order of its row."""

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        """Tell whether the step may start; False hands control back to the caller of `advance`.

        A driver that can wait inside its steps, as a real machine can, always says True.
        """

    def forward(self, stage_index: int, microbatch_index: int) -> None:
        """Run a forward on the input that was received or handed over."""

    def backward(self, stage_index: int, microbatch_index: int) -> None:
        """Run the whole backward."""

    def backward_input(self, stage_index: int, microbatch_index: int) -> None:
        """Run the part of the backward that others wait for."""

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        """Run the rest of the backward."""

    def recompute(self, stage_index: int, microbatch_index: int) -> None:
        """Run a forward again that has kept nothing but its input; the backward follows."""

    def offload(self, stage_index: int, microbatch_index: int) -> None:
        """Start copying the saved tensors of a forward to the host; frees them on the device."""

    def reload(self, stage_index: int, microbatch_index: int) -> None:
        """Start copying them back from the host; the backward waits for them."""

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Start sending the output of the stage; does not wait for the other side."""

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of the stage's input; the forward waits for it."""

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Start sending the gradient of the stage's input."""

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        """Post the receive of the gradient of the stage's output; the backward waits for it."""

    def unshard(self, stage_index: int) -> None:
        """Gather the stage's parameters."""

    def reshard(self, stage_index: int) -> None:
        """Free the gathered parameters."""

    def reduce_grad(self, stage_index: int) -> None:
        """Reduce the stage's gradients over its data-parallel ranks."""

    def overlap(self, step: MetaStep) -> None:
        """Run a forward and a backward as one step: both inputs are there when it starts."""


class Executor:
    """Runs one rank's row on a driver.

    Args:
        row: Steps of the rank.
        driver: Machine that runs them.
        handlers: Functions that replace the driver's own execution of a type of step.
        on_step: Called with each step before it starts.

    Attributes:
        position: The cell of the step that runs now or is to run next; `len(row)` at the end.
    """

    def __init__(
        self,
        row: Row,
        driver: Driver,
        *,
        handlers: Mapping[MetaStepType, Handler] | None = None,
        on_step: Handler | None = None,
    ) -> None:
        self.position = 0
        self._row = row
        self._codes = row.codes()
        self._driver = driver
        self._handlers = handlers or {}
        self._on_step = on_step
        self._actions = actions_of(driver)

    @property
    def step(self) -> MetaStep | None:
        """Return the step at `position`; None at the end."""
        return self._row[self.position] if self.position < len(self._codes) else None

    def advance(self) -> bool:
        """Run steps until one is not ready or none is left.

        Returns:
            Whether the row is done.
        """
        for position in range(self.position, len(self._codes)):
            self.position = position
            code = self._codes[position]
            if code >= 0:
                if not self._ready(code):
                    return False
                self._run(code)
        self.position = len(self._codes)
        return True

    def _ready(self, code: int) -> bool:
        if code & KIND_MASK >= FIRST_OVERLAP:
            return all(map(self._ready, halves(code)))
        return self._driver.ready(
            TYPES[code & KIND_MASK],
            code >> STAGE_SHIFT & STAGE_MASK,
            code >> MICROBATCH_SHIFT & MICROBATCH_MASK,
        )

    def _run(self, code: int) -> None:
        kind = code & KIND_MASK
        if self._on_step is not None:
            self._on_step(unpack(code))
        if self._handlers and (handler := self._handlers.get(TYPES[kind])):
            handler(unpack(code))
        elif kind < FIRST_OVERLAP:
            self._actions[kind](code >> STAGE_SHIFT & STAGE_MASK, code >> MICROBATCH_SHIFT)
        else:
            self._driver.overlap(unpack(code))


def run_together(executors: Sequence[Executor]) -> None:
    """Run all ranks of a schedule in this thread, each as far as its driver allows, in turn.

    Raises:
        DeadlockError: If none can go on before all are done.
    """
    waiting = list(enumerate(executors))
    while waiting:
        before = [executor.position for _, executor in waiting]
        left = [(rank, executor) for rank, executor in waiting if not executor.advance()]
        if len(left) == len(waiting) and before == [executor.position for _, executor in left]:
            raise DeadlockError(describe_stuck(executors))
        # Backward passes run against the order of the ranks: taking turns from both ends lets a
        # value travel through all of them in one round either way.
        waiting = left[::-1]


def describe_stuck(executors: Sequence[Executor]) -> str:
    """Name the cell and the step of each rank that is not done."""
    places = (
        f"rank {rank} at cell {executor.position} ({executor.step})"
        for rank, executor in enumerate(executors)
        if executor.step is not None
    )
    return "no rank can go on: " + "; ".join(places)


def actions_of(driver: Driver) -> tuple[Callable[[int, int], None], ...]:
    """Return the driver's method for each kind of step that is no overlap."""
    steps: dict[MetaStepType, Callable[[int, int], None]] = {
        MetaStepType.FWD: driver.forward,
        MetaStepType.BWD: driver.backward,
        MetaStepType.BWD_INPUT: driver.backward_input,
        MetaStepType.BWD_WEIGHT: driver.backward_weight,
        MetaStepType.RECOMPUTE: driver.recompute,
        MetaStepType.FWD_SEND: driver.send_forward,
        MetaStepType.FWD_RECV: driver.receive_forward,
        MetaStepType.BWD_SEND: driver.send_backward,
        MetaStepType.BWD_RECV: driver.receive_backward,
        MetaStepType.OFFLOAD: driver.offload,
        MetaStepType.RELOAD: driver.reload,
        MetaStepType.FSDP_UNSHARD: lambda stage, _: driver.unshard(stage),
        MetaStepType.FSDP_RESHARD: lambda stage, _: driver.reshard(stage),
        MetaStepType.FSDP_REDUCE_GRAD: lambda stage, _: driver.reduce_grad(stage),
    }
    return tuple(steps[kind] for kind in TYPES[:FIRST_OVERLAP])
