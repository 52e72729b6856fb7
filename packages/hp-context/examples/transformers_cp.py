"""A Llama of Hugging Face's transformers with its sequence on two ranks.

Trains on documents that are packed into one sequence, and compares the losses and the weights after
a few steps with those of one process, in fp64.

    pip install hp-context transformers
    torchrun --nproc-per-node 2 transformers_cp.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hp_context import (
    HeadTail,
    count_tokens,
    register_attention,
    shard_batch,
    shift_labels,
    sum_gradients,
    token_loss,
)

DOCUMENTS, STEPS, RATE = (9, 14, 1, 8), 4, 0.3
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def build(attention: str) -> LlamaForCausalLM:
    """The same random model on every rank."""
    torch.manual_seed(0)
    config = CONFIG.__class__(**CONFIG.to_dict(), attn_implementation=attention)
    return LlamaForCausalLM(config).double()


def batch(step: int) -> dict[str, torch.Tensor]:
    """A packed sequence [1, S]: position ids begin anew in each document."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(64, (1, sum(DOCUMENTS)), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    # The first token of a document is not to be predicted from the document before.
    labels = ids.masked_fill(position_ids == 0, -100)
    return {"input_ids": ids, "position_ids": position_ids, "labels": labels}


def train_alone() -> tuple[list[float], LlamaForCausalLM]:
    """One process: return losses and the trained model."""
    model, losses = build("sdpa"), []
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        inputs = batch(step)
        targets = shift_labels(inputs.pop("labels"))
        logits = model(**inputs).logits
        loss = token_loss(logits, targets, num_tokens=count_tokens(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train() -> tuple[list[float], LlamaForCausalLM]:
    """This rank's part of the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    register_attention(mesh, load_balance=True)
    model, losses = build("hp_context"), []
    wrapped = sum_gradients(DistributedDataParallel(model))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        inputs = shard_batch(batch(step), mesh, layout=HeadTail())
        targets = inputs.pop("shift_labels")
        del inputs["labels"]
        num_tokens = count_tokens(targets, mesh)
        loss = token_loss(wrapped(**inputs).logits, targets, num_tokens=num_tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, model


def main() -> dict[str, float]:
    """Compare; return what a test asks about."""
    torch.set_num_threads(1)
    (losses, model), (expected, alone) = train(), train_alone()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    found = {
        "loss before": losses[0],
        "loss after": losses[-1],
        "largest difference of a loss": max(
            abs(a - b) for a, b in zip(losses, expected, strict=True)
        ),
        "largest difference of a weight": max(float((a - b).abs().max()) for a, b in pairs),
    }
    if dist.get_rank() == 0:
        for what, number in found.items():
            print(f"{what}: {number:.3g}")
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
