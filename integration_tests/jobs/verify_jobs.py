"""Training jobs for the tests of hp verify: right ones, a wrong one, and one that hangs."""

import time

import torch
import torch.distributed as dist
from torch import nn

from hp_platform import initialize, shutdown
from hp_train.verify import Job
from hp_train.verify.own_trainer import TrainerJob
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.layout import vocabulary
from hp_trainer.model import parallelize
from hp_trainer.model.randomness import generator
from hp_verify.comparing.ties import CHOICES, SCORES
from hp_verify.recording.values import Part, ValueRecorder


class Hanging(TrainerJob):
    """Rank 1 never comes to its second step."""

    def train_step(self, record: ValueRecorder) -> None:
        if self.trainer.step == 1 and self.trainer.mesh.rank == 1:
            time.sleep(3600)
        super().train_step(record)


class TiledLoss(TrainerJob):
    """Several ranks go through the logits in tiles; one process has all of them at once."""

    def __init__(self, config: Config, worker: Worker) -> None:
        if config.world_size > 1:
            vocabulary.TILE_BYTES = 8 * 11 * config.data.seq_len
            vocabulary._TOKENS = config.data.seq_len
        super().__init__(config, worker)


class GathersWide(TrainerJob):
    """What runs under the name "wide" gathers parameters as they are, and casts them then."""

    def __init__(self, config: Config, worker: Worker) -> None:
        if config.run.name == "wide":
            setattr(parallelize, "gather_narrow", lambda _stage: None)  # noqa: B010 - mypy
        super().__init__(config, worker)


class OwnModel(Job):
    """Data-parallel training of somebody's own model: two matrices, the second one sharded."""

    def __init__(self, config: Config, worker: Worker) -> None:
        self.runtime = initialize(worker.info, device_type=config.launch.device)
        self.rank, self.size = worker.info.rank, worker.info.world_size
        self.batch, self.step = config.train.global_batch_size, 0
        first, second = (
            torch.randn(8, 8, generator=generator(0, name), dtype=torch.float64)
            for name in ("first", "second")
        )
        rows = 8 // self.size
        self.rows = slice(rows * self.rank, rows * (self.rank + 1))
        self.first = nn.Parameter(first)
        self.second = nn.Parameter(second[self.rows].clone())
        self.optimizer = torch.optim.SGD([self.first, self.second], lr=0.1)

    def train_step(self, record: ValueRecorder) -> None:
        x = torch.randn(self.batch, 8, generator=generator(self.step, "x"), dtype=torch.float64)
        hidden = torch.tanh(x @ self.first)
        # Every rank computes some columns for the whole batch.
        loss = (hidden @ self.second.T).square().sum() / self.batch
        loss.backward()
        total = loss.detach().clone()
        assert self.first.grad is not None
        assert self.second.grad is not None
        for tensor in (total, self.first.grad):
            self.sum_over_ranks(tensor)
        record.add_scalar("loss", float(total))
        record.add("gradient", self._parts(self.first.grad, self.second.grad))
        self.optimizer.step()
        self.optimizer.zero_grad()
        record.add("weight", self._parts(self.first, self.second))
        self.step += 1

    def sum_over_ranks(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def close(self) -> None:
        shutdown()

    def _parts(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor | Part]:
        return {"first": first, "second": Part(second.detach(), (8, 8), (self.rows.start, 0))}


class OwnModelUnsummed(OwnModel):
    """The same, but the ranks keep their own gradients of what they share."""

    def sum_over_ranks(self, tensor: torch.Tensor) -> None:
        del tensor


class TiedExperts(OwnModel):
    """Two experts whose scores are apart by `GAP`; several ranks take the other one."""

    GAP = 1e-7

    def train_step(self, record: ValueRecorder) -> None:
        scores = torch.tensor([[0.5, 0.3, 0.3 - self.GAP]], dtype=torch.float64)
        record.add(CHOICES, {"router": torch.tensor([[0, 1 + (self.size > 1)]])})
        record.add(SCORES, {"router": scores})
        record.add_scalar("loss", 1.0 + (self.size > 1))


class ApartExperts(TiedExperts):
    """The same, of scores that rounding does not confuse."""

    GAP = 1e-3
