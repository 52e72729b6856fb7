"""What a step does after its backward: as many calls and kernels however many parameters."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as with_keys
from torch import nn

from hp_expert import ExpertTensorParallel, GroupedExperts, MoE, TopKRouter, grad_norm
from hp_platform import new_group
from hp_platform.testing import run_distributed, run_in_threads, watch_operators
from hp_trainer.config import MeshConfig, TrainConfig
from hp_trainer.config.options import resolve
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import GROUPS, Layout
from hp_trainer.model import TransformerStage
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import Parameter, declared, named_parameters
from hp_trainer.training.gradients import GradientNorm, reduce_gradients
from hp_trainer.training.optimizer import build_optimizer, clip_gradients

VIEWS = {
    *("aten::view", "aten::_unsafe_view", "aten::split_with_sizes", "aten::detach"),
    "aten::unbind",
}


def parameters_of(preset: str, num_layers: int, *, copies: bool) -> tuple[list[Parameter], Any]:
    """The parameters of a model, as a rank has them that shares them with copies, or none."""
    config = resolve(preset, env={}).config
    model = with_keys(config.model, num_layers=num_layers)
    stage = TransformerStage(model, 32, layers=range(num_layers), first=True, last=True)
    found = named_parameters(stage)
    initialize_parameters(found, model, seed=0)
    copied = ("dp_replicate",)
    if copies:
        found = [replace(parameter, replicas=copied, unsummed=copied) for parameter in found]
    return found, config.train


def give_gradients(parameters: Sequence[Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.tensor.grad = torch.randn(parameter.local.shape, generator=generator)


class Tail:
    """What follows a backward, of one rank that has a copy of everything."""

    def __init__(self, group: dist.ProcessGroup, preset: str, num_layers: int) -> None:
        self.parameters, config = parameters_of(preset, num_layers, copies=True)
        mesh: Any = SimpleNamespace(groups={"dp_replicate": group}, index=lambda _: 0)
        self.mesh: Any = mesh
        self.norm = GradientNorm(self.parameters, mesh, control=group)
        self.optimizer = build_optimizer(self.parameters, config)

    def __call__(self) -> None:
        reduce_gradients(self.parameters, self.mesh)
        norm = self.norm.local_squares(torch.device("cpu")).sum().sqrt().item()
        clip_gradients(self.parameters, norm, norm / 2)
        self.optimizer.step()
        self.optimizer.zero_grad()


def frames_of(act: Callable[[], None]) -> Counter[str]:
    """Functions that are entered, of whatever package; a generator that goes on enters none."""
    entered: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame)

    before = sys.getprofile()
    gc.disable()  # it calls whoever wants to know when it collects
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Counter(frame.f_code.co_qualname for frame in {id(f): f for f in entered}.values())


def calls_and_kernels(
    group: dist.ProcessGroup, preset: str
) -> list[tuple[int, Counter[str], Counter[str]]]:
    found = []
    for num_layers in (2, 5):
        tail = Tail(group, preset, num_layers)
        give_gradients(tail.parameters)
        tail()
        give_gradients(tail.parameters)
        names: list[str] = []
        with watch_operators(lambda name, args, kwargs: names.append(name)):  # noqa: ARG005, B023
            tail()
        kernels = Counter(name.partition(".")[0] for name in names)
        give_gradients(tail.parameters)
        found.append((len(tail.parameters), frames_of(tail), kernels))
    return found


@pytest.mark.parametrize("preset", ["debug-llama3", "debug-qwen3-moe"])
def test_calls_and_kernels_after_a_backward_do_not_grow_with_the_parameters(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU there is more than one kernel for a norm of many elements.
    monkeypatch.setattr("hp_platform.device._PIECE", 1 << 30)
    for few, many in run_in_threads(partial(calls_and_kernels, preset=preset), world_size=1):
        assert many[0] > 2 * few[0]
        assert many[1] == few[1]
        assert sum(few[1].values()) < 150  # three in four of them are of torch
        beyond = {name: n for name, n in (many[2] - few[2]).items() if name not in VIEWS}
        assert not beyond
        assert few[2]["aten::_foreach_mul_"] == 1
        assert few[2]["aten::_foreach_norm"] == 2  # before sums over copies, and after


def sums(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    tail = Tail(group, "debug-qwen3-moe", 2)
    give_gradients(tail.parameters)
    expected = [p.tensor.grad * group.size() for p in tail.parameters if p.tensor.grad is not None]
    reduce_gradients(tail.parameters, tail.mesh)
    squares = tail.norm.local_squares(torch.device("cpu"))
    rows: dict[str, torch.Tensor] = {}
    for parameter in tail.parameters:
        gradient = parameter.local.grad
        assert gradient is not None
        names = [parameter.name]
        parts = [gradient]
        if parameter.experts is not None:
            names = [f"{parameter.name}[{index}]" for index in parameter.experts]
            parts = list(gradient.unbind())
        for name, part in zip(names, parts, strict=True):
            rows[name] = torch.linalg.vector_norm(part, dtype=torch.float64).square()
    assert list(tail.norm.sizes) == sorted(rows)
    assert torch.equal(squares, torch.stack([rows[name] for name in tail.norm.sizes]))
    found = [p.local.grad for p in tail.parameters if p.local.grad is not None]
    return expected, found, [len(tail.parameters)]


@pytest.mark.parametrize("side_by_side", [1, 20_000, 1 << 28])
def test_gradients_are_summed_and_every_norm_has_the_bits_of_its_own(
    side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hp_trainer.training.gradients.SIDE_BY_SIDE", side_by_side)
    for expected, found, (count,) in run_in_threads(sums, world_size=2):
        assert len(expected) == len(found) == count
        assert all(map(torch.equal, expected, found))


def copies_of_one(group: dist.ProcessGroup) -> list[str]:
    tail = Tail(group, "debug-llama3", 2)
    give_gradients(tail.parameters)
    names: list[str] = []
    with watch_operators(lambda name, args, kwargs: names.append(name)):  # noqa: ARG005
        reduce_gradients(tail.parameters, tail.mesh)
    return [name for name in names if name.startswith(("aten::cat", "aten::_foreach_copy_"))]


def test_a_gradient_that_is_summed_by_itself_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hp_trainer.training.gradients.SIDE_BY_SIDE", 1)
    assert run_in_threads(copies_of_one, world_size=2) == [[], []]


ROWS, DIM = 5, 6


def layer() -> nn.Module:
    """A layer of experts with biases, the same on every rank."""
    moe = MoE(TopKRouter(DIM, 4, 2, bias=True), GroupedExperts(4, DIM, 8, bias=True)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return moe


def gradients_of_cut_experts() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Gradients of each parameter, and norms, in a layout and in one process, by name."""
    layout, rank = Layout.of(MeshConfig(dp_replicate=4, etp=2)), dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    groups = {name: new_group(layout.ranks(*axes), name=name) for name, axes in GROUPS.items()}
    mesh = Mesh(layout, rank, {n: g for n, g in groups.items() if g is not None}, world, "cpu")
    everyone = torch.randn(4, ROWS, DIM, generator=torch.Generator().manual_seed(1)).double()
    cut, whole = layer(), layer()
    known = declared(cut)
    ExpertTensorParallel(sliced=True).apply(cut, (mesh.groups["ep"], mesh.groups["etp"]))
    (cut(everyone[rank])[0] ** 2).sum().backward()
    (whole(everyone.flatten(0, 1))[0] ** 2).sum().backward()
    parameters = named_parameters(cut, known, mesh)
    reduce_gradients(parameters, mesh)
    found, expected = [], dict(whole.named_parameters())
    for parameter in parameters:
        mine, all_of_it = parameter.local.grad, expected[parameter.name].grad
        assert mine is not None
        assert all_of_it is not None
        parameter.tensor.grad = mine
        found.append((parameter.name, mine, all_of_it[tuple(slice(*s) for s in parameter.span)]))
    squares = GradientNorm(parameters, mesh, control=world).local_squares(torch.device("cpu"))
    dist.all_reduce(squares)
    norm = grad_norm(whole)
    found.append(("norm", squares.sum().sqrt(), norm))
    return [*found, ("norm of hp-expert", grad_norm(cut), norm)]


