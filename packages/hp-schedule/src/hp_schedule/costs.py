"""Costs of the steps of a schedule, of a model before it is cut into stages, and costs as text.

A profile of a model's stages, of every microbatch if they differ, is JSON::

    {"version": 1, "forward": [[1.0, 4.0], [1.1, 4.2]], "input_grad": [1.0, 1.1],
     "weight_grad": 0.9, "latency": [[0, 1, 0.05], [1, 0, 0.05]]}

Keys are the fields of `Costs`, which says what is meant and what stands for those left out: one
number for every step, one per stage, or one per stage and microbatch. A latency is one number, or a
source rank, a destination rank and a number for every edge.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

PerStage = float | Sequence[float]
"""One number for every stage, or one per stage."""
PerStep = float | Sequence[float | Sequence[float]]
"""One number for every step, one per stage, or one per stage and microbatch."""
Latency = float | Mapping[tuple[int, int], float]
"""One number for every directed edge, or one per edge (source rank, destination rank)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations in seconds (or any unit, the results are in it too), memory and traffic.

    Attributes:
        forward: Duration of a forward.
        input_grad: Duration of the backward of a stage's input.
        weight_grad: Duration of the backward of its weights; a full backward takes both.
        activation: Memory a microbatch holds in a stage from the start of its forward to the end
            of its backward (of its weight part where it is split), in any unit.
        latency: Time from the end of a message's transmission to its arrival.
        message: Size of a stage's output, which is the size of its gradient too, in any unit.
        bandwidth: Bandwidth of every channel, in the unit of `message` per unit of time: a message
            occupies its channel for message / bandwidth.
        unshard: Duration of gathering a stage's parameters.
        reduce_grad: Duration of reducing a stage's gradients.
        recompute: Duration of running a forward again; None: as long as the forward.
        kept_input: Memory that a microbatch which is run again holds from its forward to that
            RECOMPUTE, in the unit of `activation`: the input of the stage.
        offloaded: Memory that OFFLOAD moves to the host and RELOAD brings back, in the unit of
            `activation`; None: all of it.
        host_bandwidth: Bandwidth of a rank's way to its host and of the way back, in the unit of
            `activation` per unit of time.

    Raises:
        ValueError: If a number is negative or, except for the bandwidths, infinite, or a
            bandwidth is not positive.
    """

    forward: PerStep = 1.0
    input_grad: PerStep = 1.0
    weight_grad: PerStep = 1.0
    activation: PerStep = 1.0
    latency: Latency = 0.0
    message: PerStep = 0.0
    bandwidth: float = math.inf
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    recompute: PerStep | None = None
    kept_input: PerStep = 0.0
    offloaded: PerStep | None = None
    host_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            for number in numbers(getattr(self, name)):
                if not number >= 0 or (number == math.inf and name not in _BANDWIDTHS):
                    raise ValueError(f"{name} ({number}) must be >= 0 and finite")
                if number == 0 and name in _BANDWIDTHS:
                    raise ValueError(f"{name} ({number}) must be > 0")

    def durations(self, num_stages: int, num_microbatches: int) -> tuple[list[float], ...]:
        """Return the duration of every compute step.

        Returns:
            One table for each kind of compute step (F, B, I, W, RECOMPUTE, numbered as in
            `hp_schedule.steps`), each indexed by stage * num_microbatches + microbatch.

        Raises:
            ValueError: If a sequence does not have one entry per stage, or per microbatch.
        """
        sizes = (num_stages, num_microbatches)
        forward = per_step("forward", self.forward, *sizes)
        input_grad = per_step("input_grad", self.input_grad, *sizes)
        weight_grad = per_step("weight_grad", self.weight_grad, *sizes)
        full = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        again = forward if self.recompute is None else per_step("recompute", self.recompute, *sizes)
        return forward, full, input_grad, weight_grad, again  # in the order of kinds

    def activation_memory(self, num_stages: int, num_microbatches: int) -> "ActivationMemory":
        """Return the memory that every microbatch holds in every stage.

        Raises:
            ValueError: If a sequence does not have one entry per stage, or per microbatch, or more
                is moved than held.
        """
        sizes = (num_stages, num_microbatches)
        activation = per_step("activation", self.activation, *sizes)
        kept = per_step("kept_input", self.kept_input, *sizes)
        moved = activation
        if self.offloaded is not None:
            moved = per_step("offloaded", self.offloaded, *sizes)
            for part, whole in zip(moved, activation, strict=True):
                if part > whole:
                    raise ValueError(f"offloaded ({part}) must be <= activation ({whole})")
        return ActivationMemory(activation, kept, moved)

    def latency_of(self, source: int, destination: int) -> float:
        """Return the latency of a directed edge between two ranks.

        Raises:
            ValueError: If `latency` is a mapping without this edge.
        """
        if not isinstance(self.latency, Mapping):
            return self.latency
        if (source, destination) not in self.latency:
            raise ValueError(f"latency must have the edge ({source}, {destination})")
        return self.latency[source, destination]

    def transmission(self, num_stages: int, num_microbatches: int) -> list[float]:
        """Return how long each stage's message occupies its channel, indexed as `durations` is.

        Raises:
            ValueError: If a sequence does not have one entry per stage, or per microbatch.
        """
        sizes = per_step("message", self.message, num_stages, num_microbatches)
        return [size / self.bandwidth for size in sizes] if any(sizes) else sizes


_BANDWIDTHS = ("bandwidth", "host_bandwidth")


class ActivationMemory(NamedTuple):
    """Memory by stage * num_microbatches + microbatch, in the unit of `Costs.activation`.

    Attributes:
        all: Held from a forward, or a RECOMPUTE, to the end of the backward.
        input: Held from a forward to its RECOMPUTE.
        moved: Memory, of `all`, that is on the host between OFFLOAD and RELOAD.
    """

    all: list[float]
    input: list[float]
    moved: list[float]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of one rank's share of a model, so that any number of stages can be compared.

    A rank's share is the model divided by the number of ranks; with v stages on every rank a stage
    is 1 / v of it.

    Attributes:
        forward: Duration of the forward of one microbatch through one rank's share.
        input_grad: Duration of the backward of its inputs.
        weight_grad: Duration of the backward of its weights.
        activation: Memory that a microbatch holds in one rank's share.
        first_scale: The first stage's costs relative to the others'; memory stays.
        last_scale: The same for the last stage.
        microbatch_scale: Each microbatch's costs and memory relative to those above; empty for
            microbatches of one size.
        latency: Latency of a message between ranks; see `Costs`.
        message: Size of a microbatch's message between two stages.
        bandwidth: Size per unit of time of every channel.
        recompute: Duration of running a forward again; None: as long as the forward.
        kept_input: Memory that a microbatch which is run again holds in one stage: its input, the
            size of which does not depend on how much of the model a stage is.
        offloaded: Memory that OFFLOAD moves; None: all of `activation`.
        host_bandwidth: Memory per unit of time of a rank's way to its host, and of the way back.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    activation: float = 1.0
    first_scale: float = 1.0
    last_scale: float = 1.0
    microbatch_scale: Sequence[float] = ()
    latency: Latency = 0.0
    message: float = 0.0
    bandwidth: float = math.inf
    recompute: float | None = None
    kept_input: float = 0.0
    offloaded: float | None = None
    host_bandwidth: float = math.inf

    def of_stages(self, num_ranks: int, num_stages: int) -> Costs:
        """Return the costs of equal stages, but for the first and the last."""
        share = [num_ranks / num_stages] * num_stages
        scales = share.copy()
        scales[0] *= self.first_scale
        scales[-1] *= self.last_scale
        return Costs(
            forward=self._table(self.forward, scales),
            input_grad=self._table(self.input_grad, scales),
            weight_grad=self._table(self.weight_grad, scales),
            activation=self._table(self.activation, share),
            latency=self.latency,
            message=self._table(self.message, [1.0] * num_stages),
            bandwidth=self.bandwidth,
            recompute=None if self.recompute is None else self._table(self.recompute, scales),
            kept_input=self._table(self.kept_input, [1.0] * num_stages),
            offloaded=None if self.offloaded is None else self._table(self.offloaded, share),
            host_bandwidth=self.host_bandwidth,
        )

    def _table(self, cost: float, scales: list[float]) -> list[float | Sequence[float]]:
        if not self.microbatch_scale:
            return [cost * scale for scale in scales]
        return [[cost * scale * size for size in self.microbatch_scale] for scale in scales]


def per_step(name: str, value: PerStep, num_stages: int, num_microbatches: int = 1) -> list[float]:
    """Return one number per step, indexed by stage * num_microbatches + microbatch.

    With one microbatch, the default, it returns one number per stage.

    Raises:
        ValueError: If a sequence has another length.
    """
    if not isinstance(value, Sequence):
        return [float(value)] * (num_stages * num_microbatches)
    if len(value) != num_stages:
        raise ValueError(f"len({name}) ({len(value)}) must equal num_stages ({num_stages})")
    table: list[float] = []
    for stage, entry in enumerate(value):
        if not isinstance(entry, Sequence):
            table.extend([float(entry)] * num_microbatches)
        elif len(entry) != num_microbatches:
            raise ValueError(
                f"len({name}[{stage}]) ({len(entry)}) must equal num_microbatches "
                f"({num_microbatches})"
            )
        else:
            table.extend(map(float, entry))
    return table


def numbers(value: PerStep | Latency | None) -> Iterator[float]:
    """Yield every number that a cost consists of."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, Sequence):
        for entry in value:
            yield from numbers(entry)
    elif value is not None:
        yield value


