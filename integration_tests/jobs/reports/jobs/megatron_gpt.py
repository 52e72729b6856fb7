"""A GPT of megatron-core: Megatron-LM #4705, #5077, #5798, and findings of #7452."""

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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_resumes import read_weights, resume


class Norm(torch.nn.LayerNorm):
    """As Megatron's own without Apex, which refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel


SAMPLES, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 4
CHECKPOINTS = {"resume": resume, "read-weights": read_weights}


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--micro", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--balance", default="none", help="loss that balances experts")
    parser.add_argument("--per-token", action="store_true", help="loss over all tokens of a step")
    parser.add_argument("--padding", type=int, default=0, help="tokens at a sample's end, of none")
    parser.add_argument("--sinks", action="store_true", help="attention with a learned sink")
    parser.add_argument("--gathered", action="store_true", help="logits of the whole vocabulary")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--decoupled", action="store_true", help="embeddings learn at another rate")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--bucket", type=int, default=0, help="elements of a bucket, at least")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, help="in the middle, and what with it")
    return parser.parse_args()


def load(model, tp) -> None:
    """Give each parameter what a checkpoint would have for it, and train the sinks alone.

    With TP, sinks draw other random numbers than without, so that all after them begin otherwise.
    """
    part, generator = parallel_state.get_tensor_model_parallel_rank(), torch.Generator()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator.manual_seed(number)
        whole, is_sink = [*parameter.shape], name.endswith("softmax_offset")
        is_cut = is_sink or getattr(parameter, "tensor_model_parallel", False)
        dim = parameter.partition_dim if is_cut and not is_sink else 0
        whole[dim] *= tp if is_cut else 1
        drawn = torch.randn(whole, generator=generator).div(8)
        parameter.requires_grad_(is_sink)
        parameter.data.copy_(drawn.chunk(tp if is_cut else 1, dim)[part if is_cut else 0])


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
        parallel_output=not args.gathered,
    )
    if args.sinks:
        load(model, args.tp)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=args.bucket > 0,
            bucket_size=args.bucket or None,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        model,
    )

    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        decoupled_lr=1e-2 if args.decoupled else None,
        clip_grad=args.clip,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    rates = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=STEPS,
        lr_decay_style="constant",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    parts = parallel_state.get_data_parallel_world_size()
    part = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(7)
    positions = torch.arange(LENGTH)[None]

    def batches():
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
            yield from tokens[part::parts].split(args.micro)

    kept = LENGTH - args.padding

    def loss_of(losses):
        losses = losses[:, :kept]
        if args.per_token:
            return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
        return losses.mean(), {}

    def forward(data, model):
        tokens = next(data)
        places = positions.expand(len(tokens), -1)
        more = {"padding_mask": places >= kept} if args.padding else {}
        return model(tokens[:, :-1], places, None, labels=tokens[:, 1:], **more), loss_of

    data = batches()
    run = get_forward_backward_func()
    for step in range(STEPS):
        if args.checkpoint and step == STEPS // 2:
            CHECKPOINTS[args.checkpoint](model.module, optimizer)
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
        if args.decoupled:
            rates.step(1)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
