"""A model of transformers trained in one process by transformers and torch, as anybody would.

Shape symbols: B sequences, S positions, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from hp_data.dataset import Batch
from hp_platform.device import lifting
from integration_tests.models.architectures.cells import PACKED, SIZES
from integration_tests.models.architectures.task import BATCH, COMMON, STEPS, dataset
from integration_tests.models.architectures.trained import Trained

_ATTENTION = ("sdpa", "eager")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class Reference:
    """What one process computes of a model.

    Attributes:
        joined: Training with each sequence as one document, by the sequences of a call of which
            experts are balanced; that of 0: none are.
        separate: Training with every document by itself, likewise; empty: the model cannot have so
            few tokens.
        attention: What computes attention.
        has_experts: Whether the model has some.
    """

    joined: dict[int, Trained]
    separate: dict[int, Trained]
    attention: str
    has_experts: bool

    def of(self, documents: str, size: int) -> Trained | None:
        """What belongs to values of `data.documents` and `train.microbatch_size`."""
        found = self.separate if documents == "separate" else self.joined
        return found.get(size, found.get(0))

    def save(self, path: Path) -> None:
        """Write it for other processes."""
        torch.save(asdict(self), path)

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """Read what :meth:`save` has written."""
        fields = torch.load(path, weights_only=True)
        for name in ("joined", "separate"):
            fields[name] = {size: Trained(**one) for size, one in fields[name].items()}
        return cls(**fields)


def refer(model: Path, data: Path, *, trusted: bool) -> Reference:
    """Train a model in one process; everything that asks for a shorter float must be lifted.

    Args:
        model: Its folder.
        data: Folder of the tokens.
        trusted: Whether code in the folder of the model is run.
    """
    first, attention = _loaded(model, trusted=trusted)
    has_experts = any(name.endswith("experts") for name, _ in first.named_modules())
    tokens = dataset(data, separate=False).batch(range(1)).tokens
    balances = _balance(first, tokens) is not None
    joined, separate = {}, {}
    for size in SIZES if balances else (0,):
        made, _ = _loaded(model, trusted=trusted)
        joined[size] = _train(made, data, size, separate=False)
    try:
        size = PACKED if balances else 0
        made, _ = _loaded(model, trusted=trusted)
        separate[size] = _train(made, data, size, separate=True)
    except (ValueError, TypeError):  # a length that documents have not; no positions
        pass
    return Reference(joined, separate, attention, has_experts)


def load(folder: Path, **more: Any) -> Any:
    """Load a model in float64; of which torch has no grouped product, so experts go in a loop."""
    with lifting():  # some make parameters in float32, whatever is asked for
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager", **more
        )


def _loaded(folder: Path, *, trusted: bool) -> tuple[Any, str]:
    more = {"trust_remote_code": True} if trusted else {}
    for attention in _ATTENTION:
        try:
            model = load(folder, attn_implementation=attention, **more).double().train()
        except ValueError as error:
            if attention == _ATTENTION[-1] or "attention" not in str(error):
                raise
            continue
        _freeze(model, folder, more)
        return model, attention
    raise AssertionError


def _freeze(model: Any, folder: Path, more: Mapping[str, Any]) -> None:
    """Freeze what the model's constructor freezes: loading forgets it."""
    config = transformers.AutoConfig.from_pretrained(folder, **more)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, **more)
    for name, parameter in made.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)


def _whole(model: Any, batch: Batch) -> Tensor:
    """Logits [B, S, V] of sequences."""
    logits: Tensor = model(input_ids=batch.tokens, use_cache=False).logits
    return logits


def _by_document(model: Any, batch: Batch) -> Tensor:
    """Logits [B, S, V] of sequences, each of whose documents is computed alone."""
    rows = []
    for tokens, lengths in zip(batch.tokens, batch.documents, strict=True):
        parts = [
            model(input_ids=part[None], use_cache=False).logits for part in tokens.split(lengths)
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def _balance(model: Any, tokens: Tensor, **more: Any) -> Tensor | None:
    """The loss that balances experts in one call; None: there is none."""
    found = getattr(model(input_ids=tokens, use_cache=False, **more), "aux_loss", None)
    if found is None:
        return None
    name = next(name for name in _COEFFICIENTS if hasattr(model, name))
    balance: Tensor = found * getattr(model, name)
    return balance


def _balance_of(model: Any, batch: Batch, size: int) -> Tensor:
    """The mean of that loss over calls."""
    total = torch.zeros(())
    for start in range(0, BATCH if size else 0, size or 1):
        more = {}
        lengths = batch.documents[start : start + size]
        if max(map(len, lengths)) > 1:  # several documents, which positions keep apart
            rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
            more = {"position_ids": torch.stack(rows)}
        found = _balance(model, batch.tokens[start : start + size], **more)
        assert found is not None
        total = total + found * size / BATCH
    return total


def _train(model: Any, data: Path, size: int, *, separate: bool) -> Trained:
    forward = _by_document if separate else _whole
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.ndim > 1 and p.requires_grad]
    others = [p for p in named.values() if not (p.ndim > 1 and p.requires_grad)]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": COMMON["train.weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=COMMON["train.learning_rate"],
        betas=(COMMON["train.beta1"], COMMON["train.beta2"]),
        eps=COMMON["train.adam_eps"],
    )
    logits: list[Tensor] = []
    losses, norms, gradients = [], [], []
    sequences = dataset(data, separate=separate)
    for start in range(0, STEPS * BATCH, BATCH):
        batch = sequences.batch(range(start, start + BATCH))
        logits.append(forward(model, batch))
        flat, targets = logits[-1].flatten(0, 1), batch.targets.flatten()
        loss = F.cross_entropy(flat, targets, ignore_index=-1)
        (loss + _balance_of(model, batch, size)).backward()
        for parameter in named.values():  # of what took no part, too
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.stack([g.norm() for g in found.values()]).norm()
        losses.append(loss.item())
        norms.append(norm.item())
        gradients.append(found)
        scale = min(1.0, COMMON["train.max_grad_norm"] / norm.item())
        for parameter in named.values():
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in named.items()}
    return Trained(logits[0].detach(), losses, norms, gradients, weights)
