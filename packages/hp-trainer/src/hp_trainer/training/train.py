"""The training loop: steps, evaluations and saves in their order, and what it prints."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hp_base.errors import PREEMPTED, NumericsError
from hp_platform import Runtime, doing, failing_together, mark_agreed, shutdown
from hp_trainer import __version__
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import Layout
from hp_trainer.plugins import plugins
from hp_trainer.training.generate import continue_text
from hp_trainer.training.gradients import GradientNorm
from hp_trainer.training.metrics import METRICS, Console, MetricsWriter
from hp_trainer.training.profiler import Profiler
from hp_trainer.training.report import planned_and_actual, write_report
from hp_trainer.training.startup import Stopped, connect, gpu_settings_in_force, prepare_data
from hp_trainer.training.trainer import Trainer


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
        status = run(trainer)
        trainer.close()
    return status


def start(config: Config, worker: Worker) -> Trainer:
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


def run(trainer: Trainer) -> int:
    """Resume if there is something to resume from, train, evaluate, save, report.

    Returns:
        Exit status: 0 done, 75 stopped on request after saving.
    """
    notes = trainer.resume()
    train = trainer.config.train
    if trainer.step >= train.steps:
        # The launcher finds this out by itself, unless ranks were lost after the last save.
        if trainer.is_main:
            sys.stdout.write(f"nothing to do: step {trainer.step} of {train.steps} is done\n")
        return 0
    loop = _Loop(trainer)
    loop.begin(notes)
    try:
        with garbage_collection(every=train.collect_every) as collect_after:
            return loop.run(collect_after)
    except NumericsError as error:
        mark_agreed(error, range(trainer.runtime.info.world_size))
        # All ranks are here, so what they are saving can be finished; less is lost then.
        trainer.problems += trainer.checkpointer.wait()
        loop.tell()
        raise
    finally:
        loop.close()


class _Loop:
    """Runs a trainer to the end of its run, and prints and writes what happens."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._train = trainer, trainer.config.train
        is_main = trainer.is_main
        self._profiler = Profiler(self._train, trainer.worker, trainer.device, tell=trainer.warn)
        self._console = Console(enabled=is_main, total=self._train.steps, done=trainer.step)
        self._metrics = MetricsWriter(
            trainer.worker.folder if is_main else None,
            resume_step=trainer.step,
            tensorboard=trainer.config.run.tensorboard,
        )

    def begin(self, notes: list[str]) -> None:
        """Print the first lines of a run.

        Args:
            notes: Lines about what it resumes from.
        """
        trainer = self._trainer
        lines = banner(trainer.config, trainer.mesh, trainer.runtime, trainer.norm)
        if trainer.data.packs is not None:
            share = f"{trainer.data.packs.density:.2%} of positions"
            sequences = f"{trainer.data.num_sequences} sequences"
            lines.append(f"data   {sequences} of whole documents: {share}")
        for line in (*lines, *notes):
            self._console.print(line)
        if trainer.planning is not None:
            self._console.print(f"plan   {trainer.planning}")

    def run(self, collect_after: Callable[[int], None]) -> int:
        """Train until the last step, or until some rank is asked to stop.

        Args:
            collect_after: See `garbage_collection`.

        Returns:
            Exit status.
        """
        trainer, train, console = self._trainer, self._train, self._console
        stopped = False
        if trainer.step == 0 and train.eval_every:
            before = trainer.evaluate()
            stopped = before is None
            if before is not None:
                console.print(f"before training: eval loss {before:.4f}")
        while trainer.step < train.steps and not stopped:
            stopped = self._step(collect_after)
        path = trainer.save()
        self.tell()
        if stopped and trainer.step < train.steps:
            console.print(f"stopped on request after step {trainer.step}, saved {path}")
            return PREEMPTED
        self._finish()
        return 0

    def _step(self, collect_after: Callable[[int], None]) -> bool:
        """Train for one step, and do what is due after it; returns whether to stop."""
        trainer, train = self._trainer, self._train
        with self._profiler.watching(trainer.step + 1):
            metrics, stopped = trainer.train_step()
        self.tell()
        if self._is_due(train.eval_every) and not stopped:
            eval_loss = trainer.evaluate()
            stopped = eval_loss is None
            metrics = replace(metrics, eval_loss=eval_loss)
        self._metrics.write(metrics)
        self._console.advance()
        collect_after(trainer.step)
        is_last = stopped or trainer.step == train.steps
        if self._is_due(train.log_every) or is_last or metrics.eval_loss is not None:
            self._console.print(str(metrics))
        # The final save follows the last step at once.
        if self._is_due(train.save_every) and not is_last:
            with doing(f"step {trainer.step}", "save"):
                trainer.problems += trainer.checkpointer.begin(trainer.step)
            self.tell()
        return stopped

    def tell(self) -> None:
        """Print what went wrong without ending the run."""
        problems = self._trainer.problems
        while problems:
            self._console.print(problems.pop(0))

    def close(self) -> None:
        """Finish the files and take the progress bar away."""
        self._metrics.close()
        self._console.close()

    def _finish(self) -> None:
        """Print a sample and draw the pictures of a run that is done."""
        trainer, train = self._trainer, self._train
        timelines = planned_and_actual(
            trainer.ran.schedule, trainer.timeline, trainer.mesh, control=trainer.runtime.control
        )
        if train.sample_tokens:
            trainer.beat("sample")
            prompt = train.sample_prompt
            text = continue_text(
                trainer.pipeline, trainer.tokenizer, prompt, num_tokens=train.sample_tokens
            )
            self._console.print(f"sample:\n{prompt}{text}")
        if trainer.is_main:
            write_report(trainer.worker.folder, timelines)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._trainer.step % every == 0


