"""The part of a run that one rank has: steps, evaluations, checkpoints."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hp_base.errors import DataError, RunDirectoryError
from hp_data import Tokenizer
from hp_data.dataset import Dataset
from hp_data.tokenizer import vocab_size_of
from hp_platform import Runtime, doing, new_group, shutdown
from hp_schedule import MetaStep, MetaStepType, Timeline
from hp_schedule.runtime import PipelineScheduleRuntime
from hp_trainer.config import Config, to_dict
from hp_trainer.launch.task import Worker
from hp_trainer.layout.mesh import build_mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.model import Microbatch
from hp_trainer.model.compiled import CompileCost
from hp_trainer.model.loss import loss_of
from hp_trainer.model.parallelize import build_pipeline
from hp_trainer.plugins import weights_of
from hp_trainer.training.batches import (
    Batches,
    PlannedStep,
    Share,
    StepSource,
    require_same_data,
    step_source,
)
from hp_trainer.training.checkpointer import (
    Checkpointer,
    Position,
    checkpoint_buffers,
    checkpoint_tensors,
    set_optimizer_steps,
)
from hp_trainer.training.gradients import (
    Agreed,
    Agreement,
    Flags,
    GradientNorm,
    Losses,
    Skips,
    describe_not_finite,
    reduce_gradients,
)
from hp_trainer.training.metrics import StepMetrics, Utilization
from hp_trainer.training.optimizer import Update, changed_rate, learning_rate
from hp_trainer.training.resuming import require_same_position

_COMPUTE: Final = frozenset(kind for kind in MetaStepType if kind.is_compute)


class Trainer:
    """Trains, evaluates, saves and resumes a run, of which this rank has a part.

    All ranks construct it and call its methods together.

    Attributes:
        step: Steps done, those that were skipped included.
        next_sequence: Global index of the first sequence that was not read.
        problems: Lines for people that nobody has printed yet.
        timeline: What this rank's pipeline did in the last step, and when.
        planned: The last planned step; None without a source of such.

    Args:
        config: Validated configuration.
        worker: This process.
        runtime: The initialised world.
        tokenizer: Tokenizer of the data.
    """

    def __init__(
        self, config: Config, worker: Worker, runtime: Runtime, tokenizer: Tokenizer
    ) -> None:
        self.config, self.worker, self.runtime, self.tokenizer = config, worker, runtime, tokenizer
        self.device = runtime.device
        self.step = 0
        self.next_sequence = 0
        self.skips = Skips()
        self.problems: list[str] = []
        self.timeline = Timeline()
        self._norms_before: list[Tensor] = []
        self._compiled = None if config.train.compile == "none" else CompileCost.so_far()
        self.beat("build")
        timeout = timedelta(seconds=config.timeouts.step)
        self.mesh = build_mesh(Layout.of(config.mesh), runtime, timeout=timeout)
        vocab_size = vocab_size_of(tokenizer, config.model.vocab_size)
        self.utilization = Utilization.of(config, runtime, vocab_size=vocab_size)
        self.pipeline = build_pipeline(
            config,
            self.mesh,
            runtime,
            vocab_size=vocab_size,
            timeout=timeout,
            on_step=self._on_pipeline_step,
            on_progress=partial(self.beat, "make weights"),
        )
        self.runner = self.ran = self.pipeline.training(loss_of)
        self.parameters = self.pipeline.parameters
        self.update = Update(config, self.parameters, self.pipeline.modules.values(), self.mesh)
        self.optimizer = self.update.optimizer
        self.norm = GradientNorm(self.parameters, self.mesh, control=runtime.control)
        self.agreement = Agreement(self.mesh, self.norm, device=self.device)
        self.batches = Batches(config, self.mesh, self.pipeline.sequence, device=self.device)
        self.data = self._open("train", seed=config.run.seed)
        self.held_out = self._open("eval", seed=None)
        require_same_data((self.data.digest, self.held_out.digest), control=runtime.control)
        self.planning = step_source(
            config, self.mesh, self.data, runtime=runtime, vocab_size=self.pipeline.vocab_size
        )
        self.planned: PlannedStep | None = None
        self.checkpointer = self._make_checkpointer(timeout)

    @property
    def is_main(self) -> bool:
        """Tell whether this rank writes and prints."""
        return self.mesh.rank == 0

    def close(self) -> None:
        """Leave the world. All ranks call this together, and none after an error."""
        if self.planning is not None:
            self.planning.close()
        self.pipeline.close()
        shutdown()

    def train_step(
        self, *, before_update: Callable[[Losses, float], None] | None = None
    ) -> tuple[StepMetrics, bool]:
        """Update the weights once.

        Args:
            before_update: Called with losses and gradient norm of the whole step, while the
                gradients are summed and not yet clipped.

        Returns:
            What happened, and whether some rank was asked to stop.

        Raises:
            NumericsError: On every rank, before the weights are touched, when the loss or a
                gradient is not finite and the step must not be skipped.
            RunDirectoryError: On every rank, when the run directory is gone.
        """
        with doing(f"step {self.step + 1}"):
            return self._train_step(before_update)

    def _train_step(
        self, before_update: Callable[[Losses, float], None] | None
    ) -> tuple[StepMetrics, bool]:
        began = time.perf_counter()
        shares, agreed = self._agreed_gradients()
        if agreed.flags.is_gone:
            raise RunDirectoryError(self.worker.folder.gone)
        losses = agreed.losses
        if agreed.flags.is_saved == self.runtime.info.world_size:
            self.problems += self.checkpointer.wait()
        grad_norm = math.sqrt(agreed.squares.sum())
        rate = learning_rate(self.step, self.config.train)
        skipped = None
        if all(map(math.isfinite, (*losses, grad_norm))):
            if before_update is not None:
                before_update(losses, grad_norm)
            with doing("optimizer"):
                self.beat("optimizer")
                self.update.apply(grad_norm, rate, max_norm=self.config.train.max_grad_norm)
                self.skips.done()
        else:
            skipped = self._skip(losses, shares, agreed.squares)
        self.step += 1
        self.next_sequence += self.config.train.global_batch_size
        seconds = time.perf_counter() - began
        metrics = self._metrics(agreed, grad_norm, rate, seconds, skipped)
        return metrics, agreed.flags.stop > 0

    def _agreed_gradients(self) -> tuple[Losses, Agreed]:
        """Compute gradients until the rows of all ranks fit; see `hp_trainer.model.buffers`.

        Returns:
            This rank's share of the losses, and what all ranks agree on.
        """
        buffers = self.pipeline.buffers
        with buffers.in_use():
            shares, busy = self.compute_gradients()
        overflow = buffers.overflowed()
        agreed = self._agree(shares, busy, overflow)
        if agreed.flags.overflowed:
            self.update.drop()
            needed = f"{overflow} rows" if overflow else "rows of others"
            self.problems.append(
                f"note: step {self.step + 1} is run again: {needed} from one rank to another do "
                f"not fit mesh.ep_buffer ({self.config.mesh.ep_buffer:g})"
            )
            shares, busy = self.compute_gradients()
            agreed = self._agree(shares, busy, 0)
        self.agreement.end_step()
        return shares, agreed

    def _agree(self, losses: Losses, busy: float, overflow: int) -> Agreed:
        is_gone = self.is_main and not self.worker.folder.is_here
        is_saved = self.checkpointer.is_written
        flags = Flags(self.worker.stop.requested, is_saved, is_gone, overflow > 0)
        return self.agreement.sum(losses, busy, flags)

    def _metrics(
        self, agreed: Agreed, grad_norm: float, rate: float, seconds: float, skipped: str | None
    ) -> StepMetrics:
        """Return the figures of the step that has just ended."""
        losses, memory = agreed.losses, agreed.memory
        rate_of_tokens = self.config.train.global_batch_size * self.config.data.seq_len / seconds
        metrics = StepMetrics(
            step=self.step,
            loss=losses.tokens,
            balance_loss=losses.balance,
            prediction_loss=losses.prediction if self.config.model.num_mtp_modules else None,
            grad_norm=grad_norm,
            lr=rate,
            tokens=self.next_sequence * self.config.data.seq_len,
            tokens_per_second=rate_of_tokens,
            step_seconds=seconds,
            cpu_seconds=agreed.cpu_seconds,
            peak_memory_bytes=memory.peak,
            bubble=1.0 - agreed.busy / self.runtime.info.world_size,
            mfu=None if self.utilization is None else self.utilization.at(rate_of_tokens),
            allocated_memory_bytes=memory.allocated,
            reserved_memory_bytes=memory.reserved,
            skipped=skipped,
        )
        if self.planned is not None:
            metrics = self.planned.told_in(metrics)
        return metrics if self._compiled is None else self._with_compile_cost(metrics)

    def _with_compile_cost(self, metrics: StepMetrics) -> StepMetrics:
        """Add what compilers have cost since the last step, if they have done anything."""
        assert self._compiled is not None
        before, self._compiled = self._compiled, CompileCost.so_far()
        seconds, graphs = self._compiled.since(before)
        if not graphs:
            return metrics
        self.problems.append(
            f"note: torch.compile ({self.config.train.compile}) compiled {graphs} graphs "
            f"in {seconds:.1f} s by step {metrics.step}"
        )
        return replace(metrics, compile_seconds=seconds, compiled_graphs=graphs)

    def _skip(self, losses: Losses, shares: Losses, squares: Tensor) -> str:
        """Drop what a step computed, see Note [skipped step]; returns why.

        Args:
            losses: Losses of the step.
            shares: This rank's part of the losses.
            squares: Squared gradient norms by entry, fp64 [entries].

        Raises:
            NumericsError: On every rank, when the config says to stop.
        """
        pairs = zip(losses, shares, strict=True)
        loss, share = next((pair for pair in pairs if not math.isfinite(pair[0])), (0.0, 0.0))
        problem = describe_not_finite(
            loss=loss,
            share=share,
            bad=self.norm.not_finite(squares),
            before=self._norms_before,
            parameters=self.parameters,
            group=self.runtime.control,
        )
        self.skips.add(f"step {self.step + 1}: {problem}", self.config.train)
        self.update.drop()
        self.problems.append(f"warning: step {self.step + 1} skipped: {problem}")
        return problem

    def compute_gradients(self) -> tuple[Losses, float]:
        """Run forward and backward of the next global batch, and sum gradients over the ranks.

        Returns:
            This rank's share of the losses, and the share of the pipeline's wall time that this
            rank spent computing.
        """
        self.beat("read data")
        runner = self.runner
        if self.planning is None:
            share = self.batches.cut(self.data, self.next_sequence, step=self.step)
        else:
            runner, share = self._planned_share(self.planning)
        args, kwargs, targets, num_targets, _ = share
        # Known before forward, and the same in every layout.
        runner.loss_scale = 1.0 / max(1, num_targets)
        began = time.perf_counter()
        result = runner.run_microbatches(args, kwargs, targets)
        self.pipeline.forget_casts()
        self.timeline = result.timeline  # a GPU is behind until this was read
        seconds = time.perf_counter() - began
        self.beat("reduce gradients", waiting=True)
        with doing("gradient reduction"):
            self._norms_before = reduce_gradients(self.parameters, self.mesh)
        microbatches: list[Microbatch] = [k["microbatch"] for k in kwargs]
        balances = [t for m in microbatches for t in m.balance_losses.values()]
        predictions = [t for m in microbatches for t in m.prediction_losses]
        busy = sum([span.end - span.start for span in self.timeline if span.step.type in _COMPUTE])
        loss = self._once(result.losses) * runner.loss_scale
        return Losses(loss, float(sum(balances)), self._once(predictions)), busy / seconds

    def _planned_share(self, planning: StepSource) -> tuple[PipelineScheduleRuntime, Share]:
        """Return what runs the next step by its plan, and this rank's share of its batch."""
        with doing("step plan"):
            self.planned = planned = planning.take(
                self.next_sequence, steps=self.config.train.steps - self.step
            )
        self.ran = planned.runner(self.pipeline, self.mesh)
        return self.ran, self.batches.planned(self.data, planned, step=self.step)

    def evaluate(self) -> float | None:
        """Return the mean cross-entropy on held-out text in nats per token, the same on all ranks.

        Returns:
            None: some rank was asked to stop in the middle.
        """
        with doing(f"step {self.step}", "evaluation"):
            return self._evaluate()

    def _evaluate(self) -> float | None:
        size = self.config.train.global_batch_size
        num_batches = min(
            self.config.train.eval_batches, max(1, self.held_out.num_sequences // size)
        )
        self.beat("read data")
        loss, num_targets = 0.0, 0
        for batch in range(num_batches):
            args, kwargs, targets, in_batch, _ = self.batches.cut(self.held_out, batch * size)
            num_targets += in_batch
            losses = self.runner.evaluate_microbatches(args, kwargs, targets).losses
            self.pipeline.forget_casts()
            self.beat("evaluate", waiting=True)
            shares = [self._once(losses), self.worker.stop.requested]
            total = torch.tensor(shares, dtype=torch.float64).to(self.device)
            dist.all_reduce(total, group=self.mesh.world)
            batch_loss, stops = total.tolist()
            if stops:
                return None
            loss += batch_loss
        return loss / max(1, num_targets)

    def save(self) -> Path:
        """Write a checkpoint of the state after :attr:`step`, and wait until it is on the disk.

        Returns:
            Its path.

        Raises:
            CheckpointError: On every rank; what was saved before is intact.
        """
        with doing(f"step {self.step}", "save"):
            self.problems += self.checkpointer.wait()
            return self.checkpointer.save(self.step)

    def resume(self) -> list[str]:
        """Load the newest good checkpoint of the run directory; returns what to say about it."""
        loaded = self.checkpointer.load()
        if loaded is None and self.config.run.init_from:
            return [self._start_from(Path(self.config.run.init_from))]
        if loaded is None:
            asked = bool(self.config.run.resume)
            return ["no checkpoint to resume from: starting at step 0"] if asked else []
        notes = [f"skipped damaged checkpoint {path}: {why}" for path, why in loaded.skipped]
        require_same_position(loaded.extra, self.config, loaded.path)
        position = Position.of(loaded)
        if position.data is not None and position.data != self.data.digest:
            raise DataError(f"{loaded.path} was trained on other data than {self.worker.data_dir}")
        self.update.update_tied_copies()
        self.step, self.next_sequence = position.step, position.next_sequence
        self.skips = Skips(position.skipped, position.skipped_in_a_row)
        set_optimizer_steps(self.optimizer, self.step - self.skips.total)
        saved = (loaded.extra.get("config") or {}).get("train", {})
        rate = changed_rate(saved, self.config.train, self.step)
        return [*notes, f"resumed from {loaded.path}", *rate]

    def _make_checkpointer(self, timeout: timedelta) -> Checkpointer:
        """Make what saves and loads, with a group of its own: a save can run behind a step."""
        group = new_group(
            [range(self.runtime.info.world_size)],
            name="checkpoint",
            backend="gloo",
            timeout=timeout,
        )
        assert group is not None, "every rank is in it"
        return Checkpointer(
            self.worker.run_dir / "checkpoints",
            self.config.train,
            group=group,
            tensors=self.tensors,
            extra=self._extra,
            on_progress=self._on_checkpoint,
        )

    def _extra(self) -> dict[str, Any]:
        """Return what a checkpoint says besides tensors."""
        return {
            "step": self.step,
            "next_sequence": self.next_sequence,
            "skipped": self.skips.total,
            "skipped_in_a_row": self.skips.in_a_row,
            "data": self.data.digest,
            "seed": self.config.run.seed,
            "layout": str(self.mesh.layout),
            "config": to_dict(self.config),
        }

    def _start_from(self, folder: Path) -> str:
        """Take the weights of a Hugging Face model; every rank reads what it has."""
        named = {k: v for k, v in self.tensors().items() if k.startswith("model.")}
        tensors = {name.removeprefix("model."): tensor for name, tensor in named.items()}
        weights_of(str(folder)).load_weights(folder, tensors, group=self.runtime.control)
        self.update.update_tied_copies()
        return f"started from the weights of {folder}"

    def warn(self, problem: str) -> None:
        """Have the console say it, or where another rank has that, do so by itself."""
        if self.is_main:
            self.problems.append(problem)
        else:
            sys.stderr.write(f"{problem}\n")

    def _once(self, losses: Sequence[Tensor]) -> float:
        """Return this rank's part of a sum over all ranks; tensor-parallel ranks all have it."""
        return float(sum(losses)) if self.mesh.index("tp") == 0 else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this rank, by global name; memory is shared."""
        tensors = checkpoint_tensors(self.parameters, self.optimizer, self.mesh)
        return tensors | checkpoint_buffers(self.pipeline.modules.values())

    def _open(self, split: str, *, seed: int | None) -> Dataset:
        data = self.config.data
        return Dataset.open(
            self.worker.data_dir,
            split,
            seq_len=data.seq_len,
            seed=seed,
            separate=data.documents == "separate",
            packing=data.packing,
        )

    def _on_pipeline_step(self, step: MetaStep) -> None:
        self.worker.heartbeats.beat(step=self.step, phase=str(step))

    def _on_checkpoint(self, phase: str, *, waiting: bool = False) -> None:
        self.worker.heartbeats.beat(step=self.step, phase=f"checkpoint: {phase}", waiting=waiting)

    def beat(self, phase: str, *, waiting: bool = False) -> None:
        """Say what this rank does now, for the launcher that watches it."""
        self.worker.heartbeats.beat(step=self.step, phase=phase, waiting=waiting)
