"""Models of transformers in its own layouts on two and four ranks, beside one process."""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from integration_tests.jobs.demo.job import BATCH, FIRST_TOKEN, LAST_TOKEN, TOKENS, loaded, loss_of
from integration_tests.jobs.search.cases import Job
from integration_tests.models.architectures.tiny import Tiny

MODELS = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "smollm3", "cohere2"),
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe", "glm4_moe", "qwen2_moe"),
)
SIZES: dict[str, dict[str, int]] = {
    "fsdp 4": {"fsdp_size": 4},
    "tp 4": {"tp_size": 4},
    "tp 2 fsdp 2": {"tp_size": 2, "fsdp_size": 2},
    "ep 2 fsdp 4": {"fsdp_size": 4, "ep_size": 2},
    "ep 4 fsdp 4": {"fsdp_size": 4, "ep_size": 4},
    "tp 4 ep 4": {"tp_size": 4, "ep_size": 4},
}
_MADE = Path(tempfile.gettempdir()) / f"hp-search-models-{torch.__version__}"


def cases() -> Iterator[Job]:
    """Return models with sizes of `DistributedConfig`; experts only where there are any."""
    for name in MODELS:
        with_experts = "moe" in name or name in ("mixtral", "gpt_oss", "deepseek_v3")
        for told, sizes in SIZES.items():
            if "ep_size" not in sizes or with_experts:
                train, one = partial(_train, name, sizes), partial(_train, name, {})
                yield Job(f"{name} {told}", train, one, name, 4)


def _train(name: str, sizes: Mapping[str, int]) -> None:
    """Train a tiny model, which its reference makes."""
    folder = _MADE / name
    if not sizes and not folder.exists():
        Tiny(name).make(folder)
    model = loaded(folder, sizes, float64=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(7)
    parts = sizes.get("fsdp_size", 1)
    part = dist.get_rank() * parts // dist.get_world_size() if parts > 1 else 0
    for _ in range(2):
        tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (BATCH, TOKENS), generator=generator)
        loss_of(model, tokens.chunk(parts)[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
