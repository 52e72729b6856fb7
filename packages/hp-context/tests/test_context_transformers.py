"""Unmodified models of transformers on parts of a sequence give what they give in one process.

The tests need `transformers` and `accelerate`, which no session installs by itself
(`nox -s transformers`).
"""

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hp_context import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Mask,
    SequenceLayout,
    SlidingWindow,
    count_tokens,
    mask_tensor,
    register_attention,
    shard_batch,
    shift_labels,
    sum_gradients,
    token_loss,
    unshard_sequence,
)
from hp_platform.testing import compare, run_distributed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, SEQ, BATCH = 64, 24, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "experts_implementation": "eager",
}
FULL = "full_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
        | {"experts_implementation": "eager", "layer_types": ["sliding_attention", FULL]},
    ),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "qwen3_moe, window": ("Qwen3Moe", EXPERTS | {"sliding_window": 5, "use_sliding_window": True}),
}
IN_ORDER, ZIGZAG = Contiguous(), HeadTail()
# Degree, ring, layout.
Mode = tuple[int | None, bool, SequenceLayout]
FOUR: list[Mode] = [(None, False, IN_ORDER), (1, False, ZIGZAG), (2, False, ZIGZAG)]
TWO: list[Mode] = [(None, False, ZIGZAG), (1, False, IN_ORDER), (1, True, ZIGZAG)]
DOCUMENTS = Documents((7, 12, 5))
PACKED = torch.cat([torch.arange(n) for n in DOCUMENTS.lengths])[None].expand(BATCH, -1)
Tensors = dict[str, Tensor]


def build(name: str, attention: str, *, dtype: torch.dtype = torch.float64) -> Any:
    """The same model on every rank, with weights large enough to tell masks apart."""
    kind, config = MODELS[name]
    configuration = getattr(transformers, f"{kind}Config")(
        **SIZES | config, attn_implementation=attention
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(configuration)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" not in path:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn / 4)
    return model.to(dtype).train()


def batch(seed: int = 0, *, packed: bool) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 3:9] = -100
    return {"input_ids": ids, "labels": labels} | ({"position_ids": PACKED} if packed else {})


def gradients(model: nn.Module) -> Tensors:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name.removeprefix("module.")] = gradient
    return found


def alone(name: str, *, packed: bool, dtype: torch.dtype = torch.float64) -> Tensors:
    # Only the eager attention of transformers has sinks and soft caps.
    model = build(name, "eager" if name in ("gpt_oss", "gemma2") else "sdpa", dtype=dtype)
    inputs: dict[str, Any] = batch(packed=packed)
    targets = shift_labels(inputs.pop("labels"))
    if packed and name == "gpt_oss":
        # Its own code keeps documents apart in flash attention only.
        inputs["attention_mask"] = {
            "full_attention": added(Causal() & DOCUMENTS, dtype),
            "sliding_attention": added(SlidingWindow(4) & DOCUMENTS, dtype),
        }
    logits = model(**inputs).logits
    loss = token_loss(logits, targets, num_tokens=count_tokens(targets))
    loss.backward()
    return {"logits": logits.detach(), "loss": loss.detach()} | gradients(model)


def added(mask: Mask, dtype: torch.dtype) -> Tensor:
    """What eager attention of transformers adds to scores [1, 1, S, S]."""
    allowed = mask_tensor(mask, SEQ)[None, None]
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


def on_parts(model: Any, mesh: DeviceMesh, layout: SequenceLayout, *, packed: bool) -> Tensors:
    group = mesh.get_group()
    inputs = shard_batch(batch(packed=packed), mesh, layout=layout)
    targets = inputs.pop("shift_labels")
    del inputs["labels"]
    logits = model(**inputs).logits
    loss = token_loss(logits, targets, num_tokens=count_tokens(targets, group))
    loss.backward()
    found = {"loss": loss.detach()} | gradients(model)
    for tensor in found.values():
        dist.all_reduce(tensor, group=group)
    return {"logits": unshard_sequence(logits.detach(), group, layout=layout)} | found


