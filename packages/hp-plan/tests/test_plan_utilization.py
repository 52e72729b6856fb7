from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hp_base.data_sheets import PEAK_TERAFLOPS, REACHED, peak_flops
from hp_plan.costs.machine import MACHINES
from hp_plan.costs.modules import model_flops
from hp_platform import RankInfo, initialize, shutdown
from hp_trainer.config import Config, DataConfig, ModelConfig
from hp_trainer.config.options import with_keys
from hp_trainer.training.metrics import Utilization

VOCAB = 256
DENSE = Config(
    model=ModelConfig(num_experts=0, dim=64, num_layers=2, dense_hidden=128, num_heads=4),
    data=DataConfig(seq_len=32),
)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835),
        ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA H200", "float64", 67),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla T4", "float32", 8.1),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("some device of the future", "bfloat16", None),
    ],
)
def test_peaks_are_those_of_the_device_and_unknown_ones_are_not_guessed(
    name: str, dtype: str, teraflops: float | None
) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(name, dtype) == expected


def test_machines_of_the_plan_reach_the_same_share_of_the_same_peaks() -> None:
    for name in ("a100", "h100", "h200", "b200", "gb200"):
        peak = 1e12 * PEAK_TERAFLOPS[name.upper()]["bfloat16"]
        machine = MACHINES[name]
        assert machine.flops == pytest.approx(REACHED["product"] * peak)
        assert machine.grouped_flops == pytest.approx(REACHED["grouped"] * peak)
        assert machine.attention_flops == pytest.approx(REACHED["attention"] * peak)


def test_operations_are_those_of_the_products_with_half_of_attention() -> None:
    matrices = sum(
        2 * rows * columns
        for rows, columns in [
            *[(64, 64), (32, 64), (32, 64), (64, 64)] * 2,
            *[(128, 64), (128, 64), (64, 128)] * 2,
            (VOCAB, 64),
        ]
    )
    attention = 2 * 4 * 16 * 64  # two layers, two products, half of 32 positions on average
    assert model_flops(DENSE, vocab_size=VOCAB) == 3 * (matrices + attention)


def test_what_is_run_again_is_not_counted() -> None:
    again = with_keys(DENSE, {"train.recompute": "full"})
    assert model_flops(again, vocab_size=VOCAB) == model_flops(DENSE, vocab_size=VOCAB)


def test_a_cpu_has_none_and_ranks_of_one_gpu_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = initialize(RankInfo(0, 1, 0, 1), device_type="cpu")
    try:
        assert Utilization.of(DENSE, runtime, vocab_size=VOCAB) is None
        properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="GPU-1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        on_gpu = replace(runtime, device=torch.device("cuda", 0))
        found = Utilization.of(DENSE, on_gpu, vocab_size=VOCAB)
    finally:
        shutdown()
    flops = model_flops(DENSE, vocab_size=VOCAB)
    assert found == Utilization(flops, 67e12)
    assert found.at(67e12 / flops / 2) == pytest.approx(0.5)
