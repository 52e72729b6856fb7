"""Whole steps of a model that fills a good part of the device, and what was foretold of them.

A step is all of `Trainer.train_step`: reading the batch, every microbatch,
reduction, clipping, optimizer; seconds are the median of the steps after the first few. MFU is
as defined in `hp_trainer.training.metrics`. One step is profiled, and not counted. The text is
that of Python's standard library, its documents joined.
"""

import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hp_base.errors import ConfigError, HpError
from hp_plan import MACHINES, Machine, estimate
from hp_plan.layouts.measure import synchronize, time_link
from hp_trainer.config import Config, rules
from hp_trainer.config.options import resolve, to_toml, with_keys
from hp_trainer.launch.launcher import run_entry
from hp_trainer.launch.task import Worker
from hp_trainer.training.profiler import FOLDER, Profiler
from hp_trainer.training.train import start
from integration_tests.acceptance.cases import Case, Place, slug
from integration_tests.acceptance.layouts import config_of, corpus
from integration_tests.acceptance.outcome import Found

STEPS, WARM = 10, 3
_PROFILED = STEPS
_SHARE = 0.6
"""Share of the device's memory that a model may take by the plan; it leaves some things out."""
_BYTE_VOCABULARY = 256
_STEP_FILE = "steps.json"
_MOST_KERNELS = 12

_LARGE: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "moe": (
        ("qwen3-30b-a3b", {}),
        (
            "qwen3-30b-a3b",
            {"model.num_experts": 16, "model.vocab_size": 32768, "data.seq_len": 1024},
        ),
    ),
    "dense": (("llama-3.1-8b", {}), ("qwen3-0.6b", {"data.seq_len": 1024})),
}
_SMALL = {"moe": "debug-qwen3-moe", "dense": "debug-llama3"}


