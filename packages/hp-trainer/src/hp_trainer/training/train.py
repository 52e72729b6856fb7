"""The training loop of one rank.

Note [one agreed step]: whatever one rank learns on its own (a stop was requested, a gradient is
not finite) goes into the vector that all ranks sum at the end of every step, so that all of them
act on it at the same step. No rank ever decides alone.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hp_base.errors import PREEMPTED, DataError, NumericsError, RunDirectoryError
from hp_data import Tokenizer
from hp_data.dataset import Dataset
from hp_data.tokenizer import vocab_size_of
from hp_expert import take_loads, update_correction_biases
from hp_platform import Runtime, doing, failing_together, mark_agreed, new_group, shutdown
from hp_platform.host_reads import arrived
from hp_schedule import MetaStep, MetaStepType, Timeline
from hp_schedule.runtime import PipelineScheduleRuntime
from hp_trainer.config import Config, to_dict
from hp_trainer.config.timeouts import Timeouts
from hp_trainer.launch.task import Worker
from hp_trainer.layout.mesh import build_mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.model import Microbatch
from hp_trainer.model.compiled import CompileCost
from hp_trainer.model.loss import loss_of
from hp_trainer.model.parallelize import build_pipeline
from hp_trainer.plugins import weights_of
from hp_trainer.training.banner import banner
from hp_trainer.training.batches import Batches, PlannedStep, Share
from hp_trainer.training.checkpointer import Checkpointer
from hp_trainer.training.finiteness import Skips, describe_not_finite
from hp_trainer.training.garbage import garbage_collection
from hp_trainer.training.generate import continue_text
from hp_trainer.training.gradients import GradientNorm, clip_gradients, reduce_gradients
from hp_trainer.training.metrics import Console, MemoryUse, MetricsWriter, StepMetrics
from hp_trainer.training.optimizer import build_optimizer, changed_rate, learning_rate
from hp_trainer.training.position import Position
from hp_trainer.training.profiler import Profiler
from hp_trainer.training.report import planned_and_actual, write_report
from hp_trainer.training.resuming import require_same_position
from hp_trainer.training.startup import connect, prepare_data, require_same_data
from hp_trainer.training.state import (
    checkpoint_buffers,
    checkpoint_tensors,
    set_optimizer_steps,
)
from hp_trainer.training.step_source import StepSource, step_source
from hp_trainer.training.utilization import Utilization
from hp_trainer.training.waiting import Stopped


def main(config: Config, *, worker: Worker) -> int:
    """Train as one rank of a world that is being started now.

    Args:
        config: Validated; the same on every rank.
        worker: This process's place, run directory, heartbeat and stop flag.

    Returns:
        Exit status: 0 done, 75 stopped on request after saving. After an error the process groups
        are left as they are: NCCL would wait for operations that other ranks never join, and
        nobody would learn of the error. The process is to be ended.
    """
    with failing_together(everything=True):
        try:
            trainer = start(config, worker)
        except Stopped:
            shutdown()
            return PREEMPTED
        status = trainer.run()
        trainer.close()
    return status


def start(config: Config, worker: Worker) -> "Trainer":
    """Connect to the other ranks, prepare the data and build the run. All ranks call it together.

    Args:
        config: Validated; the same on every rank.
        worker: This process.

    Raises:
        Stopped: When the ranks were asked to stop before there was anything to save.
    """
    runtime = connect(config, worker)
    with doing("prepare data"):
        tokenizer = prepare_data(config, worker, runtime)
    with doing("build"):
        return Trainer(config, worker, runtime, tokenizer)


_COMPUTE: Final = frozenset(kind for kind in MetaStepType if kind.is_compute)


class Losses(NamedTuple):
    """What a step's loss consists of; of one rank its share, or the sum over all of them.

    Attributes:
        tokens: Mean cross-entropy of the next token.
        balance: The load-balancing term, as it is added.
        prediction: Mean cross-entropy of all modules of multi-token prediction; `model.mtp_weight`
            times that is added.
    """

    tokens: float
    balance: float
    prediction: float


class Trainer:
    """A run as one rank sees it. All ranks construct it and call its methods together.

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
        self._cpu_before = self._cpu_told = time.process_time()
        self._compiled = None if config.train.compile == "none" else CompileCost.so_far()
        self._beat("build")
        timeout = timedelta(seconds=Timeouts.of(config).step)
        self.mesh = build_mesh(Layout.of(config.mesh), runtime, timeout=timeout)
        vocab_size = vocab_size_of(tokenizer, config.model.vocab_size)
        self.utilization = Utilization.of(config, runtime, vocab_size=vocab_size)
        self.profiler = Profiler(config.train, worker, self.device, tell=self._warn)
        self.pipeline = build_pipeline(
            config,
            self.mesh,
            runtime,
            vocab_size=vocab_size,
            timeout=timeout,
            on_step=self._on_pipeline_step,
            on_progress=partial(self._beat, "make weights"),
        )
        self.runner = self.ran = self.pipeline.training(loss_of)
        self.parameters = self.pipeline.parameters
        self.optimizer = build_optimizer(self.parameters, config.train)
        self.norm = GradientNorm(self.parameters, self.mesh, control=runtime.control)
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

    def run(self) -> int:
        """Resume if there is something to resume from, train, evaluate, save, report.

        Returns:
            Exit status: 0 done, 75 stopped on request after saving.
        """
        notes = self.resume()
        train, run = self.config.train, self.config.run
        if self.step >= train.steps:
            # The launcher finds this out by itself, unless ranks were lost after the last save.
            if self.is_main:
                sys.stdout.write(f"nothing to do: step {self.step} of {train.steps} is done\n")
            return 0
        console = Console(enabled=self.is_main, total=train.steps, done=self.step)
        metrics = MetricsWriter(
            self.worker.folder if self.is_main else None,
            resume_step=self.step,
            tensorboard=run.tensorboard,
        )
        lines = banner(self.config, self.mesh, self.runtime, self.norm)
        if self.data.packs is not None:
            share = f"{self.data.packs.density:.2%} of positions"
            lines.append(f"data   {self.data.num_sequences} sequences of whole documents: {share}")
        for line in (*lines, *notes):
            console.print(line)
        if self.planning is not None:
            console.print(f"plan   {self.planning}")
        try:
            with garbage_collection(every=train.collect_every) as collect_after:
                return self._run_to_end(console, metrics, collect_after)
        except NumericsError as error:
            mark_agreed(error, range(self.runtime.info.world_size))
            # All ranks are here, so what they are saving can be finished; less is lost then.
            self.problems += self.checkpointer.wait()
            self._tell(console)
            raise
        finally:
            metrics.close()
            console.close()

    def _run_to_end(
        self, console: Console, metrics: MetricsWriter, collect_after: Callable[[int], None]
    ) -> int:
        train = self.config.train
        stopped = False
        if self.step == 0 and train.eval_every:
            before = self.evaluate()
            stopped = before is None
            if before is not None:
                console.print(f"before training: eval loss {before:.4f}")
        while self.step < train.steps and not stopped:
            with self.profiler.watching(self.step + 1):
                step_metrics, stopped = self.train_step()
            self._tell(console)
            if self._is_due(train.eval_every) and not stopped:
                eval_loss = self.evaluate()
                stopped = eval_loss is None
                step_metrics = replace(step_metrics, eval_loss=eval_loss)
            metrics.write(step_metrics)
            console.advance()
            collect_after(self.step)
            is_last = stopped or self.step == train.steps
            if self._is_due(train.log_every) or is_last or step_metrics.eval_loss is not None:
                console.print(str(step_metrics))
            # The final save follows the last step at once.
            if self._is_due(train.save_every) and not stopped and self.step < train.steps:
                with doing(f"step {self.step}", "save"):
                    self.problems += self.checkpointer.begin(self.step)
                self._tell(console)
        path = self.save()
        self._tell(console)
        if stopped and self.step < train.steps:
            console.print(f"stopped on request after step {self.step}, saved {path}")
            return PREEMPTED
        self._finish(console)
        return 0

    def close(self) -> None:
        """Leave the world. All ranks call this together, and none after an error."""
        if self.planning is not None:
            self.planning.close()
        self.pipeline.close()
        shutdown()

    def train_step(
        self, *, before_update: Callable[[Losses, float], None] | None = None
    ) -> tuple[StepMetrics, bool]:
        """One update of the weights.

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
        train = self.config.train
        buffers = self.pipeline.buffers
        with buffers.in_use():
            shares, busy = self.compute_gradients()
        overflow = buffers.overflowed()
        scalars, squares, memory = self._agree(shares, busy, overflow)
        if scalars[-1]:  # see Note [Run again]
            self._drop_gradients()
            needed = f"{overflow} rows" if overflow else "rows of others"
            self.problems.append(
                f"note: step {self.step + 1} is run again: {needed} from one rank to another do "
                f"not fit mesh.ep_buffer ({self.config.mesh.ep_buffer:g})"
            )
            shares, busy = self.compute_gradients()
            scalars, squares, memory = self._agree(shares, busy, 0)
        self._cpu_before = self._cpu_told
        *summed, busy, cpu_seconds, stops, written, gone, _ = scalars
        if gone:
            raise RunDirectoryError(self.worker.folder.gone)
        losses = Losses(*summed)
        if written == self.runtime.info.world_size:
            self.problems += self.checkpointer.wait()
        grad_norm = math.sqrt(squares.sum())
        rate = learning_rate(self.step, train)
        skipped = None
        if all(map(math.isfinite, (*losses, grad_norm))):
            if before_update is not None:
                before_update(losses, grad_norm)
            with doing("optimizer"):
                self._update(grad_norm, rate)
        else:
            skipped = self._skip(losses, shares, squares)
        self.step += 1
        self.next_sequence += train.global_batch_size
        seconds = time.perf_counter() - began
        rate_of_tokens = train.global_batch_size * self.config.data.seq_len / seconds
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
            cpu_seconds=cpu_seconds,
            peak_memory_bytes=memory.peak,
            bubble=1.0 - busy / self.runtime.info.world_size,
            mfu=None if self.utilization is None else self.utilization.at(rate_of_tokens),
            allocated_memory_bytes=memory.allocated,
            reserved_memory_bytes=memory.reserved,
            skipped=skipped,
        )
        if self.planned is not None:
            metrics = self.planned.told_in(metrics)
        return metrics if self._compiled is None else self._with_compile_cost(metrics), stops > 0

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

    def _agree(
        self, losses: Losses, busy: float, overflow: int
    ) -> tuple[list[float], Tensor, MemoryUse]:
        """Sum what ranks know of a step; the last scalar counts those whose rows did not fit."""
        self._cpu_told = time.process_time()
        is_gone = self.is_main and not self.worker.folder.is_here
        flags = [self.worker.stop.requested, self.checkpointer.is_written, is_gone, overflow > 0]
        return self._sum_over_ranks([*losses, busy, self._cpu_told - self._cpu_before, *flags])

    def _drop_gradients(self) -> None:
        """Forget what a step computed."""
        self.optimizer.zero_grad()
        for stage in self.pipeline.modules.values():
            take_loads(stage)

    def _update(self, grad_norm: float, rate: float) -> None:
        """Clip the gradients and move weights and correction biases by them."""
        self._beat("optimizer")
        clip_gradients(self.parameters, grad_norm, self.config.train.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._update_tied_copies()
        self.optimizer.zero_grad()
        self._balance_experts()
        self.skips.done()

    def _skip(self, losses: Losses, shares: Losses, squares: Tensor) -> str:
        """Drop what a step computed, see Note [skipped step]; returns why.

        Args:
            losses: Losses of the step.
            shares: This rank's part of them.
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
        self._drop_gradients()
        self.problems.append(f"warning: step {self.step + 1} skipped: {problem}")
        return problem

    def compute_gradients(self) -> tuple[Losses, float]:
        """Forward and backward of the next global batch, gradients summed over the ranks.

        Returns:
            This rank's share of the losses, and the share of the pipeline's wall time that this
            rank spent computing.
        """
        self._beat("read data")
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
        self._beat("reduce gradients", waiting=True)
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
        """Mean cross-entropy on held-out text, in nats per token, the same number on all ranks.

        Returns:
            None when some rank was asked to stop in the middle.
        """
        with doing(f"step {self.step}", "evaluation"):
            return self._evaluate()

    def _evaluate(self) -> float | None:
        size = self.config.train.global_batch_size
        num_batches = min(
            self.config.train.eval_batches, max(1, self.held_out.num_sequences // size)
        )
        self._beat("read data")
        loss, num_targets = 0.0, 0
        for batch in range(num_batches):
            args, kwargs, targets, in_batch, _ = self.batches.cut(self.held_out, batch * size)
            num_targets += in_batch
            losses = self.runner.evaluate_microbatches(args, kwargs, targets).losses
            self.pipeline.forget_casts()
            self._beat("evaluate", waiting=True)
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
        self._update_tied_copies()
        self.step, self.next_sequence = position.step, position.next_sequence
        self.skips = Skips(position.skipped, position.skipped_in_a_row)
        set_optimizer_steps(self.optimizer, self.step - self.skips.total)
        saved = (loaded.extra.get("config") or {}).get("train", {})
        rate = changed_rate(saved, self.config.train, self.step)
        return [*notes, f"resumed from {loaded.path}", *rate]

    def _make_checkpointer(self, timeout: timedelta) -> Checkpointer:
        """What saves and loads; it has a group of its own, so that a save can run behind a step."""
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
        self._update_tied_copies()
        return f"started from the weights of {folder}"

    def _update_tied_copies(self) -> None:
        for parameter in self.parameters:
            if parameter.tied_copies:
                parameter.update_tied_copies()

    def _warn(self, problem: str) -> None:
        """Have the console say it, or where another rank has that, do so by itself."""
        if self.is_main:
            self.problems.append(problem)
        else:
            sys.stderr.write(f"{problem}\n")

    def _tell(self, console: Console) -> None:
        """Print what went wrong without ending the run."""
        while self.problems:
            console.print(self.problems.pop(0))

    def _finish(self, console: Console) -> None:
        train = self.config.train
        timelines = planned_and_actual(
            self.ran.schedule, self.timeline, self.mesh, control=self.runtime.control
        )
        if train.sample_tokens:
            self._beat("sample")
            text = continue_text(
                self.pipeline, self.tokenizer, train.sample_prompt, num_tokens=train.sample_tokens
            )
            console.print(f"sample:\n{train.sample_prompt}{text}")
        if self.is_main:
            write_report(self.worker.folder, timelines)

    def _once(self, losses: Sequence[Tensor]) -> float:
        """This rank's part of a sum over all ranks of what tensor-parallel ranks all have."""
        return float(sum(losses)) if self.mesh.index("tp") == 0 else 0.0

    def _sum_over_ranks(self, scalars: Sequence[float]) -> tuple[list[float], Tensor, MemoryUse]:
        """Sum scalars and squared gradient norms over all ranks; see Note [one agreed step].

        Returns:
            The sums, the squares by entry (fp64, CPU), and of memory the largest of any rank.
        """
        mine = torch.tensor(MemoryUse.of(self.device).known, dtype=torch.float64)
        memory = torch.zeros(self.runtime.info.world_size, len(mine), dtype=torch.float64)
        memory[self.mesh.rank] = mine
        head = torch.cat((torch.tensor(scalars, dtype=torch.float64), memory.flatten()))
        vector = torch.cat((head.to(self.device), self.norm.local_squares(self.device)))
        dist.all_reduce(vector, group=self.mesh.world)
        values, memories, squares = vector.cpu().split(
            [len(scalars), memory.numel(), len(self.norm.sizes)]
        )
        squares = arrived(squares, purpose="squared gradient norms")
        largest = memories.view_as(memory).amax(dim=0)
        return values.tolist(), squares, MemoryUse(*map(int, largest.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this rank, by global name; memory is shared."""
        tensors = checkpoint_tensors(self.parameters, self.optimizer, self.mesh)
        return tensors | checkpoint_buffers(self.pipeline.modules.values())

    def _balance_experts(self) -> None:
        """Move the correction biases of routers by the load of the step; all ranks the same way."""
        model = self.config.model
        if model.correction_bias and model.correction_rate > 0:
            for stage in self.pipeline.modules.values():
                update_correction_biases(
                    stage, rate=model.correction_rate, group=self.mesh.groups["tokens"]
                )

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

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _on_pipeline_step(self, step: MetaStep) -> None:
        self.worker.heartbeats.beat(step=self.step, phase=str(step))

    def _on_checkpoint(self, phase: str, *, waiting: bool = False) -> None:
        self.worker.heartbeats.beat(step=self.step, phase=f"checkpoint: {phase}", waiting=waiting)

    def _beat(self, phase: str, *, waiting: bool = False) -> None:
        self.worker.heartbeats.beat(step=self.step, phase=phase, waiting=waiting)
