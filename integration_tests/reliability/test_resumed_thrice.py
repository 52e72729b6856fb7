"""A run that is resumed three times reads every sequence once, whatever else happens to it.

Restates torchtitan #3907 and #3908, where data began anew at the second resume.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from hp_data import load_tokenizer
from hp_data.dataset import Batch, Dataset
from hp_platform import RankInfo, initialize
from hp_platform.testing import run_distributed
from hp_trainer.config import Config
from hp_trainer.training import trainer as training
from hp_trainer.training.gradients import reduce_gradients
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, prepare_run, worker_of

_TRAIN = {"steps": 9, "not_finite": "skip", "max_skipped_steps": 2, "async_save": True}
_LAYOUTS: tuple[dict[str, int], ...] = ({"dp_shard": 2}, {}, {"tp": 2}, {"dp_replicate": 2})


class _Session(NamedTuple):
    """What happens between a start and its end.

    Attributes:
        until: Step after which it ends.
        saved: Steps after which a checkpoint is saved; the last one is not waited for.
        skipped: Step whose gradient is not finite; 0: none.
    """

    until: int
    saved: tuple[int, ...]
    skipped: int = 0


_SESSIONS = (
    _Session(3, (2, 3)),
    _Session(5, (4, 5), skipped=4),
    _Session(7, (5, 7), skipped=5),  # its last step's checkpoint is lost after that
    _Session(9, (9,)),
)


def _config(mesh: dict[str, int]) -> Config:
    sizes = {"pp": 1, "dp_replicate": 1, "ep": 1} | mesh
    layout: dict[str, dict[str, Any]] = {
        "mesh": sizes,
        "pipeline": {"schedule": "1f1b", "stages_per_rank": 1},
    }
    return config_of(layout, model={"num_experts": 0, "num_layers": 1}, train=_TRAIN)


def _rank(encoded: bytes, directory: Path, address: str, session: _Session) -> list[list[Any]]:
    """Train as a rank; of each step its number, and every sequence that was read, with tokens."""
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    trainer = Trainer(config, worker_of(info, directory), runtime, load_tokenizer(""))
    trainer.resume()
    read: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        _record(patch, trainer.data, read)
        _spoil(patch, trainer, session.skipped)
        while trainer.step < session.until:
            read.append([trainer.step + 1])
            metrics, _ = trainer.train_step()
            assert (metrics.skipped is not None) == (trainer.step == session.skipped)
            if trainer.step in session.saved:
                assert trainer.checkpointer.begin(trainer.step) == []
    assert trainer.checkpointer.wait() == []
    trainer.close()
    return read


def _record(patch: pytest.MonkeyPatch, data: Dataset, read: list[list[Any]]) -> None:
    """Write down which sequences of the training data are read, and their tokens."""
    batch = Dataset.batch

    def recorded(dataset: Dataset, sequence_index: range) -> Batch:
        found = batch(dataset, sequence_index)
        if dataset is data:
            rows = zip(sequence_index, found.tokens.tolist(), strict=True)
            read[-1] += [(index, tuple(row)) for index, row in rows]
        return found

    patch.setattr(Dataset, "batch", recorded)


def _spoil(patch: pytest.MonkeyPatch, trainer: Trainer, step: int) -> None:
    """Let the gradient of a step be none."""

    def spoilt(parameters: list[Any], mesh: Any) -> Any:
        if trainer.step + 1 == step:
            parameters[0].tensor.grad.fill_(math.nan)
        return reduce_gradients(parameters, mesh)

    patch.setattr(training, "reduce_gradients", spoilt)


def _runs(directory: Path) -> Iterator[dict[int, dict[int, tuple[int, ...]]]]:
    """Of each session its steps, with the sequences that any of its ranks read."""
    for mesh, session in zip(_LAYOUTS, _SESSIONS, strict=True):
        config = _config(mesh)
        address = prepare_run(config, directory)
        ranks = run_distributed(
            _rank,
            msgspec.json.encode(config),
            directory,
            address,
            session,
            world_size=config.world_size,
        )
        steps: dict[int, dict[int, tuple[int, ...]]] = {}
        for step, *rows in (each for read in ranks for each in read):
            for index, row in rows:
                assert steps.setdefault(step, {}).setdefault(index, row) == row
        yield steps
        if session.until == 5:
            [newest] = (directory / "checkpoints").glob("*5")
            file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
            file.write_bytes(bytes(file.stat().st_size))


def test_three_resumes_repeat_and_lose_no_data(tmp_path: Path) -> None:
    sessions = list(_runs(tmp_path))
    # The second resume falls back from the checkpoint of step 5 to that of step 4.
    assert [list(steps) for steps in sessions] == [[1, 2, 3], [4, 5], [5, 6, 7], [8, 9]]
    size = _config({}).train.global_batch_size
    seen: dict[int, tuple[int, ...]] = {}
    for steps in sessions:
        for step, rows in steps.items():
            assert sorted(rows) == list(range(size * (step - 1), size * step))
            for index, row in rows.items():
                assert seen.setdefault(index, row) == row
    assert sorted(seen) == list(range(9 * size))
    assert len(set(seen.values())) == len(seen)
