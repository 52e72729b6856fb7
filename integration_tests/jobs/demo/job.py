"""A job of a stranger: a tiny model of transformers, trained by its own code in a layout.

`train` trains it: alone, or with the sizes of transformers' `DistributedConfig`. Nothing of hp-* is
in here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

BATCH, TOKENS, FIRST_TOKEN, LAST_TOKEN = 4, 16, 5, 60


def plans_of(model: Any) -> dict[str, bool]:
    """Which of transformers' plans a model has: `tp`, `ep`, `fsdp`; whether it has `experts`."""
    names = [n for n, _ in model.named_modules()]
    plans = {kind: bool(getattr(model, f"_{kind}_plan", None)) for kind in ("tp", "ep", "fsdp")}
    return {**plans, "experts": any(n.endswith("experts") for n in names)}


def train(folder: Path, sizes: Mapping[str, Any], *, float64: bool = True, steps: int = 2) -> None:
    """Train a model on random tokens.

    Args:
        folder: Where it is.
        sizes: Arguments of `DistributedConfig`; none: one process.
        float64: Whether in float64; otherwise in float32.
        steps: Updates of the weights.
    """
    model = loaded(folder, sizes, float64=float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (BATCH, TOKENS), generator=generator)
        if sizes.get("fsdp_size", 1) > 1:
            tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded(folder: Path, sizes: Mapping[str, Any], *, float64: bool) -> Any:
    """Load a model; in float64, of which torch has no grouped product, experts go in a loop."""
    more: dict[str, Any] = {"dtype": torch.float64 if float64 else torch.float32}
    if sizes:
        more["distributed_config"] = DistributedConfig(**sizes)
    if float64:
        more["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, **more)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of next tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
