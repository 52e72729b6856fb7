"""What inductor writes for CUDA, from graphs that a machine without CUDA has traced.

A step of a real model runs on the CPU with the compiled parts that hp-train gives it. Each graph is
copied, its tensors become fake ones that say `cuda:0`, and inductor lowers the copy; the step goes
on with the graph itself. Kernels are compiled to cubins with every configuration that inductor
would choose from. Of a device, inductor asks for properties only, and those are written down here.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from msgspec.structs import replace
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hp_trainer.config.options import resolve
from hp_trainer.model import DropoutKey, Microbatch, TransformerStage
from hp_trainer.model.compiled import compile_blocks
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters
from integration_tests.acceptance.cubins.limits import Resources
from integration_tests.acceptance.cubins.toolchain import compiling_for, resources

TOKENS, VOCABULARY = 512, 64
# Widths are the models' own; layers and experts are as few as have every kind of block, and what is
# between products is as narrow as leaves their kernels what they are.
MODELS: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {"num_layers": 1, "dense_hidden": 2048},
    "qwen3-30b-a3b": {"num_layers": 1, "num_experts": 8},
    "gpt-oss-20b": {"num_layers": 2, "num_experts": 8, "expert_hidden": 256},
    "deepseek-v3": {
        "num_layers": 2,
        "num_dense_layers": 1,
        "dense_hidden": 2048,
        "num_experts": 16,
        "expert_hidden": 256,
        "num_mtp_modules": 0,
    },
}
DEVICES = {
    90: SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132),
    100: SimpleNamespace(name="NVIDIA B200", multi_processor_count=148),
    103: SimpleNamespace(name="NVIDIA B300", multi_processor_count=148),
}
_OF_ALL = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
}


@dataclass
class Written:
    """What inductor wrote.

    Attributes:
        kernels: By name and hash of the source, of the configuration with the least stack.
        failed: What did not compile, by name of the kernel or graph, and why.
    """

    kernels: dict[str, Resources] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def compiled_models(capability: int) -> dict[str, Written]:
    """Compile what inductor writes for forward and backward of blocks, and for attention."""
    found = {}
    for preset, changes in MODELS.items():
        torch.compiler.reset()
        found[preset] = Written()
        _step(preset, changes, partial(_backend, found[preset], capability))
    torch.compiler.reset()
    found["FlexAttention"] = written = Written()
    try:
        _flex(partial(_backend, written, capability))
    except Exception as error:  # noqa: BLE001  # listed, not hidden
        written.failed["forward"] = _first_line(error)
    # Its graph is traced on the CPU, where torch refuses to differentiate it.
    written.failed["backward"] = "FlexAttention does not support backward on CPU"
    return found


def _step(preset: str, changes: dict[str, int], backend: Callable[..., Any]) -> None:
    model = replace(resolve(preset, env={}).config.model, **changes)
    stage = TransformerStage(
        model,
        VOCABULARY,
        layers=range(model.num_layers),
        first=True,
        last=True,
        compute_dtype=torch.bfloat16,
    )
    initialize_parameters(named_parameters(stage), model, seed=0)
    for buffer in stage.buffers():
        buffer.zero_()
    compile_blocks(stage, backend)
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    key = DropoutKey(0, 0, torch.arange(1), torch.arange(TOKENS))
    logits = stage(ids[:, :-1], microbatch=Microbatch(1, key))
    F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()


def _flex(backend: Callable[..., Any]) -> None:
    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    q, k = torch.zeros(2, 1, 8, TOKENS, 128, dtype=torch.bfloat16).unbind()
    tiles = create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu")
    torch.compile(flex_attention, backend=backend)(q, k, k, block_mask=tiles)


def _backend(
    written: Written, capability: int, graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Any:
    """Be a backend of `torch.compile` that runs graphs as they are, and compiles copies."""

    def compiled(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        name = f"graph of {len(gm.graph.nodes)} nodes"
        try:
            with _cuda_described(capability), _kernels_compiled(written, capability):
                _lower(gm, example_inputs)
        except Exception as error:  # noqa: BLE001  # listed, not hidden
            written.failed[name] = _first_line(error)
        return make_boxed_func(gm.forward)

    return aot_module_simplified(
        graph,
        inputs,
        fw_compiler=compiled,
        bw_compiler=compiled,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def _lower(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let inductor write the code of a graph as if its tensors were on `cuda:0`."""
    device, graph = torch.device("cuda", 0), copy.deepcopy(graph)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            if isinstance(t, Tensor)
            else t
            for t in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*fakes)
    with tracing(TracingContext(mode)), config.patch(fx_graph_cache=False, compile_threads=1):
        compile_fx_inner(graph, fakes)


@contextmanager
def _kernels_compiled(written: Written, capability: int) -> Iterator[None]:
    """Compile each kernel for which inductor has written the source, and load none."""

    compile_one = triton.compile

    def compile_all(_self: AsyncCompile, name: str, source: str, **_device: str) -> None:
        kernel = getattr(PyCodeCache.load(source), name)
        binaries: list[Any] = []

        def keeping(*args: Any, **kwargs: Any) -> Any:
            binaries.append(compile_one(*args, **kwargs))
            return binaries[-1]

        with mock.patch.object(triton, "compile", keeping):
            for choice in kernel.configs:
                kernel._precompile_config(choice)
        # Graphs number their kernels each from 0.
        key = f"{name} {hashlib.sha256(source.encode()).hexdigest()[:8]}"
        # Inductor times them, and leaves out those that spill where there is another.
        choices = (resources(binary, capability) for binary in binaries)
        written.kernels[key] = min(choices, key=lambda one: (one.stack, one.registers))

    nothing = mock.patch.object(triton_helpers, "set_driver_to_gpu")
    with nothing, mock.patch.object(AsyncCompile, "triton", compile_all):
        yield


@contextmanager
def _cuda_described(capability: int) -> Iterator[None]:
    """Answer what inductor asks of a device; nothing else of CUDA is there."""
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        **vars(DEVICES[capability]), **_OF_ALL, major=major, minor=minor, gcnArchName=""
    )

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    of_torch = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    of_inductor = ("get_device_properties", properties), ("current_device", 0)
    with ExitStack() as stack:
        stack.enter_context(compiling_for(capability))
        for name, value in of_torch.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer(value)))
        for name, value in of_inductor:
            for interface in (CudaInterface, CudaInterface.Worker):
                patch = mock.patch.object(interface, name, staticmethod(answer(value)))
                stack.enter_context(patch)
        for module in ("torch._inductor.scheduler", "torch.utils._triton"):
            stack.enter_context(mock.patch(f"{module}.has_triton", answer(value=True)))
        stream = "_cuda_getCurrentRawStream"
        stack.enter_context(mock.patch.object(torch._C, stream, answer(0), create=True))
        DeviceProperties.create.cache_clear()
        yield
        DeviceProperties.create.cache_clear()


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def most_of_all(written: Written) -> Resources:
    """Return the most that one kernel takes, each for itself."""
    return reduce(Resources.most, written.kernels.values(), Resources(0, 0, 0, 0))
