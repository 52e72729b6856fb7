"""One rank of a job of bench_transformers_peers.py: a model of transformers, and who trains it.

    python benchmarks/transformers_peers.py PEER LAYOUT FOLDER

FOLDER has a model in fp32, batches (`batches.pt`: tokens and targets, int64 [B, S]) and, of the
first of them, gradients in one process (`gradients.pt`). Rank 0 writes `PEER LAYOUT.json`: the
largest relative error of a gradient of the first batch, and tokens per CPU second of all ranks in
the steps behind that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

SIZES: dict[str, dict[str, int]] = {
    "one process": {},
    "fsdp 2": {"fsdp_size": 2},
    "tp 2": {"tp_size": 2},
    "ep 2": {"fsdp_size": 2, "ep_size": 2},
    "tp 2 x ep 2": {"tp_size": 2, "ep_size": 2},
}
"""Layout -> arguments of transformers' `DistributedConfig`."""
MESHES: dict[str, dict[str, int]] = {
    "fsdp 2": {"mesh.dp_shard": 2},
    "tp 2": {"mesh.tp": 2},
    "ep 2": {"mesh.dp_shard": 2, "mesh.ep": 2},
    "tp 2 x ep 2": {"mesh.tp": 2, "mesh.ep": 2},
}
"""Layout -> keys of hp-train."""
WARM = 2
"""Steps before those that are measured."""
LEARNING_RATE = 1e-3


class Peer(Protocol):
    """A model, and who trains it."""

    def compute(self, index: int) -> None:
        """Run a batch forward and backward."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Whole gradients by the names of transformers, on all ranks."""

    def update(self) -> None:
        """Take a step of AdamW."""


class Transformers:
    """transformers alone: one process, or its own `DistributedConfig`."""

    def __init__(self, layout: str, folder: Path) -> None:
        transformers = importlib.import_module("transformers")
        more: dict[str, Any] = {"dtype": torch.float32}
        if sizes := SIZES[layout]:
            made = importlib.import_module("transformers.distributed").DistributedConfig
            more["distributed_config"] = made(**sizes)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder / "model", **more).train()
        self._parts = sizes.get("fsdp_size", 1)
        self._batches = torch.load(folder / "batches.pt")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def compute(self, index: int) -> None:
        """Mean cross-entropy of this rank's sequences, and backward."""
        tokens, targets = self._batches[index]
        if self._parts > 1:
            part = dist.get_rank()
            tokens, targets = tokens.chunk(self._parts)[part], targets.chunk(self._parts)[part]
        logits = self.model(input_ids=tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()

    def gradients(self) -> Mapping[str, Tensor]:
        """What `full_tensor` says."""
        named = self.model.named_parameters()
        return {name: whole(p.grad) for name, p in named if p.grad is not None}

    def update(self) -> None:
        """Update each parameter by itself: DTensors and tensors are not updated together."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class HpTrain:
    """hp-train's trainer, with its own batches, clipping and reports."""

    def __init__(self, layout: str, folder: Path) -> None:
        task = importlib.import_module("hp_trainer.config.options")
        shapes = importlib.import_module("hp_trainer.config.transformers_folder")
        launch = importlib.import_module("hp_trainer.launch.task")
        beats = importlib.import_module("hp_trainer.launch.heartbeats").Heartbeats
        stop = importlib.import_module("hp_base.signals").StopFlag
        startup = importlib.import_module("hp_trainer.training.startup")
        trainer = importlib.import_module("hp_trainer.training.trainer").Trainer
        tokenizer = importlib.import_module("hp_data").load_tokenizer("")
        info = importlib.import_module("hp_platform").RankInfo.from_env()
        keys = json.loads((folder / "keys.json").read_text()) | MESHES[layout]
        keys |= {"model.transformers": str(folder / "model"), "train.learning_rate": LEARNING_RATE}
        keys["train.microbatch_size"] = keys["train.global_batch_size"] // MESHES[layout].get(
            "mesh.dp_shard", 1
        )
        keys |= {key: value for key, value, _ in shapes.shape_of_folder(keys)}
        config = task.build(keys)
        run = folder / f"run {layout}"
        run.mkdir(exist_ok=True)
        worker = launch.Worker(info, run, beats.unwatched(), stop(), folder / "tokens")
        self.trainer = trainer(config, worker, startup.connect(config, worker), tokenizer)
        self.trainer.resume()
        self._is_first = True

    def compute(self, index: int) -> None:
        """The first batch; of others, the whole step."""
        if self._is_first:
            self.trainer.compute_gradients()
            return
        assert self.trainer.step == index - 1  # it reads the batches in their order
        self.trainer.train_step()

    def gradients(self) -> Mapping[str, Tensor]:
        """Put together from what ranks have."""
        mine = [(p.name, p.shape, p.span, p.local.grad) for p in self.trainer.parameters]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.trainer.runtime.control)
        found: dict[str, Tensor] = {}
        for name, shape, span, grad in (part for parts in everyone for part in parts):
            into = found.setdefault(name, torch.full(shape, torch.nan))
            into[tuple(slice(*bounds) for bounds in span)] = grad
        return found

    def update(self) -> None:
        """Forget the gradients of the first batch; others have been updated with."""
        if self._is_first:
            self.trainer.optimizer.zero_grad()
        self._is_first = False


def whole(tensor: Any) -> Tensor:
    """A tensor, or what ranks have of it, put together."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def error_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest relative error, and whose; what is missing has an infinite one."""
    errors = {
        name: float((found[name] - one).norm() / one.norm().clamp(min=1e-12))
        if name in found
        else float("inf")
        for name, one in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def main() -> None:
    """Be a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer")
    parser.add_argument("layout")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made: Peer
    if options.peer == "hp-train":
        made = HpTrain(options.layout, options.folder)
    else:
        if options.layout != "one process":
            dist.init_process_group(
                "gloo",
                init_method=os.environ["HP_INIT_METHOD"],  # which hp-train reads by itself
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        made = Transformers(options.layout, options.folder)
    batches = torch.load(options.folder / "batches.pt")
    made.compute(0)
    gradients = made.gradients()
    if options.layout == "one process":
        torch.save(gradients, options.folder / "gradients.pt")
    error, worst = error_of(gradients, torch.load(options.folder / "gradients.pt"))
    made.update()
    for index in range(1, len(batches)):
        if index == 1 + WARM:
            began = time.process_time()
        made.compute(index)
        made.update()
    spent = torch.tensor(time.process_time() - began, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(spent)
    tokens = sum(tokens.numel() for tokens, _ in batches[1 + WARM :])
    if int(os.environ.get("RANK", "0")) == 0:
        told = {"error": error, "worst": worst, "tokens_per_cpu_second": tokens / float(spent)}
        path = options.folder / f"{options.peer} {options.layout}.json"
        path.write_text(json.dumps(told))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
