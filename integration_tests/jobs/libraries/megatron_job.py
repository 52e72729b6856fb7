"""A GPT of megatron-core trained by its own parts: parallel state, DDP, optimizers, schedules."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_on_cpu import pretend

pretend()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 3


class Norm(torch.nn.RMSNorm):
    """As Megatron's own without Apex, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def layers(config):
    """Llama's layers, in modules that need neither Apex nor Transformer Engine."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=Norm)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--wrong", default="", help="a mistake to make")
    parser.add_argument("--save", default="", help="a folder to save a checkpoint to")
    parser.add_argument("--sharding", default="fully_reshardable", help="of the optimizer's state")
    args = parser.parse_args()

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(
        "gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)

    config = TransformerConfig(
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
        sequence_parallel=args.sequence_parallel,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=(lambda *_, **__: None)
        if args.wrong == "no-finalize"
        else finalize_model_grads,
    )
    model = GPTModel(
        config,
        layers(config),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=False, use_distributed_optimizer=args.distributed_optimizer
        ),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=args.clip,
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
