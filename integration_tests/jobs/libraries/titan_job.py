"""torchtitan's Llama 3, its parallelism, optimizers and clipping; its trainer asks for a GPU."""

import argparse
import os

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # what torchtitan takes for its device

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3 import _EMBEDDING_INIT, _NORM_INIT, _output_linear_init
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

SAMPLES, LENGTH, VOCABULARY, STEPS, WIDTH, HEADS = 4, 16, 64, 3, 32, 4


def llama() -> Llama3Model.Config:
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init=_NORM_INIT)
    config = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=_EMBEDDING_INIT
        ),
        norm=norm,
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=_output_linear_init(WIDTH)
        ),
        layers=_build_llama3_layers(
            n_layers=2,
            dim=WIDTH,
            n_heads=HEADS,
            n_kv_heads=2,
            hidden_dim=64,
            rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=LENGTH),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:  # flex attention is compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--wrong", default="", help="a mistake to make")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    torch.distributed.init_process_group(
        "gloo", rank=int(os.environ.get("RANK", "0")), world_size=ranks
    )
    parallelism = ParallelismConfig(tensor_parallel_degree=args.tp, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    set_spmd_backend(parallelism.spmd_backend)
    training = TrainingConfig(
        local_batch_size=SAMPLES,
        seq_len=LENGTH,
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
    )

    with torch.device("meta"):
        model = llama().build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(1234)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizers = default_adamw(lr=1e-2).build(model_parts=[model])
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build(
        compile_config=CompileConfig(enable=False)
    )

    part, parts = 0, 1
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        part, parts = mesh.get_local_rank(), mesh.size()
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        count = tokens[:, 1:].numel() // (parts if args.wrong == "local-count" else 1)
        tokens = tokens[part::parts]
        loss, _ = loss_of(model(tokens[:, :-1]), tokens[:, 1:], torch.tensor(count))
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        optimizers.zero_grad()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
