"""What one rank learns on its own - a NaN, a full disk - all ranks act on at the same step."""

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from hp_base.errors import NumericsError
from hp_checkpoint import files
from hp_data import load_tokenizer
from hp_expert import TopKRouter
from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.model.parameters import Parameter
from hp_trainer.training import trainer as training
from hp_trainer.training.gradients import reduce_gradients
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, prepare_run, worker_of

BAD = "layers.2.attention.wo.weight"
CONFIG = config_of(
    {"mesh": {"pp": 2, "dp_replicate": 2, "ep": 2}, "pipeline": {"stages_per_rank": 1}},
    model={"correction_bias": True, "correction_rate": 0.01},
    train={"steps": 100, "save_every": 5, "not_finite": "skip", "max_skipped_steps": 2},
)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """All that an update may change on this rank."""
    state = {name: tensor.detach().clone() for name, tensor in trainer.tensors().items()}
    for parameter in trainer.parameters:
        state[f"updates of {parameter.name}"] = trainer.optimizer.state[parameter.local]["step"]
    return {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor.clone()
        for name, tensor in state.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def spoil(monkeypatch: pytest.MonkeyPatch, *, rank: int, value: float) -> None:
    """Put a value into one element of one gradient on one rank, before gradients are summed."""
    bad = BAD

    def spoilt(parameters: list[Parameter], mesh: Mesh) -> list[Tensor]:
        for parameter in parameters:
            if mesh.rank == rank and parameter.name == bad:
                assert parameter.tensor.grad is not None
                parameter.tensor.grad.view(-1)[7] = value
        return reduce_gradients(parameters, mesh)

    monkeypatch.setattr(training, "reduce_gradients", spoilt)


def rank(encoded: bytes, directory: Path, address: str) -> list[str]:
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)

    made: list[Trainer] = []

    def fresh(**keys: object) -> Trainer:
        changed = replace(config, train=replace(config.train, **keys))
        made.append(Trainer(changed, worker_of(info, directory), runtime, load_tokenizer("")))
        return made[-1]

    said = []
    for case in (leaves_no_cycles, skips, stops, gives_up, warns_of_a_full_disk):
        with pytest.MonkeyPatch.context() as patch:
            said.append(case(fresh, patch))
    for trainer in made:
        trainer.pipeline.close()
    shutdown()
    return said


def leaves_no_cycles(fresh: Callable[..., Trainer], patch: pytest.MonkeyPatch) -> str:
    """Nothing that only Python's garbage collector would free; see hp_trainer.training.train."""
    del patch
    trainer = fresh()
    trainer.train_step()
    gc.collect()
    trainer.train_step()
    return str(gc.collect())


def skips(fresh: Callable[..., Trainer], patch: pytest.MonkeyPatch) -> str:
    """One step is skipped; what follows is as if it had been no step but for the position."""
    trainer = fresh()
    trainer.train_step()
    before = state_of(trainer)
    with patch.context() as spoilt:
        spoil(spoilt, rank=3, value=float("nan"))
        metrics, _ = trainer.train_step()
    assert same(state_of(trainer), before)
    assert metrics.skipped is not None
    assert "grad_norm" not in metrics.as_dict()
    begins = 2 * CONFIG.train.global_batch_size
    assert (trainer.step, trainer.next_sequence) == (2, begins)
    assert (trainer.skips.total, trainer.skips.in_a_row) == (1, 1)
    assert num_counted(trainer) == 0
    trainer.checkpointer.begin(2)
    following, _ = trainer.train_step()
    assert trainer.skips.in_a_row == 0
    assert trainer.checkpointer.wait() == []

    other = fresh()
    other.train_step()
    other.step, other.next_sequence = 2, begins  # the skipped step moves these and nothing else
    expected, _ = other.train_step()
    assert following.loss == expected.loss
    assert following.lr == expected.lr
    assert same(state_of(trainer), state_of(other))

    resumed = fresh()
    resumed.resume()
    assert (resumed.step, resumed.skips.total, resumed.skips.in_a_row) == (2, 1, 1)
    assert same(state_of(resumed), before)
    resumed.train_step()
    assert same(state_of(resumed), state_of(other))
    return metrics.skipped


def num_counted(trainer: Trainer) -> int:
    """Slots of experts that the next move of correction biases would see."""
    parts = (part for stage in trainer.pipeline.modules.values() for part in stage.modules())
    routers = [part for part in parts if isinstance(part, TopKRouter)]
    assert routers
    return sum(int(router.load.sum()) for router in routers)


def stops(fresh: Callable[..., Trainer], patch: pytest.MonkeyPatch) -> str:
    trainer = fresh(not_finite="stop")
    before = state_of(trainer)
    spoil(patch, rank=2, value=float("inf"))
    with pytest.raises(NumericsError) as caught:
        trainer.train_step()
    assert same(state_of(trainer), before)
    return str(caught.value)


def gives_up(fresh: Callable[..., Trainer], patch: pytest.MonkeyPatch) -> str:
    trainer = fresh()
    spoil(patch, rank=3, value=float("nan"))
    trainer.train_step()
    trainer.train_step()
    with pytest.raises(NumericsError) as caught:
        trainer.train_step()
    assert trainer.step == 2
    return str(caught.value)


def warns_of_a_full_disk(fresh: Callable[..., Trainer], patch: pytest.MonkeyPatch) -> str:
    """Rank 1 cannot write while the others can; training goes on, and so does the next save."""
    trainer = fresh()
    trainer.train_step()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.context() as filled:
        if trainer.mesh.rank == 1:
            filled.setattr(files, "write", full)
        assert trainer.checkpointer.begin(1) == []
        while not trainer.problems:
            trainer.train_step()
            assert trainer.step < 100
    [problem] = trainer.problems
    assert problem.endswith("No space left on device; going on, next try in 5 steps")
    newest = trainer.step + 1
    trainer.train_step()
    assert trainer.checkpointer.begin(newest) == []
    assert trainer.checkpointer.wait() == []
    assert trainer.save().name == f"step-{newest:08d}"
    return f"step {newest}: {problem[:31]}"


def test_all_ranks_do_the_same_and_name_the_parameter_and_the_rank(tmp_path: Path) -> None:
    address = prepare_run(CONFIG, tmp_path)
    encoded = msgspec.json.encode(CONFIG)
    results = run_distributed(rank, encoded, tmp_path, address, world_size=4, timeout=120)
    assert all(result == results[0] for result in results)
    disk = results[0].pop()
    assert disk.partition(": ")[2] == "warning: rank 1: cannot write /"
    assert results[0] == [
        "0",
        f"the gradient of {BAD} is not finite on rank 3",
        f"step 1: the gradient of {BAD} is not finite on rank 2",
        f"step 3: the gradient of {BAD} is not finite on rank 3, after 2 skipped steps in a row",
    ]
