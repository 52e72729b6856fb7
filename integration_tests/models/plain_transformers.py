"""A tiny model of transformers, and its training in plain transformers in one process.

Nothing of how hp-train runs a model is in here: `AutoModelForCausalLM`, torch's AdamW, and the
sequences that a run reads.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from hp_data.dataset import Dataset
from hp_platform.device import lifting
from hp_trainer.config import Config
from hp_trainer.config.options import build
from hp_trainer.config.transformers_folder import shape_of_folder
from hp_trainer.training.optimizer import learning_rate
from integration_tests.runs import BASE, Result, prepare_run

VOCAB = 320  # more than there are bytes
SPREAD = 0.05
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}
"""Type of a model -> fields of its config, besides those that all have."""


def make_folder(name: str, folder: Path, *, weights: bool = True, **fields: Any) -> Path:
    """Write a model, in float64.

    Args:
        name: Type of the model.
        folder: Where it is written.
        weights: Whether it has weights, none of them a constant that hides a mistake.
        **fields: Further fields of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - who has it

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model(name, **{**common, **FIELDS[name], **fields})
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, None)
    if not weights:
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
    model.save_pretrained(folder)
    return folder


def run_of(folder: Path, **keys: Any) -> Config:
    """The config of a short run in float64.

    Args:
        folder: Folder of the model.
        **keys: Keys of a config, with `__` for the dot.
    """
    values: dict[str, Any] = {
        f"{section}.{name}": value
        for section, table in BASE.items()
        if section != "model"
        for name, value in table.items()
    }
    values |= {"train.dtype": "float64", "train.steps": 3, "data.documents": "joined"}
    values |= {"model.transformers": str(folder), "train.weight_decay": 0.1}
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    values |= {key: value for key, value, _ in shape_of_folder(values)}
    return build(values)


def loaded(folder: Path) -> Any:
    """The model of a folder in float64, in training mode; torch has no grouped product in it."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - who has it

    more = {"dtype": torch.float64, "experts_implementation": "eager"}
    with lifting():  # what it computes when it is made, rotary angles for example
        return AutoModelForCausalLM.from_pretrained(folder, **more).train()


def train_plainly(config: Config, directory: Path, model: Any = None) -> Result:
    """Train the model of a config as a stranger would: no mesh, no stages, no sharding.

    Args:
        config: Configuration of the run; only its batches and its optimizer are looked at.
        directory: Directory of the run.
        model: Model to train; None: that of its folder.
    """
    prepare_run(config, directory)
    train, data = config.train, config.data
    separate = data.documents == "separate"
    sequences = Dataset.open(
        directory / "data", "train", seq_len=data.seq_len, seed=config.run.seed, separate=separate
    )
    model = loaded(Path(config.model.transformers)) if model is None else model
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(train.beta1, train.beta2),
        eps=train.adam_eps,
    )
    found = Result()
    for step in range(train.steps):
        first = step * train.global_batch_size
        batch = sequences.batch(range(first, first + train.global_batch_size))
        loss = mean_loss(model, batch.tokens, batch.targets, documents=batch.documents)
        balance = balance_loss(model, batch.tokens, batch.documents, train.microbatch_size)
        (loss + balance).backward()
        gradients = {n: _or_zero(p) for n, p in named.items()}
        if step == 0:
            found.first_gradients.update({n: g.clone() for n, g in gradients.items()})
        norm = get_total_norm([*gradients.values()])
        for gradient in gradients.values():  # torch's own way divides by the norm + 1e-6
            gradient.mul_(min(1.0, train.max_grad_norm / float(norm)))
        found.losses.append(loss.item())
        found.balances.append(balance.item())
        found.norms.append(float(norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        for parameter in named.values():
            parameter.grad.zero_()  # one that was not used is decayed, too
    found.parameters.update({n: p.detach() for n, p in named.items()})
    for moment in ("exp_avg", "exp_avg_sq"):
        found.moments.update(
            {f"{moment}.{n}": optimizer.state[p][moment] for n, p in named.items()}
        )
    return found


def _or_zero(parameter: Any) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient: Tensor = parameter.grad
    return gradient


def mean_loss(
    model: Any, tokens: Tensor, targets: Tensor, *, documents: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Mean cross-entropy of the tokens after each, sequence by sequence, a document at a time.

    Args:
        model: Model of transformers.
        tokens: int64 [B, S].
        targets: int64 [B, S], negative where none is to be learned.
        documents: Lengths of the documents in each sequence.
    """
    total = torch.zeros((), dtype=torch.float64)
    for row, aims, lengths in zip(tokens, targets, documents, strict=True):
        for part, its in zip(row.split(lengths), aims.split(lengths), strict=True):
            with lifting():
                logits = model(input_ids=part[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, its, ignore_index=-1, reduction="sum")
    return total / (targets >= 0).sum()


def balance_loss(
    model: Any, tokens: Tensor, documents: tuple[tuple[int, ...], ...], size: int
) -> Tensor:
    """The loss that balances experts, where a config asks for one: the mean over calls.

    Args:
        model: Model of transformers.
        tokens: int64 [B, S].
        documents: Lengths of the documents in each sequence.
        size: Sequences of a call.
    """
    total = torch.zeros((), dtype=torch.float64)
    if not getattr(model.config, "output_router_logits", False):
        return total
    for rows, its in zip(tokens.split(size), _split(documents, size), strict=True):
        positions = None
        if max(map(len, its)) > 1:
            parts = [torch.cat([torch.arange(length) for length in row]) for row in its]
            positions = torch.stack(parts)
        with lifting():
            aux = model(input_ids=rows, position_ids=positions, use_cache=False).aux_loss
        total = total + aux * len(rows) / len(tokens)
    coefficient: float = model.config.router_aux_loss_coef
    return total * coefficient


def _split(documents: tuple[Any, ...], size: int) -> list[tuple[Any, ...]]:
    return [documents[start : start + size] for start in range(0, len(documents), size)]
