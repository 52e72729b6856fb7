"""`hp plan` against training: bytes to the last one, activations and step times within bounds."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from hp_plan import MACHINES, estimate
from hp_plan.layouts.measure import measure
from hp_plan.price.estimate import planned
from hp_platform import shutdown
from hp_platform.testing import record_exchanges, run_distributed
from hp_trainer.training.trainer import Trainer
from integration_tests.runs import config_of, prepare_run, trained_a_step, write_corpus

VOCAB = 256
SLOWER, FASTER = 3.0, 1 / 3.0
"""How far a step may be from what the plan says at the rate that the run itself shows."""

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "pp2-fsdp2-ep2": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "zbv", "stages_per_rank": 2},
    },
    "dp2-tp2-ep2": {"mesh": {"dp_replicate": 2, "tp": 2, "ep": 2}},
    "cp2-fsdp2-etp2": {"mesh": {"cp": 2, "dp_shard": 2, "ep": 2, "etp": 2}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_exact_and_times_are_near(name: str, tmp_path: Path) -> None:
    config = config_of(**LAYOUTS[name], train={"microbatch_size": 4})
    address = prepare_run(config, tmp_path)
    run = partial(_train, msgspec.json.encode(config), str(tmp_path), address)
    ranks = run_distributed(run, world_size=config.world_size, timeout=120)
    # The rate of this machine, from the very steps that are predicted.
    found = planned(config, MACHINES["cpu"].with_values(cores=0), vocab_size=VOCAB)
    tokens = found.config.microbatch_tokens / config.mesh.tp * found.num_microbatches
    operations = 3 * tokens * sum(stage.flops for stage in found.stages) / config.mesh.pp
    busy = sum(rank["busy"] for rank in ranks) / len(ranks)
    machine = MACHINES["cpu"].with_values(flops=operations / busy, layer_seconds=0.0, cores=0)
    predicted = planned(config, machine, vocab_size=VOCAB).estimate()
    most = max(ranks, key=lambda rank: rank["parameters"])
    memory = predicted.memory
    assert memory.parameters == most["parameters"]
    assert memory.gradients == most["gradients"]
    assert memory.optimizer == most["optimizer"]
    kept = max(rank["kept"] for rank in ranks)
    assert 0.5 < memory.activations / kept < 2
    measured = max(rank["seconds"] for rank in ranks)
    pipeline = predicted.parts["compute"] + predicted.parts["idle"] + predicted.parts["exchanges"]
    assert FASTER < pipeline / measured < SLOWER


EXCHANGING: dict[str, dict[str, dict[str, Any]]] = {
    "ep2": {"mesh": {"dp_replicate": 2, "ep": 2}},
    "ep2 where a row is for several experts": {
        "mesh": {"dp_replicate": 2, "ep": 2},
        "model": {"top_k": 4},
    },
    "etp2": {"mesh": {"dp_replicate": 2, "etp": 2}},
    "tp2": {"mesh": {"tp": 2}},
    "cp2": {"mesh": {"cp": 2}},
    "tp2 with attention run again": {"mesh": {"tp": 2}, "train": {"recompute": "attention"}},
    "ep2 with feed-forward run again": {
        "mesh": {"dp_replicate": 2, "ep": 2},
        "train": {"recompute": "feed_forward"},
    },
    "tp2 ep2 with all run again": {"mesh": {"tp": 2, "ep": 2}, "train": {"recompute": "full"}},
    "tp2 dense with all run again and nothing dropped": {
        "mesh": {"tp": 2},
        "model": {"num_experts": 0, "num_shared_experts": 0, "dropout": 0.0},
        "train": {"recompute": "full"},
    },
}


@pytest.mark.sample(
    "ep2 where a row is for several experts",
    "etp2",
    "cp2",
    "ep2 with feed-forward run again",
    "tp2 dense with all run again and nothing dropped",
)
@pytest.mark.parametrize("name", EXCHANGING)
def test_messages_inside_layers_are_those_that_are_sent(name: str, tmp_path: Path) -> None:
    config = config_of(EXCHANGING[name])
    address = prepare_run(config, tmp_path)
    run = partial(_exchanges, msgspec.json.encode(config), str(tmp_path), address)
    sent, _ = run_distributed(run, world_size=2, timeout=120)
    # Where bytes take no time, and a message a second.
    machine = MACHINES["cpu"].with_values(
        latency=1.0, bandwidth=1e30, node_latency=1.0, node_bandwidth=1e30
    )
    plan = planned(config, machine, vocab_size=VOCAB)
    assert sum(price.exchanges for price in plan.prices) == pytest.approx(
        sent / plan.num_microbatches
    )


def _exchanges(encoded: bytes, directory: str, address: str) -> int:
    """How many there are in forward and backward, but for what is summed once at their end."""
    trainer = trained_a_step(encoded, directory, address)
    with record_exchanges() as exchanges:
        trainer.compute_gradients()
    times = Counter(exchanges)
    inside = [each for each in exchanges if each.kind != "all_reduce" or times[each] > 1]
    # A group of one rank has nothing to send.
    busy = {exchange.group for exchange in inside if exchange.num_bytes}
    shutdown()
    return sum(exchange.group in busy for exchange in inside)


def test_rates_of_this_machine_are_measured_and_told_as_flags(tmp_path: Path) -> None:
    config = config_of(data={"paths": [str(write_corpus(tmp_path))]})
    machine, flags = measure(config)
    words = flags.split()
    told = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    for name, value in told.items():
        assert value == pytest.approx(getattr(machine, name[2:].replace("-", "_")), rel=0.01)
    # No computer of today is out of these bounds.
    assert 1e7 < machine.flops < 1e14
    assert 1e6 < machine.bandwidth < 1e13
    assert 1e-6 < machine.latency < 1
    assert estimate(config, machine, vocab_size=VOCAB).seconds > 0


def _train(encoded: bytes, directory: str, address: str) -> dict[str, float]:
    trainer = trained_a_step(encoded, directory, address)
    kept = _PeakOfKept(trainer)
    with kept:
        trainer.compute_gradients()
    spans = [span for span in trainer.timeline if span.step.type.is_compute]
    result = {
        "parameters": _bytes(p.local for p in trainer.parameters),
        "gradients": _bytes(p.local.grad for p in trainer.parameters),
        "optimizer": _bytes(
            value
            for state in trainer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
        "kept": kept.peak,
        "busy": sum(span.end - span.start for span in spans),
        "seconds": trainer.timeline.makespan,
    }
    shutdown()
    return result


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Kept:
    """A tensor that autograd keeps; tells when it lets go."""

    def __init__(self, tensor: Tensor, owner: "_PeakOfKept") -> None:
        self.tensor, self.owner = tensor, owner

    def __del__(self) -> None:
        self.owner.let_go(self.tensor)


class _PeakOfKept(torch.autograd.graph.saved_tensors_hooks):
    """The most bytes that autograd kept at once, each storage once, parameters apart."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(self._pack, lambda kept: kept.tensor)
        self._apart = {p.local.untyped_storage().data_ptr() for p in trainer.parameters}
        self._count: dict[int, int] = {}
        self._now = self.peak = 0

    def _pack(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._count[key] = self._count.get(key, 0) + 1
        if self._count[key] == 1 and key not in self._apart:
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
        return _Kept(tensor.detach(), self)

    def let_go(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._count[key] -= 1
        if self._count[key] == 0 and key not in self._apart:
            self._now -= storage.nbytes()
