"""Trains the models of bench_train.py with torch alone: the other side of that benchmark.

FSDP2, `torch.distributed.pipelining` and an exchange of experts by `all_to_all_single_autograd`, as
one would write them with torch's documentation at hand. Run by torchrun:

    torchrun --standalone --nproc-per-node 4 benchmarks/plain_torch.py llama3 pp2_dp2 --steps 10

Shape symbols: B sequences, S positions, D model width, N heads, T tokens, K experts per token, E
experts, L experts of a rank, W ranks, R routed rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

VOCAB, DIM, LAYERS, HEADS, SEQ_LEN, SEQUENCES = 2048, 256, 6, 16, 256, 2
DENSE_HIDDEN = {"llama3": 768, "deepseek_v3": 1024}
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
EXPERTS, TOP_K, EXPERT_HIDDEN, SHARED = 8, 3, 256, 2


@dataclass(frozen=True)
class Layout:
    """How four ranks share the work.

    Attributes:
        pp: Pipeline ranks; the others share the sequences, and the experts if there are any.
        stages_per_rank: 1 for 1F1B, 2 for interleaved 1F1B.
        microbatches: Of each rank and step, `SEQUENCES` sequences each.
    """

    pp: int
    stages_per_rank: int
    microbatches: int


LAYOUTS = {
    "fsdp4": Layout(1, 1, 1),
    "pp2_dp2": Layout(2, 1, 4),
    "fsdp4_ep4": Layout(1, 1, 1),
    "pp2_ep2": Layout(2, 2, 4),
}


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of neighbouring channels of heads [B, S, N, H] by complex [S, H / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def turns(width: int, theta: float) -> Tensor:
    """Complex [S, width / 2] on the unit circle, in the default dtype's precision."""
    wide = torch.float64
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=wide, device="cpu") / width)
    angles = torch.outer(torch.arange(SEQ_LEN, dtype=wide, device="cpu"), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)
    return turn.to(torch.get_default_dtype().to_complex())


class Attention(nn.Module):
    """Causal attention with one key head per query head."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turn), rotate(k, turn), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention without compressed queries."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(DIM, LATENT + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT, eps=1e-6)
        self.wkv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.wo = nn.Linear(HEADS * VALUE, DIM, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        q_nope, q_rope = self.wq(x).unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], -1)
        latent, k_rope = self.wkv_a(x).split([LATENT, ROPE], -1)
        kv = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (HEADS, -1))
        k_nope, v = kv.split([NOPE, VALUE], -1)
        k_rope = rotate(k_rope.unsqueeze(2), turn).expand(-1, -1, HEADS, -1)
        q = torch.cat((q_nope, rotate(q_rope, turn)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class MoE(nn.Module):
    """Experts that the ranks of a group share, a shared expert, softmax top-k."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        local = EXPERTS // group.size()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.shared = FeedForward(SHARED * EXPERT_HIDDEN)
        self.w1 = nn.Parameter(torch.empty(local, DIM, EXPERT_HIDDEN))
        self.w3 = nn.Parameter(torch.empty(local, DIM, EXPERT_HIDDEN))
        self.w2 = nn.Parameter(torch.empty(local, EXPERT_HIDDEN, DIM))

    def experts(self) -> list[nn.Parameter]:
        """What FSDP is to leave alone."""
        return [self.w1, self.w2, self.w3]

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x_TD = x.flatten(0, 1)
        scores = self.router(x_TD).softmax(-1)
        weights, chosen = scores.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // TOP_K
        y = self._through(x_TD[token], chosen) * weights.flatten()[order].unsqueeze(1)
        out: Tensor = self.shared(x_TD)
        return out.index_add(0, token, y).view_as(x)

    def _through(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows [R, D] sorted by expert, to their experts and back."""
        num_ranks = self.group.size()
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(num_ranks, -1).sum(1).tolist()
        by_rank = theirs.view(num_ranks, -1)
        received = by_rank.sum(1).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        # From one run per rank and expert to one run per expert.
        expert = torch.arange(len(theirs)) % by_rank.shape[1]
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        y = self._products(rows[order], by_rank.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return all_to_all_single_autograd(y[back], sent, received, self.group)

    def _products(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        matrices = zip(self.w1.unbind(), self.w3.unbind(), self.w2.unbind(), strict=True)
        return torch.cat(
            [
                (F.silu(x @ w1) * (x @ w3)) @ w2
                for x, (w1, w3, w2) in zip(rows.split(counts), matrices, strict=True)
            ]
        )


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual connection."""

    def __init__(self, model: str, layer: int, experts: dist.ProcessGroup) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))
        self.attention = Attention() if model == "llama3" else LatentAttention()
        dense = model == "llama3" or layer == 0
        self.feed_forward = FeedForward(DENSE_HIDDEN[model]) if dense else MoE(experts)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), turn)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Stage(nn.Module):
    """One stage of the model: embedding, layers, norm and output as far as it has them."""

    turn: Tensor

    def __init__(
        self, model: str, layers: range, experts: dist.ProcessGroup, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM) if first else None
        self.layers = nn.ModuleList(Block(model, layer, experts) for layer in layers)
        self.norm = nn.RMSNorm(DIM, eps=1e-5) if last else None
        self.output = nn.Linear(DIM, VOCAB, bias=False) if last else None
        width = DIM // HEADS if model == "llama3" else ROPE
        theta = 500_000.0 if model == "llama3" else 10_000.0
        self.register_buffer("turn", turns(width, theta), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [B, S] or activations [B, S, D] to activations or logits [B, S, V]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.turn)
        if self.norm is None or self.output is None:
            return x
        logits: Tensor = self.output(self.norm(x))
        return logits


