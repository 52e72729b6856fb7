"""Run hp-schedule's schedules over stages of unequal sizes.

A schedule knows *units*: one replica of one stage, all of whose ranks run the same row. Only the
transport here knows that a unit has ranks, how many, and which part of a tensor each of them holds.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from hp_schedule import Message, MessageKind, Schedule
from hp_schedule.runtime import TensorSpec
from hp_schedule.runtime.specs import describe, from_header, to_header
from hp_vtp.messages import TensorMeta
from hp_vtp.policy import Payload
from hp_vtp.topology.stages import Edge, Sharded
from hp_vtp.transport import Transport
from hp_vtp.transport.handles import Handle
from hp_vtp.units import multiplex, pipeline_rank, units_of

__all__ = [
    "StageTransport",
    "multiplex",
    "pipeline_rank",
    "units_of",
]


Values = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _LogicalStage:
    """Domain and logical stage, in the layout, of a stage of a schedule."""

    domain: int
    position: int


class StageTransport:
    """A `hp_schedule.Transport` for stages with different numbers of ranks.

    Every rank of a unit runs a `PipelineScheduleRuntime` with `pipeline_rank` of this layout and
    this transport. Where boundaries are replicated nothing else is needed: a stage's `input_spec`
    is the whole tensor, or None for shapes that travel with it. Where one is sharded, `metas` has
    the global shapes, and `input_spec` returns the specs of this rank's part.

    On GPUs the first run, up to `finish`, goes through the memory of hosts; of several transports
    over one `Transport` with the same metas and steps of a schedule, that of the first
    (Note [By host]).
    """

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        *,
        metas: Mapping[int, Sequence[TensorMeta]] | None = None,
        domain: int | None = None,
    ) -> None:
        """Join a transport and a schedule.

        Stages that follow each other on the same ranks, as in the middle of a V, are one logical
        stage of the layout: between them nothing is transferred.

        Args:
            transport: Transport of the layout.
            schedule: Schedule with a chain per domain of the layout, see `multiplex`; or with one
                chain and a row for each physical stage, if `domain` is given.
            metas: Metadata of a logical stage's inputs, from stage 1: global shapes, needed if a
                boundary is sharded, otherwise checked.
            domain: Domain that this rank serves, if each domain runs the schedule by itself.

        Raises:
            ValueError: If the schedule is not one over this layout, or metas are missing.
        """
        self._transport = transport
        self._form = _form_of(schedule, metas or {})
        self._metas = {stage: tuple(given) for stage, given in (metas or {}).items()}
        self._places: dict[int, _LogicalStage] = {}
        self._received: dict[Message, Handle[Values]] = {}
        self._lock = threading.Lock()
        layout = transport.layout
        if domain is None:
            domains = range(layout.num_domains)
            stages = tuple(stage for stage, _ in units_of(layout))
        else:
            domains = range(domain, domain + 1)
            stages = tuple(range(len(layout.stages)))
        if len(schedule.chains) != len(domains) or schedule.num_ranks != len(stages):
            raise ValueError(
                f"number of chains ({len(schedule.chains)}) and of rows ({schedule.num_ranks}) of "
                f"the schedule must equal those of the layout ({len(domains)} and {len(stages)}); "
                "see multiplex"
            )
        for here, chain in zip(domains, schedule.chains, strict=True):
            visits = groupby(chain, key=lambda stage: stages[schedule.stage_to_rank[stage]])
            found = []
            for position, (physical, together) in enumerate(visits):
                found.append(physical)
                self._places |= {stage: _LogicalStage(here, position) for stage in together}
            if tuple(found) != layout.chain:
                raise ValueError(
                    f"chain ({found}) of the schedule must equal the layout's ({layout.chain})"
                )
        self._require_metas()

    def input_spec(self, stage_index: int) -> tuple[TensorSpec, ...]:
        """Return the specs of this rank's part of a stage's input, from `metas`.

        Raises:
            ValueError: If there are no metas of the stage.
        """
        place = self._places[stage_index]
        if place.position not in self._metas:
            raise ValueError(f"metas of logical stage {place.position} must be given")
        return self._specs(place, at_destination=True)

    def send(self, message: Message, value: Values) -> None:
        """Start to send; see `hp_schedule.Transport`."""
        place = self._places[message.stage_index]
        if message.kind is MessageKind.REQUEST and place.position in self._metas:
            self._check_request(message, value[0], place)
            return
        edge = self._edge(message)
        self._transport.send(
            value,
            source=edge.source,
            destination=edge.destination,
            domain=edge.domain,
            metas=self._metas_of(message, value),
            microbatch=message.microbatch_index,
            payload=_PAYLOADS[message.kind],
            by_host=self._goes_by_host,
        )

    def post_receive(self, message: Message, buffer: Values) -> None:
        """Start to receive; see `hp_schedule.Transport`."""
        if message.kind is MessageKind.REQUEST and self._places[message.stage_index].position in (
            self._metas
        ):
            return
        edge = self._edge(message)
        handle = self._transport.receive(
            # The runtime decides what is a leaf.
            [replace(meta, requires_grad=False) for meta in self._metas_of(message, buffer)],
            source=edge.source,
            destination=edge.destination,
            domain=edge.domain,
            microbatch=message.microbatch_index,
            into=buffer,
            by_host=self._goes_by_host,
        )
        with self._lock:
            self._received[message] = handle

    def wait_receive(self, message: Message) -> Values:
        """Return the received tensors; see `hp_schedule.Transport`."""
        place = self._places[message.stage_index]
        if message.kind is MessageKind.REQUEST and place.position in self._metas:
            return (to_header(self._specs(place, at_destination=False)),)
        with self._lock:
            handle = self._received.pop(message)
        return handle.wait()

    def release_send(self, message: Message) -> None:
        """Do nothing: the engine frees tensors that have been sent."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._transport.finish()
        self._transport.has_run.add(self._form)

    def abort(self, error: BaseException) -> BaseException:
        """Fail all ranks within seconds; return the error that this one is to raise."""
        return self._transport.give_up(error)

    @property
    def _goes_by_host(self) -> bool:
        on_gpu = self._transport.device.type == "cuda"
        return on_gpu and self._form not in self._transport.has_run

    def _edge(self, message: Message) -> Edge:
        """Return the logical edge of a message."""
        place = self._places[message.stage_index]
        here = place.position
        source, destination = {
            MessageKind.INPUT: (here - 1, here),
            MessageKind.HEADER: (here - 1, here),
            MessageKind.OUTPUT_GRADIENT: (here + 1, here),
            MessageKind.REQUEST: (here, here - 1),
        }[message.kind]
        return self._transport.layout.edge(source, destination, domain=place.domain)

    def _metas_of(self, message: Message, values: Values) -> list[TensorMeta]:
        """Return the metas of a message's tensors; without metas shapes are the same everywhere."""
        here = self._places[message.stage_index].position
        if message.kind is MessageKind.INPUT and here in self._metas:
            return list(self._metas[here])
        if message.kind is MessageKind.OUTPUT_GRADIENT and here + 1 in self._metas:
            return [meta for meta in self._metas[here + 1] if _spec(meta, ()).has_grad]
        return [TensorMeta(tuple(x.shape), x.dtype, replicated=True) for x in values]

    def _specs(self, place: _LogicalStage, *, at_destination: bool) -> tuple[TensorSpec, ...]:
        """Return the specs of one rank's part of a stage's input, here or at its source."""
        layout, metas = self._transport.layout, self._metas[place.position]
        edge = layout.edge(place.position - 1, place.position, domain=place.domain)
        index = layout.tp_rank_of(self._transport.rank)
        return tuple(
            _spec(
                meta,
                plan.destination_shape(index) if at_destination else plan.source_shape(index),
            )
            for meta, plan in zip(metas, self._transport.plan(edge, metas), strict=True)
        )

    def _check_request(self, message: Message, header: Tensor, place: _LogicalStage) -> None:
        expected = self._specs(place, at_destination=True)
        asked = from_header(header, likely=expected)
        if asked is None or [(s.shape, s.dtype) for s in asked] != [
            (s.shape, s.dtype) for s in expected
        ]:
            shown = "None" if asked is None else describe(asked)
            raise ValueError(
                f"input_spec ({shown}) of stage {message.stage_index} must be what metas make of "
                f"it on this rank ({describe(expected)}); see StageTransport.input_spec"
            )

    def _require_metas(self) -> None:
        layout = self._transport.layout
        for position in range(1, layout.num_stages):
            ends = {layout.stages[layout.chain[at]].boundary for at in (position - 1, position)}
            sharded = any(isinstance(boundary, Sharded) for boundary in ends)
            if sharded and position not in self._metas:
                raise ValueError(
                    f"metas of logical stage {position} must be given, since a boundary on the way "
                    "to it is sharded"
                )


_PAYLOADS = {
    MessageKind.INPUT: Payload.ACTIVATION,
    MessageKind.OUTPUT_GRADIENT: Payload.GRADIENT,
    MessageKind.HEADER: Payload.SHAPES,
    MessageKind.REQUEST: Payload.SHAPES,
}


def _form_of(schedule: Schedule, metas: Mapping[int, Sequence[TensorMeta]]) -> Hashable:
    """Return the kinds of steps and the tensors of a run: they decide which kernels it launches."""
    kinds = frozenset(step.type for row in schedule.steps for step in row if step is not None)
    return kinds, tuple((stage, tuple(given)) for stage, given in sorted(metas.items()))


def _spec(meta: TensorMeta, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(shape, meta.dtype, meta.requires_grad)
