"""Muon of one process: the bits of torch's Muon and AdamW, stacks, fused matrices, refusals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hp_optim import Muon, NewtonSchulz, Split, muon_groups, orthogonalize
from hp_optim.newton_schulz import flops, rate_factor

SHAPES = ((24, 16), (16, 40), (32, 32), (1, 8), (7, 3))


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(those: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(those):
        generator = torch.Generator().manual_seed(1000 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 4
) -> list[Tensor]:
    those = parameters()
    optimizer = make(those)
    rates = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        give_gradients(those, step)
        those[3].grad = None if step == 2 else those[3].grad
        optimizer.step()
        rates.step()
    return [p.detach() for p in those] + [optimizer.state[p]["momentum_buffer"] for p in those]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"lr": 0.03, "momentum": 0.4, "adjust_lr_fn": "match_rms_adamw"},
        {
            "ns_steps": 3,
            "ns_coefficients": (2.0, -1.5, 0.5),
            "eps": 1e-3,
            "adjust_lr_fn": "original",
        },
        {"lr": torch.tensor(0.02)},
    ],
)
def test_one_process_has_the_bits_of_torchs_muon(options: dict[str, object]) -> None:
    ours = train(lambda those: Muon(those, **deepcopy(options)))  # type: ignore[arg-type]
    theirs = train(lambda those: torch.optim.Muon(those, **deepcopy(options)))  # type: ignore[arg-type]
    assert all(map(torch.equal, ours, theirs))


def test_parameters_in_bfloat16_have_the_bits_of_torchs_muon() -> None:
    ours, theirs = ([nn.Parameter(p.detach().bfloat16()) for p in parameters()] for _ in range(2))
    optimizers = [Muon(ours), torch.optim.Muon(theirs)]
    for step in range(3):
        for those, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(those, step)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))


def test_momentum_in_bfloat16_is_not_divided_by_the_iteration() -> None:
    """Without nesterov torch's is: `bfloat16()` copies nothing there, and it divides in place."""
    [parameter] = parameters(((8, 4),))
    parameter = nn.Parameter(parameter.detach().bfloat16())
    give_gradients([parameter], 0)
    assert parameter.grad is not None
    optimizer = Muon([parameter], nesterov=False, momentum=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad)


@pytest.mark.parametrize("fused", [None, True])
def test_groups_of_adamw_have_the_bits_of_torchs_adamw(fused: bool | None) -> None:
    shapes = ((3, 4, 2, 2), (5,), ())
    ours, theirs = parameters(shapes), parameters(shapes)
    options = {"lr": 0.01, "betas": (0.8, 0.9), "fused": fused}
    optimizers = [
        Muon([{"params": ours, "algorithm": "adamw", **options}]),
        torch.optim.AdamW(theirs, **options),  # type: ignore[arg-type]
    ]
    for step in range(3):
        for those, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(those, step)
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        kept, known = (o.state[p] for o, p in zip(optimizers, (mine, other), strict=True))
        assert {*kept} == {*known}
        assert all(torch.equal(kept[name], known[name]) for name in kept)
        assert kept["step"].dtype == known["step"].dtype


def moved(shape: tuple[int, ...], **options: object) -> tuple[Tensor, Tensor]:
    """Return the change of a parameter by a step of rate 1, and its gradient."""
    parameter = nn.Parameter(torch.zeros(shape))
    give_gradients([parameter], 0)
    Muon([("w", parameter)], lr=1.0, momentum=0.0, **options).step()  # type: ignore[arg-type]
    assert parameter.grad is not None
    return -parameter.detach(), parameter.grad


def factor(gradient: Tensor) -> Tensor:
    """Return what torch's Muon does to a matrix by a step of rate 1."""
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient.contiguous()
    torch.optim.Muon([parameter], lr=1.0, momentum=0.0).step()
    return -parameter.detach()


def test_each_matrix_of_a_stack_is_one_by_itself() -> None:
    change, gradient = moved((5, 12, 8))
    assert all(torch.equal(change[i], factor(gradient[i])) for i in range(5))


def test_fused_rows_are_matrices_by_themselves() -> None:
    change, gradient = moved((24, 8), split={"w": (12, 4, 8)})
    parts = zip(change.split((12, 4, 8)), gradient.split((12, 4, 8)), strict=True)
    assert all(torch.equal(part, factor(grad)) for part, grad in parts)


def test_fused_columns_of_a_stack_that_alternate_and_are_transposed() -> None:
    split = Split((1, 1), dim=1, repeats=6, transposed=True)
    change, gradient = moved((3, 8, 12), split={"*": split})
    for i in range(3):
        for first in range(2):
            expected = factor(gradient[i, :, first::2].T)
            assert torch.equal(change[i, :, first::2].T, expected)


def test_rows_grouped_by_heads_belong_together() -> None:
    """Of two groups of 4 rows of queries, 2 of keys and 2 of values."""
    change, gradient = moved((16, 8), split={"w": Split((4, 2, 2), repeats=2)})
    rows = torch.arange(16).view(2, 8)
    for part in rows.split((4, 2, 2), dim=1):
        assert torch.equal(change[part.flatten()], factor(gradient[part.flatten()]))


def test_nan_stays_in_its_matrix() -> None:
    one, other = parameters(((6, 4), (6, 4)))
    give_gradients([one, other], 0)
    assert one.grad is not None
    one.grad[2, 1] = float("nan")
    Muon([one, other]).step()
    assert one.isnan().all()
    assert other.isfinite().all()


def test_a_closure_is_called_and_its_loss_returned() -> None:
    [parameter] = parameters(((4, 4),))

    def closure() -> float:
        assert torch.is_grad_enabled()
        give_gradients([parameter], 0)
        return 3.5

    before = parameter.detach().clone()
    assert Muon([parameter]).step(closure) == 3.5
    assert not torch.equal(before, parameter)


