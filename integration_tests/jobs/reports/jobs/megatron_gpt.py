"""A GPT of megatron-core: Megatron-LM #5077, #5798, and finding 8 of #7452."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "libraries"))

import torch
import torch.distributed as dist
from megatron_on_cpu import pretend

pretend()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_resumes import resumed


class Norm(torch.nn.LayerNorm):
    """As Megatron's own without Apex, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel


SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 4


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--micro", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--balance", default="none", help="loss that balances experts")
    parser.add_argument("--per-token", action="store_true", help="loss over all tokens of a step")
    parser.add_argument("--sinks", action="store_true", help="attention with a learned sink")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--bucket", type=int, default=0, help="elements of a bucket, at least")
    parser.add_argument("--resumed", action="store_true", help="in the middle, from a checkpoint")
    return parser.parse_args()


def set_sinks(model, tp) -> None:
    """Give each head the sink that a checkpoint would have for it."""
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            sinks = torch.arange(float(parameter.numel() * tp)).div(10).chunk(tp)
            parameter.data.copy_(sinks[parallel_state.get_tensor_model_parallel_rank()])


def main() -> None:
    args = parsed()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    experts = {
        "num_moe_experts": args.experts,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": args.balance,
        "moe_aux_loss_coeff": 0.1 if args.balance != "none" else 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=args.tp > 1 and args.experts > 0,
        add_bias_linear=not args.experts,  # experts one by one cannot add theirs
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=args.per_token,
        softmax_type="learnable" if args.sinks else "vanilla",
        finalize_model_grads_func=finalize_model_grads,
        **(experts if args.experts else {}),
    )
    layer = get_gpt_layer_local_spec(num_experts=args.experts or None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    set_sinks(model, args.tp)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=args.bucket > 0,
            bucket_size=args.bucket or None,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        model,
    )

    def optimizer_of():
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=args.clip,
            use_distributed_optimizer=args.distributed_optimizer,
        )
        return get_megatron_optimizer(settings, [model])

    optimizer = optimizer_of()
    parts = parallel_state.get_data_parallel_world_size()
    part = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(7)
    positions = torch.arange(LENGTH)[None]

    def batches():
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
            yield from tokens[part::parts].split(args.micro)

    def loss_of(losses):
        if args.per_token:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
        return losses.mean(), {}

    def forward(data, model):
        tokens = next(data)
        places = positions.expand(len(tokens), -1)
        return model(tokens[:, :-1], places, None, labels=tokens[:, 1:]), loss_of

    data = batches()
    run = get_forward_backward_func()
    for step in range(STEPS):
        if args.resumed and step == STEPS // 2:
            optimizer = resumed(model.module, optimizer, optimizer_of)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=SAMPLES // parts // args.micro,
            seq_length=LENGTH,
            micro_batch_size=args.micro,
            forward_only=False,
        )
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