def test_gradients_of_experts_that_ranks_cut_are_those_of_one_process() -> None:
    """Of what each rank has a copy of, the output bias, each has the whole gradient."""
    for found in run_distributed(gradients_of_cut_experts, world_size=4):
        assert {"experts.b2", "experts.b1", "router.bias"} < {name for name, *_ in found}
        for name, mine, expected in found:
            assert torch.allclose(mine, expected, rtol=1e-12, atol=1e-12), name


@pytest.fixture
def config() -> TrainConfig:
    return resolve("debug-qwen3-moe", env={}).config.train


def test_an_update_has_the_bits_of_torch(config: TrainConfig) -> None:
    mine, _ = parameters_of("debug-qwen3-moe", 2, copies=False)
    theirs, _ = parameters_of("debug-qwen3-moe", 2, copies=False)
    optimizer = build_optimizer(mine, config)
    groups = [
        {**group, "params": [q.local for q in theirs if _is_in(q, mine, group["params"])]}
        for group in optimizer.param_groups
    ]
    torchs = torch.optim.AdamW(groups, fused=True)
    no_mesh: Any = SimpleNamespace(groups={})
    for rate in (0.1, 0.02, 0.3):
        for parameters in (mine, theirs):
            give_gradients(parameters)
            reduce_gradients(parameters, no_mesh)
        clip_gradients(mine, 3.0, 1.0)
        for parameter in theirs:
            assert parameter.local.grad is not None
            parameter.local.grad.mul_(1.0 / 3.0)
        for each in (optimizer, torchs):
            for group in each.param_groups:
                group["lr"] = rate
            each.step()
            each.zero_grad()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.local, b.local), a.name
        for name, value in torchs.state[b.local].items():
            assert torch.equal(optimizer.state[a.local][name], value), (a.name, name)


def _is_in(parameter: Parameter, mine: Sequence[Parameter], group: Sequence[torch.Tensor]) -> bool:
    twin = next(each.local for each in mine if each.name == parameter.name)
    return any(twin is tensor for tensor in group)
