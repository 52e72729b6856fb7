"""The same model in other programs, in one process: its time per step and its memory.

As one would train with them: fp32 weights under torch's autocast, fused AdamW, as many microbatches
of the same length, attention over whole sequences. MFU counts the same operations for both.
"""

import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hp_base.data_sheets import peak_flops
from hp_plan.costs.modules import model_flops
from hp_plan.layouts.measure import synchronize
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.options import resolve, with_keys
from hp_trainer.training.metrics import MemoryUse
from hp_transformers.families.config import hf_config
from integration_tests.acceptance.cases import Case, Place, slug
from integration_tests.acceptance.outcome import Found
from integration_tests.acceptance.speed import STEPS, WARM

Logits = Callable[[nn.Module, Tensor], Tensor]
_LLAMA_8B = 4096
_VOCABULARY = 260


class UnlikeError(Exception):
    """The other program has no such model."""


def rival(case: Case, place: Place, work: Path) -> Found:
    """Train the model of another case in another program."""
    name = case.keys["rival"]
    if importlib.util.find_spec(name) is None:
        return Found(status="left out", summary=f"{name} is not installed")
    folder = work / "speed" / slug(case.keys["of"])
    config = resolve(str(folder / "config.toml"), env={}).config
    model = config.model
    sizes = (model.vocab_size or _VOCABULARY, model.max_positions or config.data.seq_len)
    names = ("model.vocab_size", "model.max_positions")
    config = with_keys(config, dict(zip(names, sizes, strict=True)))
    device = torch.device(place.device)
    try:
        built, logits = _BUILD[name](config.model, device)
        seconds = _train(built, logits, config, device)
    except Exception as error:  # noqa: BLE001 - its interface is its own, and changes
        reason = " ".join(str(error).split())[:200]
        return Found(status="left out", summary=f"{name}: {type(error).__name__}: {reason}")
    tokens = config.train.global_batch_size * config.data.seq_len
    peak = peak_flops(place.name, config.train.dtype)
    flops = model_flops(config, vocab_size=config.model.vocab_size)
    memory = MemoryUse.of(device)
    ours = json.loads((folder / "figures.json").read_text())
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in built.parameters()),
        "step seconds": seconds,
        "tokens/s": tokens / seconds,
        "MFU": None if peak is None else flops * tokens / seconds / peak,
        "peak bytes": memory.peak,
        "reserved bytes": memory.reserved,
        "tokens/s of hp-train": ours["tokens/s"],
        "hp-train / this": ours["tokens/s"] * seconds / tokens,
    }
    summary = f"{tokens / seconds:,.0f} tokens/s, hp-train {figures['hp-train / this']:.2f} of that"
    return Found(status="passed", summary=summary, figures=figures)


def _train(model: nn.Module, logits: Logits, config: Config, device: torch.device) -> float:
    """Median seconds of a step."""
    train, length = config.train, config.data.seq_len
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    dtype = getattr(torch, train.dtype)
    rounds = train.global_batch_size // train.microbatch_size
    ids = torch.randint(_VOCABULARY - 4, (train.microbatch_size, length + 1), device=device)
    spent = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(rounds):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                rows = logits(model, ids[:, :-1]).flatten(0, 1)
            F.cross_entropy(rows.float(), ids[:, 1:].flatten()).div(rounds).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[WARM:])


def _transformers(model: ModelConfig, device: torch.device) -> tuple[nn.Module, Logits]:
    theirs = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        values = hf_config(model, dtype="float32")
        Path(folder, "config.json").write_text(json.dumps(values))
        config = theirs.AutoConfig.from_pretrained(folder)
    with device:
        built = theirs.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    built.train()
    return built, lambda module, ids: module(ids, use_cache=False).logits


def _torchtitan(model: ModelConfig, device: torch.device) -> tuple[nn.Module, Logits]:
    """Its Llama of 8 billion parameters, with as many layers; as of its version 0.3."""
    if model.has_experts or model.dim != _LLAMA_8B:
        raise UnlikeError("of its models the kit knows Llama-3.1-8B, which is too large here")
    theirs = importlib.import_module("torchtitan.models.llama3")
    config = theirs.llama3_configs["8B"](attn_backend="varlen")
    config.layers = config.layers[: model.num_layers]
    with device:
        built = config.build()
        built.init_states()

    def logits(module: Any, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rows: Tensor = module(ids, positions, module.get_attention_masks(positions))
        return rows

    return built, logits


_BUILD: dict[str, Callable[[ModelConfig, torch.device], tuple[nn.Module, Logits]]] = {
    "transformers": _transformers,
    "torchtitan": _torchtitan,
}
