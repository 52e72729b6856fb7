"""A model of transformers in torchtitan's back end for such models, for transformers_peers.py.

Its trainer asks for a GPU, so this does on a CPU what it does: build, `parallelize`, load, train. Its
attention is torch's flex attention, which is compiled, and of which no backward is compiled for a
CPU; here it runs as torch's own program of operators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

torch._utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001 - what it takes for its device

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.experiments.transformers_modeling_backend import (
    TitanModelConfig,
    TitanMoeModelConfig,
    parallelize_hf_transformers,
)
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel
from torchtitan.experiments.transformers_modeling_backend.state_dict_adapter import (
    hf_to_titan_moe_state_dict,
    titan_to_hf_moe_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

DEGREES: dict[str, dict[str, int]] = {
    "fsdp 2": {},
    "tp 2": {"tensor_parallel_degree": 2},
    "ep 2": {"expert_parallel_degree": 2},
    "tp 2 x ep 2": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
}


class Titan:
    """See `transformers_peers.Peer`."""

    def __init__(self, layout: str, folder: Path) -> None:
        torch.compiler.set_stance("force_eager")
        ranks = int(os.environ["WORLD_SIZE"])
        parallelism = ParallelismConfig(spmd_backend="spmd_types", **DEGREES[layout])
        self._dims = ParallelDims.from_config(parallelism, ranks)
        self._dims.build_mesh()
        set_spmd_backend(parallelism.spmd_backend)
        self._batches = torch.load(folder / "batches.pt")
        tokens, _ = self._batches[0]
        training = TrainingConfig(
            local_batch_size=len(tokens),
            seq_len=tokens.shape[1],
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
        )
        source = str(folder / "model")
        has_experts = hasattr(AutoConfig.from_pretrained(source), "num_experts")
        kind = TitanMoeModelConfig if has_experts else TitanModelConfig
        config = HFTransformerModel.Config(model_config=kind())
        asked = SimpleNamespace(
            hf_model=source,
            training=training,
            parallelism=parallelism,
            debug=SimpleNamespace(deterministic=False, moe_force_load_balance=False),
            loss=CrossEntropyLoss.Config(),
        )
        config.update_from_config(config=asked)
        with torch.device("meta"):
            model = config.build()
        self.model = parallelize_hf_transformers(
            model,
            parallel_dims=self._dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_states(buffer_device=torch.device("cpu"))
        self._load(AutoModelForCausalLM.from_pretrained(source).state_dict())
        self._loss = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size).build(
            compile_config=CompileConfig(enable=False)
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        known = {f"model.{n}": w for n, w in hf_to_titan_moe_state_dict(dict(weights)).items()}
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._like(known[name], parameter))

    def _like(self, value: Tensor, parameter: Any) -> Any:
        return torch.distributed.tensor.distribute_tensor(
            value, parameter.device_mesh, parameter.placements
        )

    def compute(self, index: int) -> None:
        """Sum of this rank's losses over the count of all tokens, and backward."""
        tokens, targets = self._batches[index]
        count = torch.tensor(targets.numel())
        if self._dims.dp_enabled:
            mesh = self._dims.get_mesh("batch")
            part, parts = mesh.get_local_rank(), mesh.size()
            tokens, targets = tokens.chunk(parts)[part], targets.chunk(parts)[part]
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        loss, *_ = self._loss(self.model(tokens, positions=positions), targets, count)
        loss.backward()

    def gradients(self) -> Mapping[str, Tensor]:
        """By the names of transformers."""
        found = {
            name.removeprefix("model."): p.grad.full_tensor().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        return titan_to_hf_moe_state_dict(found)

    def update(self) -> None:
        """As torch's AdamW does."""
        self._optimizer.step()
        self._optimizer.zero_grad()
