"""The loss and gradients of a step do not depend on who has which tokens."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hp_context import (
    HeadTail,
    count_tokens,
    shard_sequence,
    shift_labels,
    sum_gradients,
    token_loss,
)
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, WIDTH, SEQ = 16, 8, 24


def batch() -> tuple[Tensor, Tensor]:
    """Inputs [4, S, W] and labels [4, S], unequally many of them ignored."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, SEQ, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (4, SEQ), generator=generator)
    labels[0, 5:] = -100
    labels[2, :20] = -100
    return x, labels


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)).double()


def alone() -> tuple[Tensor, list[Tensor]]:
    """The mean over tokens, as transformers defines it: shift, then cross entropy."""
    model = build()
    x, labels = batch()
    logits = model(x)[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten())
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


def wrapped(wrapper: str) -> nn.Module:
    model = build()
    if wrapper == "ddp":
        return sum_gradients(DistributedDataParallel(model))
    assert isinstance(model, nn.Sequential)
    shape, names = ((4,), ("all",)) if wrapper == "fsdp" else ((2, 2), ("replicas", "shards"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return sum_gradients(model)


def every_wrapper() -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Two data-parallel ranks of two context-parallel ones, two microbatches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x, labels = (part.chunk(2)[mesh.get_local_rank("dp")] for part in batch())
    targets = shift_labels(labels)
    xs, all_targets = (
        [shard_sequence(row[None], mesh["cp"], layout=HeadTail()) for row in part]
        for part in (x, targets)
    )
    found = {}
    for wrapper in ("ddp", "fsdp", "hsdp"):
        model = wrapped(wrapper)
        num_tokens = count_tokens(all_targets, mesh)
        total = torch.zeros((), dtype=torch.float64)
        for part, target in zip(xs, all_targets, strict=True):
            loss = token_loss(model(part), target, num_tokens=num_tokens)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        found[wrapper] = (total, gradients(model))
    return found


def test_loss_and_gradients_are_those_of_one_process_under_every_wrapper() -> None:
    """DDP and FSDP2 average by themselves; `sum_gradients` leaves no factor of ranks."""
    loss, wanted = alone()
    for result in run_distributed(every_wrapper, world_size=4):
        for wrapper, (total, found) in result.items():
            torch.testing.assert_close(total, loss, rtol=1e-13, atol=0, msg=wrapper)
            for actual, expected in zip(found, wanted, strict=True):
                worst = float((actual - expected).abs().max() / expected.abs().max())
                assert worst <= 1e-12, wrapper


def test_firsts_of_documents_are_not_predicted_from_the_document_before() -> None:
    labels = torch.tensor([[10, 11, 12, 20, 21]])
    position_ids = torch.tensor([[0, 1, 2, 0, 1]])
    assert shift_labels(labels).tolist() == [[11, 12, 20, 21, -100]]
    shifted = shift_labels(labels, position_ids=position_ids, ignore_index=-1)
    assert shifted.tolist() == [[11, 12, -1, 21, -1]]


def test_tokens_are_counted_over_microbatches() -> None:
    targets = [torch.tensor([[1, -100, 3]]), torch.tensor([[-100, -100, 6]])]
    assert count_tokens(targets).item() == 3
    assert count_tokens(targets[0], ignore_index=3).item() == 2


def test_a_step_without_targets_has_no_loss() -> None:
    logits = torch.randn(1, 3, VOCABULARY, requires_grad=True)
    targets = torch.full((1, 3), -100)
    for num_tokens in (count_tokens(targets), 0):
        loss = token_loss(logits, targets, num_tokens=num_tokens)
        [gradient] = torch.autograd.grad(loss, logits)
        assert loss.item() == 0
        assert not gradient.any()


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 3, VOCABULARY, dtype=torch.bfloat16)
    targets = torch.tensor([[1, 2, 3]])
    loss = token_loss(logits, targets, num_tokens=3)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float()[0], targets[0], reduction="sum") / 3)


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"targets \(\(1, 4\)\) must have the shape of logits \("):
        token_loss(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.int64), num_tokens=1)


def test_a_model_that_nothing_wraps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model \(Sequential\) must be a DistributedDataParallel"):
        sum_gradients(build())