def train(case: Case, place: Place, work: Path) -> Found:
    """Train some steps and say how fast."""
    config = _config(case, place, work)
    folder = _folder(work, case.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    status = run_entry(config, folder, entry=f"{__name__}:time_steps", data=work / "tokens")
    if status:
        raise HpError(f"a rank ended with status {status}")
    rows = json.loads((folder / _STEP_FILE).read_text())
    (folder / "figures.json").write_text(json.dumps(figures := _figures(config, rows)))
    figures["longest operations"] = _operations(folder)
    mfu = "MFU unknown" if figures["MFU"] is None else f"MFU {figures['MFU']:.1%}"
    return Found(
        status="passed",
        summary=f"{figures['tokens/s']:,.0f} tokens/s, {mfu}, {_described(config)}",
        figures=figures,
    )


def time_steps(config: Config, *, worker: Worker) -> int:
    """Be a rank that trains some steps and saves nothing."""
    trainer = start(config, worker)
    profiler = Profiler(config.train, worker, trainer.device, tell=trainer.warn)
    rows = []
    for step in range(1, STEPS + 1):
        with profiler.watching(step):
            metrics, _ = trainer.train_step()
        rows.append(metrics.as_dict())
    if worker.info.rank == 0:
        (worker.run_dir / _STEP_FILE).write_text(json.dumps(rows))
        for problem in trainer.problems:
            sys.stderr.write(f"{problem}\n")
    trainer.close()
    return 0


def _figures(config: Config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    counted = rows[WARM : _PROFILED - 1]
    seconds = statistics.median(row["step_seconds"] for row in counted)
    tokens = config.train.global_batch_size * config.data.seq_len
    shares = [row["mfu"] for row in counted if "mfu" in row]
    return {
        "model": _described(config),
        "processes": config.world_size,
        "dtype": config.train.dtype,
        "step seconds": seconds,
        "step seconds, range": [f(row["step_seconds"] for row in counted) for f in (min, max)],
        "tokens/s": tokens / seconds,
        "MFU": statistics.median(shares) if shares else None,
        "bubble": statistics.median(row["bubble"] for row in counted),
        "peak bytes": rows[-1]["peak_memory_bytes"],
        "allocated bytes": rows[-1].get("allocated_memory_bytes"),
        "reserved bytes": rows[-1].get("reserved_memory_bytes"),
        "losses": [round(row["loss"], 4) for row in (rows[0], rows[-1])],
    }


def _operations(folder: Path) -> dict[str, float]:
    """Milliseconds of the operations of a trace that took longest, by name."""
    times: Counter[str] = Counter()
    for path in (folder / FOLDER).glob("*.json.gz"):
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        kinds = {event.get("cat") for event in events}
        wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if "kernel" in kinds else {"cpu_op"}
        for event in events:
            if event.get("cat") in wanted and "dur" in event:
                times[event["name"][:120]] += event["dur"] / 1e3
    return {name: round(spent, 3) for name, spent in times.most_common(_MOST_KERNELS)}


def rates(case: Case, place: Place, work: Path) -> Found:
    """What a product and a copy of one device reach, and a message between two."""
    device, dtype = torch.device(place.device), getattr(torch, case.dtype)
    size, length = (8192, 1 << 28) if device.type == "cuda" else (1024, 1 << 24)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.empty(length, device=device)
    target = torch.empty_like(source)
    product = _seconds(lambda: torch.mm(left, right), device)
    copy = _seconds(lambda: target.copy_(source), device)
    figures: dict[str, Any] = {
        "flops": 2 * size**3 / product,
        "memory bandwidth": 2 * 4 * length / copy,
    }
    if place.num_gpus >= 2 or device.type == "cpu":
        figures |= _link(place, work)
    summary = f"{figures['flops'] / 1e12:.3g} TFLOPS, {figures['memory bandwidth'] / 1e9:.3g} GB/s"
    _folder(work, case.name).mkdir(parents=True, exist_ok=True)
    (_folder(work, case.name) / "figures.json").write_text(json.dumps(figures))
    return Found(status="passed", summary=f"{summary} in {case.dtype}", figures=figures)


def _seconds(action: Any, device: torch.device, *, rounds: int = 10) -> float:
    spent = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        action()
        synchronize(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[rounds // 3 :])


def _link(place: Place, work: Path) -> dict[str, float]:
    case = Case(name="link", what="", work="", ranks=2, keys={"mesh.dp_replicate": "2"})
    folder = work / "link"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entry = f"{time_link.__module__}:{time_link.__name__}"
    if run_entry(config_of(case, place, work), folder, entry=entry):
        return {}
    found = json.loads((folder / "measured.json").read_text())
    return {
        "latency": found["small"],
        "bandwidth": ((1 << 22) - (1 << 10)) / (found["large"] - found["small"]),
    }


def plan(case: Case, place: Place, work: Path) -> Found:
    """`hp plan` of a model that was trained, at the rates that were measured."""
    folder = _folder(work, case.keys["of"])
    measured = json.loads((folder / "figures.json").read_text())
    known = json.loads((_folder(work, "rates") / "figures.json").read_text())
    flags = {
        "machine": _machine_name(place),
        "memory": place.memory_bytes,
        **{name.replace(" ", "-"): value for name, value in known.items()},
    }
    if place.device == "cpu":
        flags["cores"] = len(os.sched_getaffinity(0))
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    text = _hp("plan", str(folder / "config.toml"), "--json", "--top", "1", *given)
    configured = json.loads(text)["configured"]
    planned = sum(configured["memory"].values())
    figures = {
        "planned step seconds": configured["seconds"],
        "measured step seconds": measured["step seconds"],
        "planned / measured seconds": configured["seconds"] / measured["step seconds"],
        "planned bytes": planned,
        "planned by kind": configured["memory"],
        "measured peak bytes": measured["peak bytes"],
        "measured reserved bytes": measured["reserved bytes"],
    }
    summary = f"a step at {figures['planned / measured seconds']:.2f} of its time"
    reserved = measured["reserved bytes"]
    if reserved is None:  # the resident set of a process is something else
        return Found(status="passed", summary=summary, figures=figures)
    figures["planned / reserved"] = planned / reserved
    summary += f", memory at {planned / reserved:.2f} of what was reserved"
    return Found(
        status="passed" if planned >= reserved else "failed", summary=summary, figures=figures
    )


def dry_run(case: Case, place: Place, work: Path) -> Found:
    """`hp dry-run` of a model that was trained."""
    folder = _folder(work, case.keys["of"])
    measured = json.loads((folder / "figures.json").read_text())
    on_gpus = ("launch.device=auto", "launch.backend=auto")
    foretold = json.loads(_hp("dry-run", str(folder / "config.toml"), "--json", *on_gpus))
    memories = [rank["memory"] for rank in foretold["ranks"]]
    figures: dict[str, Any] = {"problems": foretold.get("problems", [])}
    for name, key in (("peak", "peak_live"), ("reserved", "peak_reserved")):
        told = max((memory[key] or 0 for memory in memories), default=0)
        real = measured[f"{name} bytes"]
        figures |= {f"foretold {name} bytes": told, f"measured {name} bytes": real}
        if real and place.device == "cuda":  # the resident set of a process is something else
            figures[f"foretold / measured {name}"] = told / real
    figures["beside tensors"] = foretold.get("beside", {})
    if figures["problems"]:
        summary = f"it ran, but the dry run says: {figures['problems'][0]}"
        return Found(status="failed", summary=summary, figures=figures)
    told = figures["foretold peak bytes"] / 2**20
    return Found(status="passed", summary=f"a peak of {told:,.0f} MiB foretold", figures=figures)


def _hp(*arguments: str) -> str:
    command = [sys.executable, "-m", "hp_train", *arguments]
    end = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if end.returncode and not end.stdout:
        raise HpError(f"hp {arguments[0]} ended with status {end.returncode}: see the log")
    return end.stdout


def _folder(work: Path, name: str) -> Path:
    return work / "speed" / slug(name)


def _machine_name(place: Place) -> str:
    """Whose links the plan assumes where they are not measured."""
    if place.device == "cpu":
        return "cpu"
    return next((name for name in MACHINES if name.upper() in place.name), "a100")


def _described(config: Config) -> str:
    model, data = config.model, config.data
    layers = f"{model.num_layers} layers of {model.dim}"
    experts = f", {model.num_experts} experts" if model.has_experts else ""
    return f"{layers}{experts}, {data.seq_len} tokens"


def _config(case: Case, place: Place, work: Path) -> Config:
    """The largest model of a kind that fits."""
    kind, ranks = case.keys["model"], case.ranks
    common: dict[str, Any] = {
        # As others attend: over whole sequences.
        "data.documents": "joined",
        "launch.device": place.device,
        "launch.init_timeout_seconds": 180.0,
        "launch.backend": place.backend(ranks),
        "mesh.dp_shard": ranks,
        "mesh.ep": ranks if kind == "moe" else 1,
        "train.dtype": case.dtype,
        "train.steps": STEPS,
        "train.profile": [_PROFILED],
        "train.microbatch_size": 1,
        "train.global_batch_size": 2 * ranks,
        "train.warmup_steps": 2,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
    }
    if place.device == "cpu":
        small = {"data.paths": [str(corpus(work))], "data.eval_fraction": 0.2}
        return _resolved(_SMALL[kind], common | small)
    for preset, keys in _LARGE[kind]:
        config = _resolved(preset, common | keys)
        if (fitting := _fitting(config, place)) is not None:
            return fitting
    raise ConfigError(f"no model of the kit fits into {place.memory_bytes / 2**30:.0f} GiB")


def _resolved(preset: str, keys: Mapping[str, Any]) -> Config:
    return resolve(preset, keys.items(), env={}).config


def _fitting(config: Config, place: Place) -> Config | None:
    """With as many layers as fit; None where not even two do."""
    machine: Machine = MACHINES[_machine_name(place)]
    for layers in range(config.model.num_layers, 1, -1):
        found = with_keys(config, {"model.num_layers": layers})
        vocabulary = config.model.vocab_size or _BYTE_VOCABULARY
        memory = estimate(found, machine, vocab_size=vocabulary).memory.total
        if memory <= _SHARE * place.memory_bytes:
            rules.check(found)
            return found
    return None
