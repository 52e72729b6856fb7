"""A step of reinforcement learning whose trainer takes the experts that the rollout took.

Each of two ranks generates with a model in bf16, one process, and records which experts it chose.
The trainer has the same weights in fp32 and its experts on two ranks; it replays the choice, with
live gradients of its routers, and takes a policy-gradient step.

    pip install hp-expert transformers
    torchrun --nproc-per-node 2 rl_replay.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hp_expert import apply_to_transformers, record_routing, replay_routing, save_routing

PROMPTS, PROMPT, NEW = 4, 5, 7
CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=12,
    head_dim=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
)


def build() -> PreTrainedModel:
    """The same weights everywhere."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def rollout(prompts: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Generate; return sequences [B, S + 1] and the experts of each layer [B, S, K]."""
    model = apply_to_transformers(build().to(torch.bfloat16).eval())
    with record_routing(model) as record:
        sequences = model.generate(
            prompts, max_new_tokens=NEW, do_sample=True, eos_token_id=None, pad_token_id=0
        )
    # The last token was never put in.
    return sequences, record.experts(num_sequences=len(prompts))


def log_probabilities(model: PreTrainedModel, sequences: torch.Tensor) -> torch.Tensor:
    """Of the generated tokens [B, NEW]."""
    logits = model(sequences[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    targets = sequences[:, PROMPT:]
    return F.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def main() -> dict[str, float]:
    """Take one step; return what a test asks about."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    prompts = torch.randint(3, 64, (PROMPTS, PROMPT))
    trainer = apply_to_transformers(build().train(), dist.group.WORLD)
    trainer.activation_checkpointing_enable({"use_reentrant": False, "context_fn": save_routing})
    torch.manual_seed(10 + rank)
    sequences, experts = rollout(prompts)
    with torch.no_grad(), record_routing(trainer) as live:
        log_probabilities(trainer, sequences)
    with replay_routing(trainer, experts), record_routing(trainer) as replayed:
        chosen = log_probabilities(trainer, sequences)
    reward = (sequences[:, PROMPT:] % 2).float().mean(dim=1)
    advantage = reward - reward.mean()
    (-(advantage[:, None] * chosen).sum()).backward()
    moved = [
        (a != b).float().mean() for a, b in zip(live.experts(num_sequences=4), experts, strict=True)
    ]
    found = {
        "tokens whose experts the trainer alone would have changed": float(
            torch.stack(moved).max()
        ),
        "layers that took other experts than the rollout": float(
            sum(
                not torch.equal(a, b)
                for a, b in zip(replayed.experts(num_sequences=4), experts, strict=True)
            )
        ),
        "norm of the routers' gradients": float(
            sum(layer.mlp.gate.weight.grad.norm() for layer in trainer.model.layers)
        ),
    }
    if rank == 0:
        for what, number in found.items():
            print(f"{what}: {number:.3g}")
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
