"""One rank of a run that is recorded, and the training job of hp-train as such a job."""

import importlib
import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from hp_expert import MoE, Routing
from hp_platform.testing import CHOICES, SCORES, Part, Recorder
from hp_train.config import Config
from hp_train.launch.task import Worker
from hp_train.model import Microbatch
from hp_train.model.block import Block
from hp_train.parameters import Parameter
from hp_train.train import Losses, start
from hp_train.verify.job import Build, Job

ENTRY = "hp_train.verify.rank:main"
TRAINER = "hp_train.verify.rank:TrainerJob"
REQUEST, RECORDING = "verify.json", "recording"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher asks of a run, in a file of its run directory.

    Attributes:
        job: ``module:callable``, a `Build`.
        steps: To train.
        tensor_steps: Steps whose tensors are recorded, counted from 1; empty: all.
    """

    job: str
    steps: int
    tensor_steps: tuple[int, ...] = ()


def main(config: Config, *, worker: Worker) -> int:
    """Build the job, train and record; see :class:`Request`."""
    text = (worker.run_dir / REQUEST).read_bytes()
    request = msgspec.json.decode(text, type=Request)
    job = load_build(request.job)(config, worker)
    record = Recorder(
        worker.run_dir / RECORDING,
        rank=worker.info.rank,
        tensor_steps=frozenset(request.tensor_steps) or None,
    )
    for _ in range(request.steps):
        job.train_step(record)
        record.end_step()
    job.close()
    return 0


def load_build(name: str) -> Build:
    """Import ``module:callable``.

    Raises:
        ImportError: When there is no such module.
        AttributeError: When it has no such callable.
    """
    module, _, attribute = name.partition(":")
    build: Build = getattr(importlib.import_module(module), attribute)
    return build


class TrainerJob(Job):
    """The training job of hp-train.

    Args:
        config: Of the run; its layout is the one to be judged.
        worker: This process.
    """

    def __init__(self, config: Config, worker: Worker) -> None:
        self.trainer = start(config, worker)
        self.config = config
        # In fp64 a tie within rounding does not come up.
        if config.train.dtype != "float64":
            self._listen()

    def train_step(self, record: Recorder) -> None:
        """See :class:`Job`."""
        self._record = record

        def before_update(losses: Losses, grad_norm: float) -> None:
            record.add_scalar("loss", losses.tokens)
            record.add_scalar("balance loss", losses.balance)
            record.add_scalar("prediction loss", losses.prediction)
            # Backward comes from the end of the model.
            record.add("gradient", self._parts("gradient", reverse=True))
            record.add_scalar("norm", grad_norm)

        self.trainer.train_step(before_update=before_update)
        record.add("weight", self._parts("weight"))

    def close(self) -> None:
        """See :class:`Job`."""
        self.trainer.close()

    def _parts(
        self, of: Literal["gradient", "weight"], *, reverse: bool = False
    ) -> Mapping[str, Part]:
        parameters = self.trainer.parameters
        found = {}
        for parameter in reversed(parameters) if reverse else parameters:
            tensor = parameter.local.grad if of == "gradient" else parameter.local.detach()
            assert tensor is not None, f"{parameter.name} has no gradient"
            found[parameter.name] = _part(parameter, tensor)
        return found

    def _listen(self) -> None:
        """Have every layer of experts tell which ones it chose, for each sequence of the step."""
        current = threading.local()

        def enter(_block: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            microbatch: Microbatch = kwargs["microbatch"]
            key = microbatch.key
            current.places = None
            if key is not None:
                current.places = key.sequence_index.tolist(), key.positions.tolist()

        def leave(name: str) -> Any:
            def hook(moe: MoE, _args: Any, result: tuple[Tensor, Routing]) -> None:
                places = getattr(current, "places", None)
                if places is not None:
                    self._add_choices(name, moe, result[1], *places)

            return hook

        for stage in self.trainer.pipeline.modules.values():
            for name, module in stage.named_modules():
                if isinstance(module, Block):
                    module.register_forward_pre_hook(enter, with_kwargs=True)
                if isinstance(module, MoE):
                    module.register_forward_hook(leave(name))

    def _add_choices(
        self, name: str, moe: MoE, routing: Routing, sequences: list[int], positions: list[int]
    ) -> None:
        bias = moe.router.correction_bias
        scores = routing.scores.detach() if bias is None else routing.scores.detach() + bias
        batch, length = self.config.train.global_batch_size, self.config.data.seq_len
        for quantity, rows in ((CHOICES, routing.chosen), (SCORES, scores)):
            width = rows.shape[-1]
            by_sequence = rows.view(len(sequences), len(positions), width)
            for index, row in zip(sequences, by_sequence, strict=True):
                for first, last in _runs(positions):
                    part = row[None, first:last]
                    offset = (index - self.trainer.next_sequence, positions[first], 0)
                    self._record.add(quantity, {name: Part(part, (batch, length, width), offset)})


def _runs(positions: list[int]) -> list[tuple[int, int]]:
    """First and last + 1 index of every run of positions that follow each other."""
    breaks = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return list(itertools.pairwise([0, *breaks, len(positions)]))


def _part(parameter: Parameter, local: Tensor) -> Part:
    """What this rank holds of a tensor that is cut as a parameter is."""
    return Part(local, parameter.shape, tuple(start for start, _ in parameter.span))


def request_run(run_dir: Path, request: Request) -> None:
    """Leave a request where the ranks find it."""
    (run_dir / REQUEST).write_bytes(msgspec.json.encode(request))
