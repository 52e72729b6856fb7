"""The layer as a whole, in one process. Over ranks: `test_expert_parallel.py`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform.testing import run_in_threads, slow_group

DIM, HIDDEN, EXPERTS = 6, 10, 5


def layer(*, shared: nn.Module | None = None) -> MoE:
    torch.manual_seed(0)
    router = TopKRouter(DIM, EXPERTS, 2, score_function="sigmoid")
    return MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN), shared=shared).double()


def test_the_layer_is_the_weighted_sum_of_its_experts() -> None:
    moe, x = layer(shared=nn.Linear(DIM, DIM)), torch.randn(2, 7, DIM, dtype=torch.float64)
    y, routing = moe(x)
    assert moe.shared is not None
    flat, w = x.flatten(0, 1), moe.experts
    for t in range(14):
        expected = moe.shared(flat[t])
        for weight, e in zip(routing.weights[t], routing.experts[t].tolist(), strict=True):
            hidden = F.silu(w.w1[e] @ flat[t]) * (w.w3[e] @ flat[t])
            expected = expected + weight * (w.w2[e] @ hidden)
        assert torch.allclose(y.flatten(0, 1)[t], expected, rtol=1e-12)


def test_a_batch_is_the_same_as_its_sequences_one_by_one() -> None:
    moe, x = layer(), torch.randn(3, 7, DIM, dtype=torch.float64)
    whole, routing = moe(x)
    parts = [moe(sequence.unsqueeze(0)) for sequence in x]
    assert torch.allclose(torch.cat([y for y, _ in parts]), whole, rtol=1e-12, atol=1e-15)
    assert torch.equal(torch.cat([r.experts for _, r in parts]), routing.experts)


@pytest.mark.parametrize("shape", [(0, 7, DIM), (2, 0, DIM), (4, DIM), (2, 3, 2, DIM)])
def test_any_dims_before_the_last_are_taken(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, routing = layer()(x)
    assert y.shape == shape
    assert routing.experts.shape == (x[..., 0].numel(), 2)
    y.sum().backward()
    assert x.grad is not None


def test_a_strided_input_gives_the_same() -> None:
    moe, x = layer(), torch.randn(7, 2, DIM, dtype=torch.float64)
    strided = x.transpose(0, 1)
    assert torch.equal(moe(strided)[0], moe(strided.contiguous())[0])


def test_the_shared_expert_runs_while_rows_travel() -> None:
    order: list[str] = []

    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order.append("shared")
            return x

    moe = layer(shared=Shared())
    dispatcher = moe.experts.dispatcher

    class Watched:
        def __getattr__(self, name: str) -> object:
            if callable(found := getattr(dispatcher, name)):
                order.append(name)
            return found

    moe.experts.dispatcher = Watched()  # type: ignore[assignment]
    moe(torch.randn(1, 3, DIM, dtype=torch.float64))
    assert order == [
        "prepare",
        "launch_dispatch",
        "shared",
        "finish_dispatch",
        "launch_combine",
        "finish_combine",
    ]


def shared_while_rows_travel(group: ProcessGroup) -> list[bool]:
    """Tell whether the exchange of rows was over when the shared expert began, ended, and after."""
    slow = slow_group(group, latency=0.3)
    over: list[bool] = []

    class Shared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            # The link works in order: this is done once the rows have arrived.
            self.behind_rows = slow.link.submit(int)  # type: ignore[attr-defined]
            over.append(self.behind_rows.done())
            y = super().forward(x)
            over.append(self.behind_rows.done())
            return y

    router = TopKRouter(DIM, 4, 2)
    shared = Shared(DIM, DIM)
    moe = MoE(router, GroupedExperts(4, DIM, HIDDEN), shared=shared)
    ExpertParallel().apply(moe, slow)
    moe(torch.randn(2, 3, DIM))
    over.append(shared.behind_rows.done())
    return over


def test_the_shared_expert_is_done_before_the_rows_are_here() -> None:
    results = run_in_threads(shared_while_rows_travel, world_size=2, timeout=30)
    assert results == [[False, False, True]] * 2


def test_nothing_is_left_on_the_module_after_a_call() -> None:
    moe = layer()
    before = {name: dict(vars(part)) for name, part in moe.named_modules()}
    moe(torch.randn(1, 3, DIM, dtype=torch.float64))
    assert {name: dict(vars(part)) for name, part in moe.named_modules()} == before


def test_router_and_experts_must_agree_on_their_number() -> None:
    with pytest.raises(ValueError, match=r"num_experts of the router \(4\) must equal .* \(5\)"):
        MoE(TopKRouter(DIM, 4, 2), GroupedExperts(5, DIM, HIDDEN))


def test_autocast_multiplies_in_bf16_sums_in_fp32_and_gives_fp32_gradients() -> None:
    moe, x = layer().float(), torch.randn(2, 7, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = moe(x)
    assert (y.dtype, routing.weights.dtype) == (torch.float32, torch.float32)
    y.sum().backward()
    assert {p.grad.dtype for p in (x, *moe.parameters()) if p.grad is not None} == {torch.float32}
    exact, _ = moe(x)
    assert (y - exact).abs().max() < 3e-2 * exact.abs().max()
