"""One rank's messages of one run: which specs are expected, and the order of the receives."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hp_schedule.runtime.specs import (
    HEADER_SIZE,
    Specs,
    TensorSpec,
    check_expected,
    from_header,
    to_header,
)
from hp_schedule.runtime.stage import PipelineStage
from hp_schedule.schedule import Schedule
from hp_schedule.transport import Message, MessageKind, Transport

Tensors = tuple[Tensor, ...]
_HEADER_SPECS = (TensorSpec((HEADER_SIZE,), torch.int64),)


@dataclass(slots=True)
class Expectations:
    """Input specs of the stages after a rank's; lives from the first run to the last.

    Attributes:
        specs: Specs that the next stage expects, by index of the stage before it, as far as it has
            said so; None if it expects a header.
        exchanged: Whether this rank has exchanged requests with its neighbours.
    """

    specs: dict[int, Specs | None] = field(default_factory=dict)
    exchanged: bool = False


@dataclass(slots=True)
class _Wanted:
    """A receive that is not posted yet.

    Attributes:
        specs: Returns the specs of the message, None while they are not known.
        header: Message that tells the specs, if nothing else does.
    """

    message: Message
    device: torch.device
    specs: Callable[[], Specs | None]
    header: Message | None = None
    header_is_posted: bool = False


class _Receives:
    """The receives of one edge, posted in the order they are wanted in."""

    def __init__(self, transport: Transport[Tensors]) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._wanted: deque[_Wanted] = deque()
        self._posted: dict[Message, Specs] = {}

    def want(self, wanted: _Wanted) -> None:
        with self._lock:
            self._wanted.append(wanted)
            self._post()

    def progress(self) -> None:
        """Post the receives whose specs have become known."""
        with self._lock:
            self._post()

    def take(self, message: Message) -> tuple[Tensors, Specs]:
        """Wait for a message, first for the headers of those before it if need be."""
        with self._lock:
            if message not in self._posted:
                self._post(until=message)
            return self._transport.wait_receive(message), self._posted.pop(message)

    def _post(self, until: Message | None = None) -> None:
        waits = until is not None
        while self._wanted:
            first = self._wanted[0]
            if first.header is not None and not first.header_is_posted:
                self._transport.post_receive(first.header, _empty(_HEADER_SPECS, first.device))
                first.header_is_posted = True
            specs = first.specs()
            if specs is None:
                if not waits or first.header is None:
                    return
                specs = from_header(self._transport.wait_receive(first.header)[0]) or ()
            self._transport.post_receive(first.message, _empty(specs, first.device))
            self._posted[first.message] = specs
            self._wanted.popleft()
            waits = waits and first.message != until


class PointToPoint:
    """Sends and receives of one rank during one run; steps of several threads may use it.

    Args:
        rank: Rank in the pipeline.
        schedule: Schedule that is run.
        stages: This rank's stages by index.
        transport: Moves messages.
        expectations: Input specs of the next stages; the same object in every run.
        output_specs: Returns the specs of a stage's outputs for a microbatch, None before its
            forward.
    """

    def __init__(
        self,
        *,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        transport: Transport[Tensors],
        expectations: Expectations,
        output_specs: Callable[[int, int], Specs | None],
    ) -> None:
        self._rank = rank
        self._schedule = schedule
        self._stages = stages
        self._transport = transport
        self._expectations = expectations
        self._output_specs = output_specs
        self._receives = defaultdict[tuple[int, int], _Receives](lambda: _Receives(transport))
        self._exchange_requests()

    def send_input(self, stage: int, microbatch: int, values: Tensors) -> None:
        """Send a stage's output on.

        Args:
            stage: Index of the stage that made the output.
            microbatch: Index of the microbatch.
            values: Values with their graphs, which tell which of them get a gradient.

        Raises:
            ValueError: If it is not what the next stage expects.
        """
        expected = self.expected(stage, microbatch, values)
        message = self._to(self._schedule.downstream[stage], microbatch, MessageKind.INPUT)
        after = message.stage_index
        if expected is None:
            told = to_header(tuple(map(TensorSpec.of, values)))
            header = self._to(after, microbatch, MessageKind.HEADER)
            self._send(header, (told.to(self._stages[stage].device),))
        else:
            check_expected(values, expected, stage=stage, microbatch=microbatch, after=after)
        self._send(message, tuple(value.detach() for value in values))

    def expected(self, stage: int, microbatch: int, values: Tensors) -> Specs | None:
        """Return the specs that the next stage expects; the first time wait until it has told them.

        Args:
            stage: Index of the stage whose outputs are expected.
            microbatch: Index of the microbatch.
            values: Outputs of the stage; a dry run, where nobody can tell, takes their specs.
        """
        known = self._expectations.specs
        if stage not in known:
            if (planned := self._stages[stage].sent(microbatch)) is not None:
                return planned
            (header,), _ = self._take(self._request(self._schedule.downstream[stage]))
            known[stage] = from_header(header, likely=tuple(map(TensorSpec.of, values)))
        return known[stage]

    def want_input(self, stage: int, microbatch: int) -> None:
        """Post the receive of a stage's input, or of the header that tells its shapes."""
        message = self._from(stage, microbatch, MessageKind.INPUT)
        here = self._stages[stage]
        specs = here.input_spec or here.received(microbatch)
        header = self._from(stage, microbatch, MessageKind.HEADER) if specs is None else None
        self._want(_Wanted(message, here.device, lambda: specs, header))

    def take_input(self, stage: int, microbatch: int) -> tuple[Tensors, Specs]:
        """Wait for a stage's input; return it with its specs."""
        return self._take(self._from(stage, microbatch, MessageKind.INPUT))

    def send_gradient(self, stage: int, microbatch: int, values: Tensors) -> None:
        """Send the gradients of those inputs of a stage that have one."""
        before = self._schedule.upstream[stage]
        self._send(self._to(before, microbatch, MessageKind.OUTPUT_GRADIENT), values)

    def want_gradient(self, stage: int, microbatch: int) -> None:
        """Post the receive of a stage's output gradients, at the latest after its forward."""

        def specs() -> Specs | None:
            outputs = self._outputs(stage, microbatch)
            return None if outputs is None else tuple(spec for spec in outputs if spec.has_grad)

        message = self._from(stage, microbatch, MessageKind.OUTPUT_GRADIENT)
        self._want(_Wanted(message, self._stages[stage].device, specs))

    def take_gradient(self, stage: int, microbatch: int) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of a stage's outputs; return one per output."""
        values = iter(self._take(self._from(stage, microbatch, MessageKind.OUTPUT_GRADIENT))[0])
        # The gradient of an output can only have come from a rank that has the output.
        sent = self._to(self._schedule.downstream[stage], microbatch, MessageKind.INPUT)
        with _noted("sending", sent):
            self._transport.release_send(sent)
        outputs = self._outputs(stage, microbatch) or ()
        return tuple(next(values) if spec.has_grad else None for spec in outputs)

    def _outputs(self, stage: int, microbatch: int) -> Specs | None:
        """Return the specs of a stage's outputs: the next stage's, planned ones, or their own."""
        return (
            self._expectations.specs.get(stage)
            or self._stages[stage].sent(microbatch)
            or self._output_specs(stage, microbatch)
        )

    def progress(self) -> None:
        """Post receives whose shapes have come to be known."""
        for inbox in list(self._receives.values()):
            inbox.progress()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._transport.finish()

    def _exchange_requests(self) -> None:
        """Tell the stages before this rank's which specs it expects.

        A stage with an `input_spec` tells the stage before it once, ahead of the first run, what it
        expects; its receives are posted where the schedule says. A stage without one gets a header
        ahead of each input. Its buffers can only be made once the header is there, which the stage
        waits for when it needs the input. Whatever is posted later on the same edge then waits
        behind it, because an edge has one order. Where shapes are known by microbatch at both ends,
        as those of a plan are, nobody tells anybody.
        """
        here = self._stages
        if self._expectations.exchanged:
            return
        self._expectations.exchanged = True
        for stage, before in enumerate(self._schedule.upstream):
            if before < 0 or (stage in here) == (before in here):
                continue
            if stage in here:
                if not here[stage].is_planned[0]:
                    request = to_header(here[stage].input_spec).to(here[stage].device)
                    self._send(self._request(stage), (request,))
            elif not here[before].is_planned[1]:
                device = here[before].device
                self._want(_Wanted(self._request(stage), device, lambda: _HEADER_SPECS))

    def _want(self, wanted: _Wanted) -> None:
        # A group that has been broken meanwhile is noticed here, before anybody waits.
        with _noted("waiting for", wanted.message):
            self._receives[wanted.message.edge].want(wanted)

    def _take(self, message: Message) -> tuple[Tensors, Specs]:
        with _noted("waiting for", message):
            return self._receives[message.edge].take(message)

    def _send(self, message: Message, values: Tensors) -> None:
        with _noted("sending", message):
            self._transport.send(message, values)

    def _request(self, stage: int) -> Message:
        place, before = self._schedule.stage_to_rank, self._schedule.upstream[stage]
        return Message(place[stage], place[before], stage, 0, MessageKind.REQUEST)

    def _to(self, stage: int, microbatch: int, kind: MessageKind) -> Message:
        return Message(self._rank, self._schedule.stage_to_rank[stage], stage, microbatch, kind)

    def _from(self, stage: int, microbatch: int, kind: MessageKind) -> Message:
        schedule = self._schedule
        neighbours = (
            schedule.downstream if kind is MessageKind.OUTPUT_GRADIENT else schedule.upstream
        )
        source = schedule.stage_to_rank[neighbours[stage]]
        return Message(source, self._rank, stage, microbatch, kind)


@contextmanager
def _noted(doing: str, message: Message) -> Iterator[None]:
    """Add to an error of the network which message it was about."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(f"while {doing} the {message}")
        raise


def _empty(specs: Sequence[TensorSpec], device: torch.device) -> Tensors:
    return tuple(spec.empty(device) for spec in specs)