def banner(config: Config, mesh: Mesh, runtime: Runtime, norm: GradientNorm) -> list[str]:
    """Return the first lines of a run: model size, mesh and batch.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        runtime: Device and backend.
        norm: Gradient norm, which has the sizes of all parameters of all ranks.
    """
    model, train = config.model, config.train
    total = sum(norm.sizes.values())
    inactive = 1 - model.top_k / model.num_experts if model.num_experts else 0.0
    active = total - inactive * sum(n for name, n in norm.sizes.items() if name.endswith("]"))
    where = f"{runtime.info.world_size} processes on {runtime.device.type} ({runtime.backend})"
    schedule = f"{config.pipeline.schedule}, {config.pipeline.stages_per_rank} stages per rank"
    experts = (
        f"{model.num_experts} experts, top {model.top_k}, {model.num_shared_experts} shared"
        if model.num_experts
        else "dense"
    )
    size = f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active per token"
    batch = f"{train.global_batch_size} sequences x {config.data.seq_len} tokens"
    lines = [
        f"hp-trainer {__version__}, torch {torch.__version__}: {where}",
        f"mesh   {mesh.layout}{gathered_by(config, mesh.layout)}, schedule {schedule}",
        f"model  {size}: {model.num_layers} layers of {model.dim}, {experts}",
        f"batch  {batch} in microbatches of {train.microbatch_size}, {train.steps} steps",
    ]
    for notes in plugins("hp_trainer.notes"):
        lines += notes(config)
    if train.compile != "none":
        lines.append(f"compile {train.compile}: in the first steps; what it takes is in {METRICS}")
    if runtime.device.type == "cuda":
        lines.append(f"gpu    {' '.join(gpu_settings_in_force(os.environ)) or 'nothing set'}")
    return lines


def gathered_by(config: Config, layout: Layout) -> str:
    """Say how parameters are gathered, as a clause behind a layout; nothing where none are.

    Args:
        config: Configuration of the run.
        layout: Its layout.
    """
    if not any(stage.is_sharded for stage in layout.stages):
        return ""
    return f", gathered by {'block' if config.mesh.gather == 'block' else 'stage'}"


@contextmanager
def garbage_collection(*, every: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage every so many steps and at no other time.

    What exists before is not looked at any more until the end. Left alone the collector runs
    whenever enough objects were made: in the middle of a step, on every rank at another moment, and
    all others wait. It walks through everything that the modules of torch have ever made: 2 to 11 %
    of the CPU time of a small model, in profiles of this package and of torch alone. A step leaves
    no cycles behind, so there is next to nothing to find.

    Args:
        every: Number of steps; 0: whenever Python likes.

    Yields:
        Function to be called with the number of every step that has ended, which is the same on
        all ranks, so that none waits for another.
    """

    def after(step: int) -> None:
        if every and step % every == 0:
            gc.collect()

    if every:
        gc.collect()
        gc.freeze()
        gc.disable()
    try:
        yield after
    finally:
        if every:
            gc.unfreeze()
            gc.enable()