_VERSION: Final = 1
_NAMES: Final = tuple(field.name for field in fields(Costs))
_DEPTH: Final = {"latency": 0, "bandwidth": 0, "host_bandwidth": 0, "unshard": 1, "reduce_grad": 1}
_PER_STEP: Final = 2
"""How deep lists may be, of these and of all others: stages, and microbatches in them."""


_LISTS: Final = ("", ", or one per stage", ", or one per stage, or per stage and microbatch")


def costs_to_json(costs: Costs) -> str:
    """Return costs as JSON; defaults are left out."""
    document: dict[str, object] = {"version": _VERSION}
    for field in fields(Costs):
        value = getattr(costs, field.name)
        if value == field.default:
            continue
        if isinstance(value, Mapping):
            value = [[*edge, latency] for edge, latency in value.items()]
        document[field.name] = _listed(value)
    return json.dumps(document) + "\n"


def costs_from_json(text: str) -> Costs:
    """Read costs from JSON.

    Raises:
        ValueError: If the text is no such profile, or a cost is out of its range.
    """
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise ValueError(f"costs must be JSON: {error}") from None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f'costs must be a JSON object with "version": {_VERSION}')
    for key in document:
        if key not in {"version", *_NAMES}:
            raise ValueError(f"key ({key!r}) must be one of {', '.join(_NAMES)}")
    values = {name: value for name, value in document.items() if name != "version"}
    for name, value in values.items():
        if name == "latency" and isinstance(value, list):
            values[name] = _edges(value)
        else:
            _check(name, value, _DEPTH.get(name, _PER_STEP))
    return Costs(**values)


def num_stages_of(costs: Costs) -> int | None:
    """Return the number of stages that costs have lists for; None if they have none."""
    values = (getattr(costs, name) for name in _NAMES if name != "latency")
    return next((len(value) for value in values if isinstance(value, Sequence)), None)


def _listed(value: object) -> object:
    return [_listed(entry) for entry in value] if isinstance(value, Sequence) else value


def _edges(entries: list[object]) -> Latency:
    found: dict[tuple[int, int], float] = {}
    for entry in entries:
        match entry:
            case [int(source), int(destination), int() | float() as latency]:
                found[source, destination] = latency
            case _:
                raise ValueError(
                    f"latency ({reprlib.repr(entry)}) must be [source, destination, latency]"
                )
    return found


def _check(name: str, value: object, depth: int) -> None:
    if isinstance(value, list) and depth:
        for entry in value:
            _check(name, entry, depth - 1)
    elif not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(
            f"{name} ({reprlib.repr(value)}) must be a number{_LISTS[_DEPTH.get(name, _PER_STEP)]}"
        )
