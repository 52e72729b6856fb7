"""The program of a run that is compared: its saves, evaluations and skipped steps. No torch."""

import math
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hp_trainer.config import Config

TRAINER = "hp_train.verify.own_trainer:TrainerJob"
"""The job that is verified unless another is named."""
_REQUEST = "verify.json"
_LEAST_EPS = 1e-3
_EVAL_BATCHES = 2
_FEW = 4
"""With fewer steps, once is enough."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A training of a few steps in which everything happens that happens in a long one.

    Attributes:
        steps: Number of steps to train.
    """

    steps: int

    @property
    def reload_after(self) -> int:
        """Return the step after which the state is saved, and loaded by another trainer.

        0: there is none.
        """
        return self.steps // 2

    @property
    def skipped(self) -> int:
        """Step whose gradients are made infinite, so that it is skipped; 0: none is."""
        return 3 if self.steps >= 6 else 0

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Return the steps after which held-out text is read."""
        return (self.reload_after, self.steps) if self.steps >= _FEW else (self.steps,)

    @property
    def tensor_steps(self) -> tuple[int, ...]:
        """Steps whose tensors are looked at where those of all would be too many."""
        after = self.reload_after
        return tuple(sorted({1, after, after + 1, self.steps} - {0}))

    def largest_norm(self, step: int, configured: float) -> float:
        """Return what gradients of a step are scaled down to, 0 for never.

        As configured, then so low that it always happens, then never, and again.

        Args:
            step: Counted from 1.
            configured: `train.max_grad_norm`.
        """
        return (0.0, configured, configured / 100)[step % 3]

    def applied_to(self, config: Config) -> Config:
        """Return a config that trains with its whole learning-rate schedule in these steps.

        An update multiplies the rounding of a gradient by up to the rate over `adam_eps`, and a
        bias that starts at zero is no larger than the rate. So `adam_eps` is at least 1e-3: a
        weight then differs by rounding or by a bug. Moments are compared by themselves.
        """
        train = replace(
            config.train,
            steps=self.steps,
            warmup_steps=min(config.train.warmup_steps, math.ceil(self.steps / 4)),
            adam_eps=max(config.train.adam_eps, _LEAST_EPS),
            eval_batches=min(config.train.eval_batches, _EVAL_BATCHES),
            not_finite="skip",
        )
        return replace(config, train=train)

    def __str__(self) -> str:
        evaluated = " and ".join(map(str, self.evaluated))
        happens = [
            f"{self.steps} steps with the whole learning-rate schedule in them",
            "gradients clipped in some and not in others",
            f"evaluation after {evaluated}",
        ]
        if self.reload_after:
            happens.append(
                f"a save after {self.reload_after} that every layout goes on from, "
                "whichever made it"
            )
        if self.skipped:
            happens.append(f"step {self.skipped} skipped")
        return ", ".join(happens)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's request to a run, in a file of its run directory.

    Attributes:
        job: ``module:callable``, a `Build`.
        program: Program of the run.
        tensor_steps: Steps whose tensors are recorded, counted from 1; empty: all.
        source: Directory of the run whose checkpoint is resumed; empty: its own.
        num_runs: Number of runs whose time the first rank estimates; 0: it does not.
    """

    job: str
    program: Program
    tensor_steps: tuple[int, ...] = ()
    source: str = ""
    num_runs: int = 0


def request_run(run_dir: Path, request: Request) -> None:
    """Leave a request where the ranks find it."""
    (run_dir / _REQUEST).write_bytes(msgspec.json.encode(request))


def read_request(run_dir: Path) -> Request:
    """Read what was left there."""
    return msgspec.json.decode((run_dir / _REQUEST).read_bytes(), type=Request)