def build(model: str, layout: Layout, mesh: DeviceMesh) -> list[Stage]:
    """Build this rank's stages, sharded over its data-parallel ranks."""
    num_stages = layout.pp * layout.stages_per_rank
    sizes = [LAYERS // num_stages + (i < LAYERS % num_stages) for i in range(num_stages)]
    dp = mesh["dp"]
    stages = []
    for stage in range(mesh["pp"].get_local_rank(), num_stages, layout.pp):
        start = sum(sizes[:stage])
        module = Stage(
            model,
            range(start, start + sizes[stage]),
            dp.get_group(),
            first=stage == 0,
            last=stage == num_stages - 1,
        )
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        moes = [part for part in module.modules() if isinstance(part, MoE)]
        ignored = {parameter for moe in moes for parameter in moe.experts()}
        # Stages keep their parameters between microbatches; otherwise FSDP's default.
        reshard = None if layout.pp == 1 else False
        for part in (*module.layers, module):
            fully_shard(part, mesh=dp, ignored_params=ignored, reshard_after_forward=reshard)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens
            part.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums
        stages.append(module)
    return stages


class Loss:
    """Sum of the cross-entropy over a global number of tokens, remembered for printing."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.total = torch.zeros(())

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits [B, S, V] and targets [B, S]."""
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / self.tokens
        self.total = self.total + loss.detach()
        return loss


def stepper(
    stages: list[Stage], layout: Layout, mesh: DeviceMesh, loss: Loss
) -> Callable[[Tensor, Tensor], None]:
    """Return what runs forward and backward of a batch."""
    if layout.pp == 1:

        def run(tokens: Tensor, targets: Tensor) -> None:
            loss(stages[0](tokens), targets).backward()

        return run
    pp = mesh["pp"]
    num_stages, rank = layout.pp * layout.stages_per_rank, pp.get_local_rank()
    pipeline: list[Any] = [
        PipelineStage(
            stage,
            rank + layout.pp * i,
            num_stages,
            torch.device("cpu"),
            group=pp.get_group(),
        )
        for i, stage in enumerate(stages)
    ]
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if layout.stages_per_rank == 1:
        schedule = Schedule1F1B(pipeline[0], layout.microbatches, **options)
    else:
        schedule = ScheduleInterleaved1F1B(pipeline, layout.microbatches, **options)

    def step(tokens: Tensor, targets: Tensor) -> None:
        arguments = (tokens,) if rank == 0 else ()
        wanted = targets if rank == layout.pp - 1 else None
        schedule.step(*arguments, target=wanted, return_outputs=False)

    return step


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Scale gradients to a norm: shards and experts are parts of this rank alone."""
    local = [grad_of(parameter) for parameter in parameters]
    square = nn.utils.get_total_norm(local, foreach=True).double().square()
    dist.all_reduce(square)
    norm = square.sqrt()
    if norm > limit:
        for gradient in local:
            gradient.mul_(limit / norm)
    return norm.item()


def grad_of(parameter: nn.Parameter) -> Tensor:
    """Return the local part of a gradient; zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    """Train and print a line of JSON per step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(DENSE_HIDDEN))
    parser.add_argument("layout", choices=sorted(LAYOUTS))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = LAYOUTS[options.layout]
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (layout.pp, dist.get_world_size() // layout.pp), mesh_dim_names=("pp", "dp")
    )
    torch.manual_seed(dist.get_rank())
    stages = build(options.model, layout, mesh)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    # The fused kernel takes no mixture of DTensors and experts.
    groups = [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=3e-4, betas=(0.9, 0.95), fused=True
    )
    sequences = SEQUENCES * layout.microbatches
    loss = Loss(mesh["dp"].size() * sequences * SEQ_LEN)
    run = stepper(stages, layout, mesh, loss)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    before = time.process_time()
    for step in range(1, options.steps + 1):
        block = torch.randint(256, (sequences, SEQ_LEN + 1), generator=generator)
        loss.total = torch.zeros(())
        run(block[:, :-1].contiguous(), block[:, 1:].contiguous())
        norm = clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.process_time()
        facts = torch.zeros(2 + dist.get_world_size(), dtype=torch.float64)
        facts[0], facts[1] = loss.total, now - before
        facts[2 + dist.get_rank()] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before = now
        dist.all_reduce(facts)
        if dist.get_rank() == 0:
            told = {"step": step, "loss": float(facts[0]), "grad_norm": norm}
            told |= {"cpu_seconds": float(facts[1]), "peak_memory_mib": float(facts[2:].max())}
            print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
