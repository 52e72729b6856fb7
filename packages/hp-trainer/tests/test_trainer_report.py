import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hp_base.folder import Folder
from hp_trainer.training.metrics import MetricsWriter, StepMetrics, read_metrics
from hp_trainer.training.report import loss_curve_svg, write_report


def _metrics(step: int, eval_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=5.0 / step,
        balance_loss=0.01,
        grad_norm=1.0,
        lr=1e-3,
        tokens=step * 100,
        tokens_per_second=1e3,
        step_seconds=0.1,
        cpu_seconds=0.2,
        peak_memory_bytes=1 << 20,
        bubble=0.25,
        eval_loss=eval_loss,
    )


def test_metrics_have_the_documented_keys(tmp_path: Path) -> None:
    writer = MetricsWriter(Folder.open(tmp_path), resume_step=0, tensorboard=False)
    writer.write(_metrics(1))
    writer.write(_metrics(2, eval_loss=3.0))
    writer.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    required = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"}
    required |= {"step_seconds", "peak_memory_bytes"}
    assert required <= first.keys()
    assert "eval_loss" not in first
    assert second["eval_loss"] == 3.0


def test_a_run_on_gpus_tells_its_utilization_and_memory(tmp_path: Path) -> None:
    on_cpu = _metrics(1)
    on_gpu = replace(
        on_cpu, mfu=0.4127, allocated_memory_bytes=3 << 20, reserved_memory_bytes=8 << 20
    )
    keys = {"mfu", "allocated_memory_bytes", "reserved_memory_bytes"}
    assert not keys & on_cpu.as_dict().keys()
    assert "MFU" not in str(on_cpu)
    assert str(on_gpu).endswith("reserved 8 MiB  MFU 41.3%")
    writer = MetricsWriter(Folder.open(tmp_path), resume_step=0, tensorboard=False)
    writer.write(on_gpu)
    writer.close()
    write_report(Folder.open(tmp_path), {})
    [(_, row)] = read_metrics(Folder.open(tmp_path))
    assert keys <= row.keys()
    for name, texts in (
        ("mfu", ["% 41.270"]),
        ("memory", ["reserved 0.008", "between steps 0.003"]),
    ):
        drawn = ET.fromstring((tmp_path / f"{name}.svg").read_text())
        shown = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
        assert set(texts) <= set(shown)


def test_a_run_on_cpus_has_no_pictures_of_gpus(tmp_path: Path) -> None:
    writer = MetricsWriter(Folder.open(tmp_path), resume_step=0, tensorboard=False)
    writer.write(_metrics(1))
    writer.close()
    write_report(Folder.open(tmp_path), {})
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["loss.svg"]


def test_resuming_drops_lines_after_the_checkpoint_and_a_torn_last_line(tmp_path: Path) -> None:
    writer = MetricsWriter(Folder.open(tmp_path), resume_step=0, tensorboard=False)
    for step in range(1, 6):
        writer.write(_metrics(step))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    MetricsWriter(Folder.open(tmp_path), resume_step=3, tensorboard=False).close()
    assert [row["step"] for _, row in read_metrics(Folder.open(tmp_path))] == [1, 2, 3]


def test_tensorboard_events_are_written_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = MetricsWriter(Folder.open(tmp_path), resume_step=0, tensorboard=True)
    writer.write(_metrics(1))
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("steps", [0, 1, 2, 300])
def test_the_loss_curve_is_well_formed_at_any_length(steps: int) -> None:
    rows = [_metrics(s, eval_loss=4.0 if s % 2 else None).as_dict() for s in range(1, steps + 1)]
    picture = ET.fromstring(loss_curve_svg(rows))
    assert picture.tag.endswith("svg")
    lines = [p for p in picture.iter() if p.get("class") == "line"]
    assert len(lines) == (2 if steps else 0)
