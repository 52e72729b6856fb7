"""Steps that are planned from the lengths of their documents, while the ones before them run."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from hp_base.errors import ConfigError, DataError
from hp_data.dataset import Dataset, Piece
from hp_packing import Pipeline as Ranks
from hp_packing import Planner, StepCosts, StepPlan
from hp_packing.batch import share_of
from hp_packing.costs import read_costs
from hp_packing.learned import learned_costs
from hp_packing.pricing import simulated
from hp_plan.costs.machine import MACHINES, Machine, machine_found
from hp_platform import Runtime, agree, all_gather_json, mark_agreed, on_one_rank
from hp_schedule.runtime import PipelineScheduleRuntime
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.schedules import planned_tokens, splits_backward
from hp_trainer.model.loss import loss_of
from hp_trainer.model.parallelize import Pipeline
from hp_trainer.training.batches import Batches, Share
from hp_trainer.training.metrics import StepMetrics

_TYPICAL = 8
"""Number of first steps of the data for whose mean templates are searched."""
_AHEAD = 2
"""Number of steps that are planned while one runs."""


@dataclass(frozen=True)
class PlannedStep:
    """A plan and the documents that it is for.

    Attributes:
        plan: Plan of the step.
        pieces: Documents of the global batch.
        seconds: Predicted seconds of the pipeline.
        padding: Share of positions that are padding.
    """

    plan: StepPlan
    pieces: tuple[Piece, ...]
    seconds: float
    padding: float

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches of each team."""
        return len(self.plan.teams[0].microbatches)

    @property
    def ends(self) -> dict[int, int]:
        """Return the end of the documents in each sequence of the data, by its global index."""
        return {piece.sequence: piece.start + piece.length for piece in self.pieces}

    def runner(self, pipeline: Pipeline, mesh: Mesh) -> PipelineScheduleRuntime:
        """Return the runtime of the step on this rank.

        Args:
            pipeline: Stages of this rank.
            mesh: Mesh of the run.
        """
        team, place = self.plan.teams[mesh.dp_index], mesh.index("cp")
        sizes = [each.deal.sizes[place] for each in team.microbatches]
        between = [size // mesh.size("tp") for size in sizes]
        return pipeline.runner(len(sizes), 1, loss_of, team.schedule, positions=between)

    def share(self, batches: Batches, data: Dataset, *, step: int) -> Share:
        """Return this rank's share of the global batch.

        Args:
            batches: Batches of the run, with the mesh and this rank's positions.
            data: Dataset to read.
            step: Number of the training step, from 0.
        """
        team = self.plan.teams[batches.mesh.dp_index]
        return share_of(batches, data, self.pieces, team.microbatches, step=step)

    def told_in(self, metrics: StepMetrics) -> StepMetrics:
        """Return metrics with those of the plan added."""
        return replace(
            metrics,
            planned_seconds=self.seconds,
            padding=self.padding,
            microbatches=self.num_microbatches,
        )


class StepPlanning:
    """The plans of the steps of a run.

    The global batch is that of `data.packing = "best_fit"`: whole documents of a number of
    sequences, the same in every layout, and the position in the data is a count of sequences. A
    plan puts its documents into microbatches, deals each to the context-parallel ranks of a
    data-parallel team, and orders them in the pipeline. The first rank searches templates, once.
    Every rank makes the plan of each step by itself, in a thread and some steps ahead, from the
    same lengths and costs; before a step all ranks compare the digests of their plans.

    Training is the same whatever the plan: losses are sums over tokens, experts are balanced by
    each document alone, positions count within documents, and dropout depends on the position of a
    token in its sequence of the data.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        data: Dataset of the run.
        costs: Costs of the stages, the same on every rank.
        control: Group over all ranks for objects.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        data: Dataset,
        *,
        costs: StepCosts,
        control: ProcessGroup,
    ) -> None:
        self._data, self._control = data, control
        self._batch = config.train.global_batch_size
        stage = mesh.layout.stages[0]
        self.planner = Planner(
            costs,
            Ranks(mesh.layout.pp, stage.dp * stage.cp, planned_tokens(config)),
            team=stage.cp,
            heads=config.mesh.heads_degree,
            unit=stage.tp,
            split_backward=splits_backward(config),
            one_order=True,
            typical=[
                [piece.length for piece in data.pieces(range(first, first + self._batch))]
                for first in range(0, _TYPICAL * self._batch, self._batch)
            ],
        )
        templates = on_one_rank(
            self.planner.searched_templates,
            of=list[tuple[list[float], str]],
            group=control,
            where="step plan",
        )
        self.planner.use_templates(templates)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step plan")
        self._ahead: dict[int, Future[PlannedStep]] = {}

    def __str__(self) -> str:
        pipeline, teams = self.planner.pipeline, self.planner.num_teams
        return (
            f"{pipeline.num_stages} stages of {teams} x {pipeline.ranks // teams} ranks, memory "
            f"for {pipeline.tokens} tokens of each"
        )

    def take(self, first: int, *, steps: int) -> PlannedStep:
        """Return the plan of a step, once all ranks have the same. All ranks call this together.

        Args:
            first: Global index of the first sequence of the batch.
            steps: Number of steps of the run that are left, this one included.

        Raises:
            ConfigError: When the documents do not fit into memory.
            DataError: On every rank, when some ranks have made another plan.
        """
        wanted = [first + i * self._batch for i in range(min(steps, 1 + _AHEAD))]
        for start in wanted:
            if start not in self._ahead:
                self._ahead[start] = self._thread.submit(self.plan, start)
        for start in self._ahead.keys() - set(wanted):
            self._ahead.pop(start).cancel()
        found, error = None, None
        try:
            found = self._ahead[first].result()
        except Exception as failure:  # noqa: BLE001 - every rank must hear of it
            error = failure
        self._compare("" if found is None else found.plan.digest, error)
        assert found is not None
        return found

    def plan(self, first: int) -> PlannedStep:
        """Plan the step whose batch begins with a sequence of the data."""
        pieces = tuple(self._data.pieces(range(first, first + self._batch)))
        lengths = [piece.length for piece in pieces]
        seconds, plan = self._plan(pieces, lengths)
        positions = sum(each.deal.seq_len for each in plan.microbatches)
        return PlannedStep(plan, pieces, seconds=seconds, padding=1 - sum(lengths) / positions)

    def close(self) -> None:
        """Stop planning."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan(self, pieces: Sequence[Piece], lengths: Sequence[int]) -> tuple[float, StepPlan]:
        """Return a plan and its seconds; perhaps one with the sequences as microbatches.

        Sequences fit into memory when nothing else does, and may be faster if they are fewer.
        """
        by_sequence = self._by_sequence(pieces)
        try:
            plan = self.planner.plan(lengths)
        except ConfigError:
            packed = self.planner.of_parts(lengths, by_sequence)
            if packed is None:
                raise
            return self._seconds(packed, lengths), packed
        found = self._seconds(plan, lengths), plan
        if len(by_sequence[0]) < len(plan.teams[0].microbatches):
            packed = self.planner.of_parts(lengths, by_sequence)
            if packed is not None:
                found = min(found, (self._seconds(packed, lengths), packed), key=lambda x: x[0])
        return found

    def _seconds(self, plan: StepPlan, lengths: Sequence[int]) -> float:
        return max(run.makespan for run in simulated(plan, lengths, self.planner.costs))

    def _by_sequence(self, pieces: Sequence[Piece]) -> list[list[list[int]]]:
        """Return the documents of each sequence, dealt to teams in turn."""
        of_sequence: dict[int, list[int]] = {}
        for index, piece in enumerate(pieces):
            of_sequence.setdefault(piece.sequence, []).append(index)
        parts, teams = list(of_sequence.values()), self.planner.num_teams
        return [parts[team::teams] for team in range(teams)]

    def _compare(self, digest: str, error: Exception | None) -> None:
        everyone = all_gather_json(digest, of=str, group=self._control)
        if not all(everyone):
            agree(error, group=self._control, where="step plan")
        usual = Counter(everyone).most_common(1)[0][0]
        differing = [rank for rank, other in enumerate(everyone) if other != usual]
        if differing:
            problem = DataError(
                f"ranks {differing} must plan the step as all others do: lengths of documents, "
                "costs or versions differ"
            )
            mark_agreed(problem, range(len(everyone)))
            raise problem


def planned_steps(
    config: Config, mesh: Mesh, data: Dataset, *, runtime: Runtime, vocab_size: int
) -> StepPlanning:
    """Return the step source of a run with planned steps, see `hp_trainer.training.batches`.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        data: Dataset of the run.
        runtime: Runtime of the initialised world. All ranks call this together.
        vocab_size: Rows of the embedding.
    """
    costs = step_costs(config, runtime, vocab_size=vocab_size)
    assert runtime.control is not None
    return StepPlanning(config, mesh, data, costs=costs, control=runtime.control)


def step_costs(config: Config, runtime: Runtime, *, vocab_size: int) -> StepCosts:
    """Return the costs of documents in the stages of a run. All ranks call this together.

    Args:
        config: Validated config, the same on every rank.
        runtime: Runtime of the initialised world.
        vocab_size: Rows of the embedding.

    Raises:
        ConfigError: When `data.plan_costs` is no file of costs.
    """
    machine = machine_of(runtime) if runtime.device.type == "cuda" else MACHINES["cpu"]
    if config.data.plan_costs:
        return read_costs(Path(config.data.plan_costs), windows=config.model.windows)
    return learned_costs(config, machine, vocab_size=vocab_size)


def machine_of(runtime: Runtime) -> Machine:
    """Return the machine of a run, with the memory of its smallest GPU.

    All ranks call this together.

    Args:
        runtime: Runtime of the initialised world, with CUDA.
    """
    properties = torch.cuda.get_device_properties(runtime.device)
    num_local = runtime.info.local_world_size
    # Several ranks may share a GPU; each may also see but its own.
    most = -(-num_local // torch.cuda.device_count())
    mine = (str(properties.uuid), properties.total_memory, num_local, most)
    everyone = all_gather_json(mine, of=tuple[str, int, int, int], group=runtime.control)
    sharing = Counter(uuid for uuid, *_ in everyone)
    return machine_found(
        properties.name,
        memory=min(total / min(sharing[uuid], most) for uuid, total, _, most in everyone),
        node_size=max(size for _, _, size, _ in everyone),
    )