def test_parameters_that_thaw_and_new_groups_are_planned_anew() -> None:
    frozen, other, late = parameters(((6, 4), (4, 4), (5, 3)))
    frozen.requires_grad_(False)
    optimizer = Muon([frozen, other])
    give_gradients([other], 0)
    optimizer.step()
    frozen.requires_grad_()
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    before = [p.detach().clone() for p in (frozen, other, late)]
    give_gradients([frozen, other, late], 1)
    optimizer.step()
    assert not any(map(torch.equal, before, (frozen, other, late)))


def test_tensors_that_require_no_gradient_move_if_they_have_one() -> None:
    """As with torch, which asks for the gradient alone."""
    plain = [p.detach().clone() for p in parameters()]
    frozen, theirs = parameters(), parameters()
    for parameter in frozen:
        parameter.requires_grad_(False)
    optimizers = [Muon(plain), Muon(frozen), torch.optim.Muon(theirs)]
    for step in range(2):
        give_gradients(theirs, step)
        for those in (plain, frozen):
            for tensor, other in zip(those, theirs, strict=True):
                tensor.grad = other.grad
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, plain, theirs))
    assert all(map(torch.equal, frozen, theirs))


def test_a_loaded_state_goes_on_with_its_rates() -> None:
    ours, theirs = parameters(), parameters()
    first, second = Muon(ours, lr=0.3), Muon(theirs, lr=0.1)
    for step in range(2):
        give_gradients(ours, step)
        first.step()
    second.load_state_dict(deepcopy(first.state_dict()))
    for mine, other in zip(ours, theirs, strict=True):
        other.detach().copy_(mine.detach())
    for those, optimizer in ((ours, first), (theirs, second)):
        give_gradients(those, 2)
        optimizer.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"parameter w: shape \(3,\) must be of a matrix or of a stack of matrices"),
        ((2, 2, 2, 2), {}, "other parameters belong into a group with algorithm='adamw'"),
        (
            (4, 4),
            {"split": {"w": (3, 3)}},
            r"sizes \(3, 3\) times repeats \(1\) must add up to dim 0",
        ),
        ((4, 4), {"split": {"v": (2, 2)}}, "v must be the name of a parameter"),
        ((4, 4), {"lr": -1.0}, r"lr \(-1.0\) must be at least 0"),
        ((4, 4), {"momentum": -0.1}, r"momentum \(-0.1\) must be at least 0"),
        ((4, 4), {"adjust_lr_fn": "mine"}, r"adjust_lr_fn \(mine\) must be one of"),
        ((4, 4), {"ns_steps": 100}, r"ns_steps \(100\) must be 0 to 99"),
        ((4, 4), {"ns_coefficients": (1.0, 2.0)}, "must be three numbers"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Muon([("w", nn.Parameter(torch.zeros(shape)))], **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_wrong_groups_splits_and_gradients_are_refused() -> None:
    [parameter] = parameters(((4, 4),))
    optimizer = Muon([parameter])
    with pytest.raises(ValueError, match=r"algorithm \(sgd\) must be 'muon' or 'adamw'"):
        optimizer.add_param_group({"params": parameters(((2, 2),)), "algorithm": "sgd"})
    with pytest.raises(ValueError, match="betas"):
        Muon([{"params": [parameter], "algorithm": "adamw", "betas": (1.0, 0.9)}])
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"dtype \(torch.complex64\) must be floating"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"dim \(2\) of a split must be 0 or 1"):
        Split((1, 2), dim=2)
    with pytest.raises(ValueError, match="must be positive"):
        Split((0, 2))
    parameter.grad = torch.zeros(4, 4).to_sparse()
    with pytest.raises(ValueError, match="must not be sparse"):
        optimizer.step()


class Model(nn.Module):
    """A model with every kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.frozen = nn.Linear(8, 12), nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        self.conv = nn.Conv1d(8, 8, 3)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.lm_head = nn.Linear(8, 16, bias=False)


def test_groups_of_a_module_are_those_that_each_optimizer_is_for() -> None:
    groups = muon_groups(Model(), options={"lr": 3e-4})
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [
        ["experts", "up.weight"],
        ["embed.weight", "conv.weight", "lm_head.weight"],
        ["norm.weight", "norm.bias", "up.bias", "conv.bias"],
    ]
    optimizer = Muon(groups, lr=0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 3e-4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01, 0.0]
    [first, *_] = muon_groups(Model(), adamw=["up.*", "lm_head.*"])
    assert [name for name, _ in first["params"]] == ["experts"]
    with pytest.raises(
        ValueError, match=r"pattern \(head.\*\) must be that of a trained parameter"
    ):
        muon_groups(Model(), adamw=["head.*"])


def test_the_factor_has_singular_values_near_one_and_converges_in_float64() -> None:
    matrix = torch.randn(12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrix, NewtonSchulz(dtype=torch.float64)))
    assert 0.6 < values.min() < values.max() < 1.3
    exact = NewtonSchulz((1.875, -1.25, 0.375), ns_steps=30, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonalize(matrix, exact) - u @ v).abs().max() < 1e-12


def test_flops_are_those_of_the_products_and_rates_those_of_the_rules() -> None:
    assert flops((4, 10), 5) == flops((10, 4), 5) == 5 * (2 * 2 * 4 * 4 * 10 + 2 * 4**3)
    assert rate_factor(None, (16, 4)) == 2.0
    assert rate_factor("original", (4, 16)) == 1.0
    assert rate_factor("match_rms_adamw", (4, 25)) == 1.0
