"""Seconds and bytes of steps of documents of many lengths: percentiles for each packing.

Sequences are priced as `hp plan` prices them, except for attention, which is priced by the pairs of
the documents of a microbatch. Planned steps have as many tokens, in microbatches of the planner,
and the same costs before and after the pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

import numpy as np

from hp_base.messages import size
from hp_context.batch.deal_cost import Work
from hp_data.dataset import best_fit
from hp_packing.costs import Pipeline, Seconds, StepCosts, pairs_of
from hp_packing.generators import drawn, stream
from hp_packing.learned import learned_costs
from hp_packing.plan import Team
from hp_packing.planning.planner import Planner
from hp_packing.pricing import costs_of
from hp_plan.costs.machine import Machine
from hp_plan.layouts.report import in_seconds
from hp_plan.price.estimate import Plan, gathers_by_stage
from hp_plan.price.prices import Prices
from hp_plan.price.traffic import Spread
from hp_schedule import (
    Costs,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    simulate,
)
from hp_trainer.config import Config
from hp_trainer.layout.schedules import count_stages

PERCENTILES = (50, 90, 99)
_MANY = 400
"""Sequences that are drawn to choose typical ones."""
Sequences = list[list[int]]
"""Lengths of the documents of each sequence; the rest of the sequence is padding."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The seconds and bytes of some steps, with one packing.

    Attributes:
        packing: "stream", "best_fit" or "planned".
        seconds: Seconds of each step.
        memory: Bytes of the fullest rank in each step.
        tokens: Tokens of each step, without padding.
    """

    packing: str
    seconds: tuple[float, ...]
    memory: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all ranks together, over all steps."""
        return sum(self.tokens) / sum(self.seconds)

    def percentiles(self) -> dict[str, Mapping[str, float]]:
        """Return seconds and bytes by percentile."""
        kinds: dict[str, Sequence[float]] = {"seconds": self.seconds, "memory": self.memory}
        return {
            name: {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            for name, values in kinds.items()
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least value that a percentage of the values do not exceed."""
    return sorted(values)[max(0, ceil(len(values) * percent / 100) - 1)]


def whole(lengths: Sequence[int], *, seq_len: int) -> Sequences:
    """Pack documents into sequences as `best_fit` does, which cuts none that fits a sequence."""
    ends = np.array(list(accumulate(lengths)), dtype=np.int64) - 1
    packs = best_fit(ends, num_tokens=sum(lengths), seq_len=seq_len)
    return [packs.lengths[packs.pieces(i)].tolist() for i in range(packs.num_sequences)]


def typical_sequences(source: str, *, seq_len: int) -> dict[str, list[int]]:
    """Return the documents of sequences with the median and the 99th percentile of pairs.

    Args:
        source: Name of a distribution, or path of a file of lengths.
        seq_len: Tokens of a sequence.

    Returns:
        Lengths of documents by the name of the percentile.
    """
    (batch,) = drawn(source, tokens=_MANY * seq_len, longest=seq_len, number=1)
    before = Work((None,)).before
    ordered = sorted(stream(batch, seq_len=seq_len), key=lambda each: sum(map(before, each)))
    return {f"p{at}": ordered[max(0, ceil(_MANY * at / 100) - 1)] for at in (50, 99)}


class LengthPrices:
    """Prices of the steps of a layout by the lengths of their documents.

    Args:
        config: Configuration of the layout, decided; see `hp_plan.price.estimate.decided`.
        machine: Machine of the layout.
        vocab_size: Tokens of the vocabulary.
    """

    def __init__(self, config: Config, machine: Machine, *, vocab_size: int) -> None:
        self.config, self._machine = config, machine
        self._prices = Prices(machine, vocab_size, Spread())
        self._plan = Plan(config, machine, vocab_size=vocab_size, prices=self._prices)
        self._estimate = self._plan.estimate()
        self._after = self._estimate.parts["gradients"] + self._estimate.parts["optimizer"]
        self.costs: StepCosts = learned_costs(config, machine, vocab_size=vocab_size)
        self._ranks = self._plan.layout.dp * config.mesh.cp

    def steps(self, batches: Sequence[Sequence[int]]) -> list[Steps]:
        """Price batches by each packing."""
        size, seq_len = self.config.train.global_batch_size, self.config.data.seq_len
        found = [self._packed("stream", [stream(b, seq_len=seq_len)[:size] for b in batches])]
        # A step has a fixed number of sequences, so some documents go to the next step.
        found.append(self._packed("best_fit", self._best_fit(batches)))
        if count_stages(self.config) == self.config.mesh.pp:  # one stage on each rank
            found.append(self._planned(batches))
        return found

    def _best_fit(self, batches: Sequence[Sequence[int]]) -> list[Sequences]:
        every = [length for batch in batches for length in batch]
        size = self.config.train.global_batch_size
        packed = whole(every, seq_len=self.config.data.seq_len)
        return [packed[i : i + size] for i in range(0, len(packed) - size + 1, size)]

    def _packed(self, packing: str, steps: Sequence[Sequences]) -> Steps:
        return Steps(
            packing,
            seconds=tuple(self._of_sequences(each) + self._after for each in steps),
            memory=(float(self._estimate.memory.total),) * len(steps),
            tokens=tuple(sum(map(sum, each)) for each in steps),
        )

    def _of_sequences(self, sequences: Sequences) -> float:
        """Return the seconds of the slowest pipeline."""
        plan, size = self._plan, self.config.train.microbatch_size
        pairs = [sum(pairs_of(each, self.costs)) for each in sequences]
        of_group = size * plan.num_microbatches
        groups = [pairs[i : i + of_group] for i in range(0, len(pairs), of_group)]
        slowest = 0.0
        schedule = plan.schedule()
        plain = plan.costs(schedule)
        full = size * pairs_of([self.config.data.seq_len], self.costs)[0]
        for group in groups:
            each = [sum(group[i : i + size]) - full for i in range(0, of_group, size)]
            tables: dict[str, list[list[float]]] = {"forward": [], "input_grad": []}
            for stage, price in zip(self.costs.stages, plan.prices, strict=True):
                for name, column in tables.items():
                    rate, least = (getattr(x, name) for x in (stage.pair, stage.least))
                    time = getattr(price, name)
                    column.append(
                        [max(least, time + rate * more / self.config.mesh.cp) for more in each]
                    )
            costs = replace(plain, **tables)  # type: ignore[arg-type]
            slowest = max(slowest, simulate(schedule, costs, cores=plan.cores).makespan)
        return slowest

    def _planned(self, batches: Sequence[Sequence[int]]) -> Steps:
        kept = max(stage.kept for stage in self.costs.stages)
        memory = self._estimate.memory
        fixed = memory.total - memory.activations * (1 + self._machine.fragmentation)
        room = (self._machine.memory - fixed) / (1 + self._machine.fragmentation)
        pipeline = Pipeline(self.config.mesh.pp, self._ranks, max(1, int(room / kept)))
        costs = self._by_block() if self.config.mesh.gather == "block" else self.costs
        planner = Planner(costs, pipeline, typical=batches)
        seconds, held = [], []
        for batch in batches:
            runs = [
                simulate(self._gathered(team.schedule), self._of_team(team, batch, costs))
                for team in planner.plan(batch).teams
            ]
            seconds.append(max(run.makespan for run in runs) + self._after)
            most = max(max(run.peak_activations) for run in runs)
            held.append(fixed + most * kept * (1 + self._machine.fragmentation))
        return Steps("planned", tuple(seconds), tuple(held), tuple(map(sum, batches)))

    def _gathered(self, schedule: Schedule) -> Schedule:
        if not gathers_by_stage(self.config):
            return schedule
        return add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))

    def _of_team(self, team: Team, lengths: Sequence[int], costs: StepCosts) -> Costs:
        prices = self._plan.prices
        return replace(
            costs_of(team, lengths, costs),
            unshard=[price.gathered for price in prices],
            reduce_grad=[price.reduced for price in prices],
        )

    def _by_block(self) -> StepCosts:
        """Return costs in which a microbatch takes at least as long as gathering its weights."""
        stages = []
        for costs, work, place in zip(
            self.costs.stages, self._plan.stages, self._plan.places, strict=True
        ):
            gather, reduce = self._prices.gather(self.config, work, place)
            back = gather + (0.0 if self.config.mesh.reduce_once else reduce)
            least = Seconds(*map(max, costs.least, (gather, back, 0.0)))
            stages.append(replace(costs, least=least))
        return replace(self.costs, stages=tuple(stages))


def steps_of(
    config: Config, machine: Machine, *, vocab_size: int, source: str, number: int
) -> list[Steps]:
    """Price steps of a layout by each packing.

    Args:
        config: Configuration of the layout, decided.
        machine: Machine of the layout.
        vocab_size: Tokens of the vocabulary.
        source: Name of a distribution, or path of a file of lengths.
        number: Maximum number of steps.

    Raises:
        ConfigError: When the file cannot be read or has less than a batch, or planned steps do not
            fit into memory.
    """
    seq_len = config.data.seq_len
    tokens = config.train.global_batch_size * seq_len
    batches = drawn(source, tokens=tokens, longest=seq_len, number=number)
    return LengthPrices(config, machine, vocab_size=vocab_size).steps(batches)


def table_of(steps: Sequence[Steps]) -> list[str]:
    """Return one line for each packing: seconds and bytes of steps by percentile."""
    found = [each.percentiles() for each in steps]
    percents = list(found[0]["seconds"])
    head = "".join(f"{f'step {percent}':>10}" for percent in percents)
    head += "".join(f"{f'memory {percent}':>12}" for percent in percents)
    lines = [f"{'packing':10}{head}{'tokens/s':>11}"]
    for each, values in zip(steps, found, strict=True):
        line = "".join(f"{in_seconds(values['seconds'][percent]):>10}" for percent in percents)
        line += "".join(f"{size(values['memory'][percent]):>12}" for percent in percents)
        lines.append(f"{each.packing:10}{line}{each.tokens_per_second:11,.0f}")
    return lines


def steps_as_dict(steps: Sequence[Steps]) -> Mapping[str, object]:
    """Return percentiles and tokens per second by packing, for programs."""
    return {
        each.packing: {**each.percentiles(), "tokens_per_second": each.tokens_per_second}
        for each in steps
    }