def every_mode(dtype: torch.dtype) -> list[str]:
    """Compare with one process; return what differs."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    found = []
    for name in MODELS if dtype is torch.float64 else ("llama", "gemma2"):
        # Eager attention of Gemma 2, which alone has its soft caps, computes weights in float32.
        bound = 1e-12 if dtype is torch.float64 and name != "gemma2" else 2e-5
        for packed in (False, True):
            wanted = alone(name, packed=packed, dtype=dtype)
            for mesh, modes in ((everyone, FOUR), (pair, TWO)):
                for mode in modes:
                    degree, ring, layout = mode
                    register_attention(mesh, ulysses_degree=degree, ring=ring, layout=layout)
                    model = build(name, "hp_context", dtype=dtype)
                    actual = on_parts(model, mesh, layout, packed=packed)
                    comparison = compare(actual, wanted, bound=bound)
                    if not comparison.ok:
                        what = f"{name}, packed {packed}, {mesh.size()} ranks, {mode}"
                        found.append(f"{what}\n{comparison}")
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_loss_and_gradients_equal_one_process(dtype: torch.dtype) -> None:
    for differences in run_distributed(every_mode, dtype, world_size=4, timeout=300):
        assert not differences, "\n".join(differences)
    # The comparison tells documents and windows apart.
    [whole, packed] = [alone("qwen3_moe", packed=packed)["logits"] for packed in (False, True)]
    assert float((whole - packed).abs().max()) > 0.1
    windowed = alone("qwen3_moe, window", packed=False)["logits"]
    assert float((whole - windowed).abs().max()) > 0.1


def mesh_of_both() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    register_attention(mesh["cp"], load_balance=True)
    return mesh


def wrapped(name: str, wrapper: str, mesh: DeviceMesh) -> Any:
    model = build(name, "sdpa")
    model.set_attn_implementation("hp_context")
    if wrapper == "ddp":
        return sum_gradients(DistributedDataParallel(model))
    axes = mesh if wrapper == "fsdp" else mesh._flatten("all")
    for layer in model.model.layers:
        fully_shard(layer, mesh=axes)
    fully_shard(model, mesh=axes)
    return sum_gradients(model)


def in_parallel(name: str) -> dict[str, Tensors]:
    """Two data-parallel ranks with a batch each, of two context-parallel ranks."""
    mesh = mesh_of_both()
    whole = batch(mesh.get_local_rank("dp"), packed=True)
    found = {}
    for wrapper in ("ddp", "fsdp", "fsdp of all"):
        model = wrapped(name, wrapper, mesh)
        if wrapper == "fsdp":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = shard_batch(whole, mesh["cp"], layout=HeadTail())
        num_tokens = count_tokens(inputs["shift_labels"], mesh)
        # transformers' own loss is in float32; the loss of this package is not.
        theirs = model(**inputs, num_items_in_batch=num_tokens).loss.detach()
        targets = inputs.pop("shift_labels")
        del inputs["labels"]
        loss = token_loss(model(**inputs).logits, targets, num_tokens=num_tokens)
        loss.backward()
        total = loss.detach()
        torch.testing.assert_close(theirs.double(), total, rtol=1e-5, atol=0)
        dist.all_reduce(total)
        found[wrapper] = {"loss": total} | gradients(model)
    return found


def both_batches(name: str) -> Tensors:
    """The step of one process over both batches."""
    model = build(name, "sdpa")
    batches = [batch(seed, packed=True) for seed in range(2)]
    targets = [shift_labels(inputs.pop("labels")) for inputs in batches]
    total = torch.zeros((), dtype=torch.float64)
    for inputs, target in zip(batches, targets, strict=True):
        loss = token_loss(model(**inputs).logits, target, num_tokens=count_tokens(targets))
        loss.backward()
        total += loss.detach()
    return {"loss": total} | gradients(model)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_under_ddp_and_fsdp_gradients_are_those_of_one_process(name: str) -> None:
    wanted = both_batches(name)
    for result in run_distributed(in_parallel, name, world_size=4, timeout=300):
        for wrapper, actual in result.items():
            comparison = compare(actual, wanted, bound=1e-12)
            assert comparison.ok, f"{wrapper}\n{comparison}"


LEARNING_RATE, STEPS = 0.5, 3


def accelerated() -> tuple[list[float], Tensors]:
    """The loop of accelerate, as its quickstart has it."""
    accelerate = import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    mesh = mesh_of_both()
    model: Any = build("llama", "hp_context")
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    sequences = [
        {name: part[row] for name, part in batch(seed, packed=False).items()}
        for seed in range(2 * STEPS)
        for row in range(BATCH)
    ]
    # Ranks that share a sequence get the same batches.
    loader = accelerate.data_loader.prepare_data_loader(
        DataLoader(sequences, batch_size=BATCH),  # type: ignore[arg-type]
        num_processes=mesh["dp"].size(),
        process_index=mesh.get_local_rank("dp"),
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    sum_gradients(model)
    losses = []
    for whole in loader:
        inputs = shard_batch(whole, mesh["cp"], layout=HeadTail())
        targets = inputs.pop("shift_labels")
        del inputs["labels"]
        num_tokens = count_tokens(targets, mesh)
        loss = token_loss(model(**inputs).logits, targets, num_tokens=num_tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="sum")))
    parameters = accelerator.unwrap_model(model).named_parameters()
    return losses, {name: parameter.detach() for name, parameter in parameters}


def test_a_loop_of_accelerate_takes_the_steps_of_one_process() -> None:
    pytest.importorskip("accelerate")
    model = build("llama", "sdpa")
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    wanted = []
    for step in range(STEPS):
        batches = [batch(seed, packed=False) for seed in (2 * step, 2 * step + 1)]
        targets = [shift_labels(inputs.pop("labels")) for inputs in batches]
        total = torch.zeros((), dtype=torch.float64)
        for inputs, target in zip(batches, targets, strict=True):
            total += token_loss(model(**inputs).logits, target, num_tokens=count_tokens(targets))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(total.detach()))
    assert wanted[-1] < wanted[0]
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for losses, found in run_distributed(accelerated, world_size=4, timeout=300):
        assert losses == pytest.approx(wanted, rel=1e-12)
        comparison = compare(found, parameters, bound=1e-12)
        assert comparison.ok, str(comparison)


def refused_and_compiled() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    register_attention(group, name="hp_context_2")
    model = build("llama", "hp_context_2")
    ids = shard_batch(batch(packed=False), group)["input_ids"]
    here = shard_batch(batch(packed=False), group)["position_ids"]
    padded = torch.ones_like(ids)
    padded[:, -1] = 0
    calls: dict[str, Any] = {
        "no positions": lambda: model(input_ids=ids),
        "padding": lambda: model(input_ids=ids, position_ids=here, attention_mask=padded),
        "generate": lambda: model.generate(ids, max_new_tokens=2, do_sample=False),
        "cache": lambda: model(
            input_ids=ids[:, :1],
            position_ids=here[:, :1],
            past_key_values=build("llama", "sdpa")(ids, use_cache=True).past_key_values,
        ),
        "no mask function": lambda: model.model.layers[0](
            torch.zeros(1, 4, 32).double(),
            position_embeddings=(torch.ones(1, 4, 8), torch.zeros(1, 4, 8)),
            position_ids=here[:, :4],
        ),
    }
    messages = []
    for call in calls.values():
        try:
            messages.append(f"nothing: {call()}")
        except ValueError as error:
            messages.append(str(error))
    # The whole mask of a call, instead of what position ids say.
    one = model(input_ids=ids, position_ids=here).logits
    other = model(input_ids=ids, position_ids=here, context_mask=Causal()).logits
    messages.append(f"context_mask {float((one - other).detach().abs().max())}")
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    for name, it in {"compiled": compiled, "again": compiled}.items():
        it.zero_grad()
        model.zero_grad()
        expected, actual = (m(input_ids=ids, position_ids=here).logits for m in (model, it))
        expected.sum().backward()
        actual.sum().backward()
        pairs = zip(it.parameters(), model.parameters(), strict=True)
        worst = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
        messages.append(f"{name} {float((expected - actual).detach().abs().max())} {worst}")
    return messages


def test_a_real_model_is_refused_what_cannot_be_right_and_can_be_compiled() -> None:
    for messages in run_distributed(refused_and_compiled, world_size=2, timeout=300):
        positions, padding, generate, cache, mask, *rest = messages
        assert "all 2 ranks count from 0 to 11" in positions
        assert "attention_mask must not mask padding" in padding
        assert "all 2 ranks count from 0 to 11" in generate
        assert "past_key_values (queries 1, keys 13, offset 12) must be None" in cache
        assert "attention_mask (None) must be left to the model" in mask
        assert rest == ["context_mask 0.0", "compiled 0.0 0.0", "again 0.0 0.0"]
