"""Both sides of benchmarks/bench_train.py compute the same model, and the same loss of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import bench_moe_operators, plain_torch
from torch import Tensor

from hp_platform.testing import compare, run_distributed
from hp_trainer.config.options import resolve
from hp_trainer.model import Microbatch, TransformerStage
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters

SHAPES = Path(__file__).parents[2] / "benchmarks" / "train_shapes"
LAYERS = range(2)  # of deepseek_v3 a dense one and one of experts
RANKS, SEQUENCES, POSITIONS = 2, 2, 16


@pytest.mark.parametrize("model", sorted(plain_torch.DENSE_HIDDEN))
def test_torch_alone_computes_what_hp_train_computes(model: str) -> None:
    for found, expected in run_distributed(one_batch, model, world_size=RANKS):
        comparison = compare(found, expected, bound=1e-12)
        assert comparison.ok, str(comparison)


def one_batch(model: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss, logits and all gradients; of torch alone, a rank has its sequences and its experts."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    plain_torch.SEQ_LEN = POSITIONS
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    config = resolve(str(SHAPES / f"{model}.toml"), env={}).config.model
    ours = TransformerStage(
        *(config, config.vocab_size),
        layers=LAYERS,
        first=True,
        last=True,
        compute_dtype=torch.float64,
    )
    initialize_parameters(named_parameters(ours), config, seed=0)
    theirs = plain_torch.Stage(model, LAYERS, group, first=True, last=True)
    of_ours = {plain_name(name): p for name, p in ours.named_parameters()}
    of_theirs = dict(theirs.named_parameters())
    assert of_ours.keys() == of_theirs.keys()
    with torch.no_grad():
        for name, parameter in of_theirs.items():
            parameter.copy_(part_of_rank(name, of_ours[name], parameter.shape))
    generator = torch.Generator().manual_seed(0)
    shape = (RANKS * SEQUENCES, POSITIONS + 1)
    block = torch.randint(config.vocab_size, shape, generator=generator)
    tokens, targets = block[:, :-1], block[:, 1:]
    expected = ours(tokens, microbatch=Microbatch(num_sequences=len(tokens)))
    microbatch = Microbatch(num_sequences=len(tokens), targets=targets)
    whole = ours(tokens, microbatch=microbatch) / targets.numel()
    whole.backward()
    mine = slice(rank * SEQUENCES, (rank + 1) * SEQUENCES)
    logits = theirs(tokens[mine])
    loss = plain_torch.Loss(targets.numel())
    loss(logits, targets[mine]).backward()
    dist.all_reduce(loss.total)
    found = {"loss": loss.total, "logits": logits.detach()}
    wanted = {"loss": whole.detach(), "logits": expected.detach()[mine]}
    for name, parameter in of_theirs.items():
        gradient, whole_gradient = parameter.grad, of_ours[name].grad
        assert gradient is not None
        assert whole_gradient is not None
        if not is_of_experts(name, gradient):
            dist.all_reduce(gradient)  # as FSDP sums it
        found[name] = gradient
        wanted[name] = part_of_rank(name, whole_gradient, gradient.shape)
    return found, wanted


def plain_name(name: str) -> str:
    return name.replace(".moe.experts.", ".feed_forward.").replace(".moe.", ".feed_forward.")


def is_of_experts(name: str, tensor: Tensor) -> bool:
    return ".feed_forward." in name and tensor.dim() == 3


def part_of_rank(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """The part of a tensor of hp-train's that the rank has; there, experts map by their rows."""
    if not is_of_experts(name, tensor):
        return tensor
    here = tensor[dist.get_rank() * shape[0] :][: shape[0]].transpose(1, 2)
    assert here.shape == shape
    return here


def test_a_layer_of_experts_launches_no_more_than_that_of_torchtitan() -> None:
    found = {
        name: bench_moe_operators.beside_products(bench_moe_operators.on_cuda(make))
        for name, make in bench_moe_operators.LAYERS.items()
    }
    assert 10 < found["hp-expert"] <= 30 < found["torchtitan, restated"]


def test_a_layer_of_experts_runs_no_more_operators_than_that_of_torchtitan() -> None:
    found = {
        name: bench_moe_operators.beside_products(bench_moe_operators.on_cpu(make))
        for name, make in bench_moe_operators.LAYERS.items()
    }
    assert 30 < found["hp-expert"] < found["hp-expert, with load"]
    assert found["hp-expert, with load"] <= found["torchtitan, restated"]
