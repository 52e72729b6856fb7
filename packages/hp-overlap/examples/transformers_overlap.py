"""A Qwen3-MoE of Hugging Face's transformers whose exchanges of tokens are overlapped.

The experts of every block are spread over two ranks, in forty lines that know nothing of overlap
but two wrapped functions. Then the forward of one microbatch runs with the backward of another, and
logits and gradients are compared with one after the other, and with the model as it was, in fp64.

    pip install hp-overlap transformers
    torchrun --nproc-per-node 2 transformers_overlap.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hp_overlap import CommComputeOverlap
from hp_platform import all_to_all, all_to_all_lazy

CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    experts_implementation="eager",  # transformers' faster ones lack fp64
)


class Sent(NamedTuple):
    """How many rows went to each rank and came from it, and which local expert wants each."""

    to: list[int]
    from_: list[int]
    expert: Tensor


class SpreadExperts(nn.Module):
    """Takes the place of a block's experts and keeps this rank's run of them."""

    def __init__(
        self, experts: Qwen3MoeExperts, group: dist.ProcessGroup, overlap: CommComputeOverlap
    ) -> None:
        super().__init__()
        self.num_local = experts.num_experts // group.size()
        self.group = group
        first = group.rank() * self.num_local
        for name, parameter in list(experts.named_parameters()):
            mine = parameter.detach()[first : first + self.num_local].clone()
            setattr(experts, name, nn.Parameter(mine))
        experts.num_experts = self.num_local
        self.local = experts
        self.dispatch = overlap.wrap_dispatch(self._dispatch)
        self.combine = overlap.wrap_combine(self._combine)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D], experts of each token [T, K] and what each counts [T, K] to [T, D]."""
        expert, order = top_k_index.flatten().sort(stable=True)
        token = order // top_k_index.shape[1]
        rows, sent = self.dispatch(hidden_states[token], expert)
        out = self.local(rows, sent.expert[:, None], torch.ones_like(rows[:, :1]))
        back = self.combine(out, sent)
        weighted = back * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, token, weighted)

    def _dispatch(self, rows: Tensor, expert: Tensor) -> tuple[Tensor, Sent]:
        counts = torch.bincount(expert // self.num_local, minlength=self.group.size())
        received = all_to_all(counts, group=self.group)
        to, from_ = counts.tolist(), received.tolist()
        expert = all_to_all(expert, output_splits=from_, input_splits=to, group=self.group)
        sent = Sent(to, from_, expert % self.num_local)
        # Last, and not waited for: this is what the other microbatch's compute hides.
        rows = all_to_all_lazy(rows, output_splits=from_, input_splits=to, group=self.group)
        return rows, sent

    def _combine(self, out: Tensor, sent: Sent) -> Tensor:
        back: Tensor = all_to_all_lazy(
            out, output_splits=sent.to, input_splits=sent.from_, group=self.group
        )
        return back


def spread(model: PreTrainedModel, overlap: CommComputeOverlap) -> None:
    """Replace the experts of every block."""
    group = dist.group.WORLD
    assert group is not None
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Qwen3MoeExperts):
                setattr(module, name, SpreadExperts(child, group, overlap))


def build() -> PreTrainedModel:
    """The same random model on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).double()


def tokens(microbatch: int) -> Tensor:
    """Other tokens on every rank and in every microbatch."""
    seed = 2 * microbatch + dist.get_rank()
    return torch.randint(64, (2, 6 + seed), generator=torch.Generator().manual_seed(seed))


def step(run: Callable[[Callable[[], object], Callable[[], object]], object]) -> list[Tensor]:
    """Let `run` have a forward of microbatch 1 and a backward of microbatch 0."""
    model = build()
    spread(model, overlap)
    loss = model(input_ids=tokens(0), labels=tokens(0)).loss
    logits: list[Tensor] = []
    run(lambda: logits.append(model(input_ids=tokens(1)).logits.detach()), loss.backward)
    return [*logits, *(p.grad for p in model.parameters() if p.grad is not None)]


overlap = CommComputeOverlap(strict=True)


def main() -> dict[str, float]:
    """Compare; return what is printed."""
    torch.set_num_threads(1)
    overlapped = step(overlap.run)
    sequence = " ".join(f"{entry.side[0]}:{entry.section}" for entry in overlap.trace)
    after_each_other = step(lambda forward, backward: (backward(), forward()))
    with torch.no_grad():
        alone = build()(input_ids=tokens(1)).logits
    found = {
        "tensors": float(len(overlapped)),
        "different": float(
            sum(not torch.equal(a, b) for a, b in zip(overlapped, after_each_other, strict=True))
        ),
        "error": float((overlapped[0] - alone).abs().max() / alone.abs().max()),
    }
    if dist.get_rank() == 0:
        print(sequence)
        print(
            f"{found['tensors']:.0f} tensors, {found['different']:.0f} of them different from one "
            f"after the other; logits differ from one process by {found['error']:.1e}"
        )
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
