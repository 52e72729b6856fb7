"""A GPT of megatron-core trained by its own parts: parallel state, DDP, optimizers, schedules."""

import argparse
import os
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_on_cpu import pretend

pretend()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


class Norm(torch.nn.RMSNorm):
    """As Megatron's own without Apex, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def layers(config):
    """Llama's layers, in modules that need neither Apex nor Transformer Engine."""
    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=Norm)


def later_tokens(config, block):
    """The layer that predicts a token more, whose gradients have a norm of their own."""
    found = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    for layer in found.layer_specs:
        inside = layer.submodules
        inside.enorm = inside.hnorm = inside.layer_norm = Norm
    return found


def save(args, model, optimizer) -> None:
    """Save as Megatron's own trainer does: model, optimizer, random states of every rank."""
    metadata = {"distrib_optim_sharding_type": args.sharding}
    state = model.sharded_state_dict(metadata=metadata)
    place = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    world = (parallel_state.get_data_parallel_world_size(), args.tp)
    random_states = {"torch": torch.get_rng_state(), "cpu": "a word"}
    if args.distributed_optimizer:
        optim = optimizer.sharded_state_dict(state, metadata=metadata)
    else:
        optim = optimizer.sharded_state_dict(state)
    everything = {
        "model": state,
        "optimizer": optim,
        "rng_state": dist_checkpointing.ShardedObject("rng_state", [random_states], world, place),
        "iteration": STEPS,
        "args": args,
    }
    if dist.get_rank() == 0:
        Path(args.save).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(everything, args.save)


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--experts", type=int, default=None, help="of each layer, in place of one")
    parser.add_argument("--bf16", action="store_true", help="weights, with copies in float32")
    parser.add_argument("--mtp", action="store_true", help="predict a token more, detached")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--wrong", default="", help="a mistake to make")
    parser.add_argument("--save", default="", help="a folder to save a checkpoint to")
    parser.add_argument("--sharding", default="fully_reshardable", help="of the optimizer's state")
    return parser.parse_args()


def config_of(args):
    more = {}
    if args.experts:
        if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16 has no other then
            moe_utils.te_general_gemm = None
        more |= {"num_moe_experts": args.experts, "moe_router_topk": 2}
        more |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
    if args.mtp:
        more |= {"mtp_num_layers": 1}
        if hasattr(TransformerConfig, "mtp_detach_heads"):  # from megatron-core 0.19 on
            more |= {"mtp_detach_heads": True}
    if args.bf16:
        more |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.sequence_parallel,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=(lambda *_, **__: None)
        if args.wrong == "no-finalize"
        else finalize_model_grads,
        **more,
    )


def model_of(config, args):
    block = layers(config)
    model = GPTModel(
        config,
        block,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=later_tokens(config, block) if args.mtp else None,
    )
    if args.experts:
        give_experts(model)
    return Float16Module(config, model) if args.bf16 else model


def give_experts(model) -> None:
    """Set weights as a checkpoint would: ranks draw experts of their own alike."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            first, inside, rest = name.partition("local_experts.")
            number, _, rest = rest.partition(".")
            if inside:
                here = (
                    model.config.num_moe_experts
                    // parallel_state.get_expert_model_parallel_world_size()
                )
                number = int(number) + here * parallel_state.get_expert_model_parallel_rank()
            seed = zlib.crc32(f"{first}{number}{rest}".encode())
            parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    args = parsed()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(
        "gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp, expert_model_parallel_size=args.ep
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)

    config = config_of(args)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=False, use_distributed_optimizer=args.distributed_optimizer
        ),
        model_of(config, args),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=args.clip,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        [model],
    )

    ranks = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(7)
    positions = torch.arange(LENGTH)[None]

    def batches():
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
            for sample in tokens[rank::ranks]:
                yield sample[None]

    def loss_of(losses):
        return losses.mean(), {}

    def forward(data, model):
        tokens = next(data)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, loss_of

    data = batches()
    run = get_forward_backward_func()
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=SAMPLES // ranks,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
    if args.save:
        save(args, model.module, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
