"""`pipeline.retention`: the same bits, with fewer microbatches kept."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from hp_base.errors import ConfigError
from hp_data import Tokenizer
from hp_platform import Runtime
from hp_platform.testing import LiveBytes
from hp_schedule import validate
from hp_trainer.config import Config, PipelineConfig, rules
from hp_trainer.config.options import one_process, resolve
from hp_trainer.launch.task import Worker
from hp_trainer.layout.schedules import KINDS, compute_schedule, training_schedule
from hp_trainer.model import Microbatch, stage
from hp_trainer.model.block import Block
from hp_trainer.model.recompute import recomputed_but_products
from hp_trainer.model.rotary import rotation
from hp_trainer.training.trainer import Trainer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "text.txt"
    path.write_text("some words in a row\n" * 40)
    overrides = [
        ("launch.device", "cpu"),
        ("data.seq_len", 12),
        ("data.paths", [str(path)]),
        ("train.global_batch_size", 4),
        ("train.microbatch_size", 1),
        ("model.dim", 16),
        ("pipeline.stages_per_rank", 1),
        ("model.num_layers", 2),
        ("model.num_mtp_modules", 1),
        ("model.balance_coefficient", 0.01),
        ("model.dropout", 0.1),
    ]
    return one_process(resolve("quickstart", overrides, env={}).config)


def test_a_step_has_the_same_bits_whatever_stages_do_with_microbatches(
    config: Config,
    worker: Worker,
    started: tuple[Runtime, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "_SMALL", 0)
    found: dict[tuple[str, str, str], tuple[object, list[torch.Tensor]]] = {}
    for dtype in ("float32", "bfloat16"):
        for retention in ("keep", "recompute", "offload"):
            for recompute in ("none", "selective", "full"):
                chosen = replace(
                    config,
                    pipeline=PipelineConfig(schedule="gpipe", retention=retention),
                    train=replace(config.train, recompute=recompute, dtype=dtype),
                )
                rules.check(chosen)
                trainer = Trainer(chosen, worker, *started)
                losses, _ = trainer.compute_gradients()
                steps = [str(span.step) for span in trainer.timeline]
                assert any("RECOMPUTE" in step for step in steps) is (retention == "recompute")
                grads = [p.local.grad for p in trainer.parameters]
                found[dtype, retention, recompute] = losses, [g for g in grads if g is not None]
                trainer.pipeline.close()
        expected, wanted = found[dtype, "keep", "none"]
        assert len(wanted) > 10
        for (other, *_), (again, values) in found.items():
            if other == dtype:
                assert again == expected
                for grad, value in zip(wanted, values, strict=True):
                    assert torch.equal(grad, value)


class _Ops(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_attention_does_not_run_again_where_recomputation_is_selective(config: Config) -> None:
    counts, kept = {}, {}
    x = torch.randn(2, 64, 16)
    turned = rotation(config.model, torch.arange(64))
    for recompute in ("none", "selective", "full"):
        torch.manual_seed(0)
        block = Block(config.model, 0, "layers.0")
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        block.recompute = recompute
        with _Ops() as ops, LiveBytes() as live:
            y = block(x.requires_grad_(), rotation=turned, microbatch=Microbatch(2))
            kept[recompute] = live.now
            y.sum().backward()
        counts[recompute] = ops.counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [counts[way][attention] for way in counts] == [1, 1, 2]
    assert counts["selective"]["mm"] == counts["full"]["mm"] > counts["none"]["mm"]
    assert kept["full"] < kept["selective"] < 0.7 * kept["none"]


def test_what_only_the_second_run_does_is_done_and_what_is_kept_is_not() -> None:
    """FSDP gathers parameters inside of a block, in the second run or in the first one alone."""
    gathers = {"first": 0, "again": 2}
    times = iter(gathers)
    seen: list[torch.Tensor] = []

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.extend(torch.empty(3).fill_(1.0) for _ in range(gathers[next(times)]))
        heads = x.view(1, 1, 4, 8)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).exp()

    x = torch.randn(4, 8, requires_grad=True)
    expected = x.detach().clone().requires_grad_()
    with _Ops() as ops:
        recomputed_but_products(part, x).sum().backward()
    assert sum(count for name, count in ops.counts.items() if name.endswith("_for_cpu")) == 1
    assert len(seen) == 2
    assert all(torch.equal(each, torch.ones(3)) for each in seen)
    heads = expected.view(1, 1, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).exp().sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_what_is_overwritten_in_the_first_run_is_kept_as_it_was(config: Config) -> None:
    """Sinks weigh attention in its own memory."""
    model = replace(config.model, attention_sinks=True)
    found, counts = {}, {}
    x = torch.randn(2, 64, 16)
    for recompute in ("none", "selective"):
        torch.manual_seed(0)
        block = Block(model, 0, "layers.0")
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        block.recompute = recompute
        inputs = x.clone().requires_grad_()
        with _Ops() as ops:
            y = block(inputs, rotation=rotation(model, torch.arange(64)), microbatch=Microbatch(2))
            y.square().sum().backward()
        found[recompute] = [inputs.grad, *(p.grad for p in block.parameters())]
        counts[recompute] = sum(n for name, n in ops.counts.items() if name.endswith("_for_cpu"))
    assert counts["none"] == counts["selective"] > 0
    for grad, value in zip(*found.values(), strict=True):
        assert grad is not None
        assert value is not None
        assert torch.equal(grad, value)


def test_selective_recomputation_and_compiled_graphs_are_refused_by_name(config: Config) -> None:
    train = replace(config.train, recompute="selective", compile="aot_eager")
    with pytest.raises(ConfigError, match=r'train.compile \("aot_eager"\) must be "none" with'):
        rules.check(replace(config, train=train))


@pytest.mark.parametrize("schedule", KINDS)
def test_schedules_keep_as_few_as_is_said_or_are_refused(schedule: str) -> None:
    kind = KINDS[schedule]
    refused = 0
    for retention in ("recompute", "offload"):
        for keep in (1, 2, 3):
            pipeline = PipelineConfig(
                schedule=schedule,
                stages_per_rank=kind.stages_per_rank or 2,
                retention=retention,
                keep_microbatches=keep,
            )
            found = compute_schedule(pipeline, num_ranks=3, num_microbatches=6)
            if found is None:
                refused += 1
                continue
            chosen = found.recomputed if retention == "recompute" else found.offloaded
            plain = replace(pipeline, retention="keep")
            whole = compute_schedule(plain, num_ranks=3, num_microbatches=6)
            assert whole is not None
            assert chosen or validate(whole, memory_limit=keep)
            sent = training_schedule(pipeline, num_ranks=3, num_microbatches=6)
            assert validate(sent, memory_limit=keep)
    # Weight gradients that are put off hold on to what they need.
    assert refused == 0 or kind.splits_backward or kind.returns


def test_blocks_that_are_gathered_one_by_one_are_refused_by_name(config: Config) -> None:
    mesh = replace(config.mesh, dp_shard=2, gather="block")
    pipeline = PipelineConfig(schedule="gpipe", retention="offload")
    with pytest.raises(ConfigError, match=r'pipeline.retention \("offload"\) must be "keep" with'):
        rules.check(replace(config, mesh=mesh, pipeline=pipeline))


def test_too_few_are_refused_by_name(config: Config) -> None:
    pipeline = PipelineConfig(schedule="zero_bubble", retention="recompute")
    with pytest.raises(ConfigError, match=r"pipeline.keep_microbatches \(1\) must be larger with"):
        rules.check(
            replace(
                config,
                model=replace(config.model, num_layers=4),
                mesh=replace(config.mesh, pp=4),
                pipeline=pipeline,
                train=replace(config.train, global_batch_size=8),
            )
        )
