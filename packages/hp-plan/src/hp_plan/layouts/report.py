"""Plans as text: a table, the parts of the best one, and reasons why it is the best. No torch."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from hp_base.messages import size
from hp_plan.costs.machine import Machine
from hp_plan.layouts.choose import Choice
from hp_plan.price.estimate import Estimate, room
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import count_microbatches

_NEGLIGIBLE = 0.005
"""Share of a step below which a difference is not worth a word."""


def table(estimates: Sequence[Estimate]) -> list[str]:
    """Return one line per layout; on a GPU with the host's launches as a share of compute."""
    is_launched = any(e.host for e in estimates)
    column = f"  {'host':>5}" * is_launched
    heads = f"{'step':>9}  {'tokens/s':>9}  {'idle':>5}  {'exposed':>9}{column}"
    lines = [
        f"{heads}  {'memory':>11}  layout",
        *(
            f"{in_seconds(e.seconds):>9}  {e.tokens_per_second:>9,.0f}  {e.bubble:>5.0%}  "
            f"{in_seconds(e.exposed):>9}{f'  {_host(e):>5}' * is_launched}"
            f"  {size(e.memory.total):>11}  {name(e)}"
            for e in estimates
        ),
    ]
    if bound := sum(map(_host_binds, estimates)):
        lines.append(
            f"host    binds {bound} of these: it launches for longer than a device computes"
        )
    return lines


def details(estimate: Estimate) -> list[str]:
    """Return lines about the time, the memory and the transfers of a layout."""
    memory = estimate.memory
    parts = ", ".join(
        f"{part} {in_seconds(seconds)}" for part, seconds in estimate.parts.items() if seconds
    )
    lines = [
        f"time    {parts}",
        "memory  "
        + ", ".join(f"{kind} {size(number)}" for kind, number in memory.kinds.items() if number),
    ]
    if estimate.host:
        binds = ": the device waits for it" if _host_binds(estimate) else ""
        lines.append(f"host    launches kernels for {in_seconds(estimate.host)}{binds}")
    for transfer in estimate.transfers:
        link = "between nodes" if transfer.between_nodes else "within a node"
        lines.append(
            f"sends   {size(transfer.bytes)} per rank and step for {transfer.purpose}, {link}, "
            f"link busy {in_seconds(transfer.seconds)}"
        )
    return lines


def batch(estimate: Estimate, *, reached: float | None) -> str:
    """Return the line about the sequences of a step.

    Args:
        estimate: Estimate of the layout.
        reached: Share of the peak in a data sheet that the model's operations take (MFU); None: it
            is not known.
    """
    config, train = estimate.config, estimate.config.train
    number = count_microbatches(config)
    shares = train.global_batch_size // (number * train.microbatch_size)
    rows = f"{number:,} x {train.microbatch_size} on each of {shares:,} shares of the ranks"
    mfu = f", MFU {reached:.0%}" if reached is not None else ""
    return (
        f"batch   {train.global_batch_size:,} sequences of {config.data.seq_len:,} tokens, {rows}, "
        f"recompute {train.recompute}{mfu}"
    )


def _host_binds(estimate: Estimate) -> bool:
    """Tell whether the busiest host launches kernels for longer than the mean device computes."""
    return estimate.host >= estimate.parts["compute"] > 0


def _host(estimate: Estimate) -> str:
    """Return the launches of the busiest host as a share of compute; empty if not priced."""
    compute = estimate.parts["compute"]
    return f"{estimate.host / compute:.0%}" if estimate.host and compute else ""


def reasons(choice: Choice, machine: Machine) -> list[str]:
    """Return lines about why the first layout is the best of a choice."""
    best = choice.best[0]
    of = f"all layouts of {choice.num_meshes} meshes"
    if not choice.is_complete:
        of = f"the {choice.num_simulated} most promising layouts of {choice.num_meshes} meshes"
    lines = [f"best of {of}, {choice.num_priced:,} priced, {choice.num_simulated} simulated:"]
    share = best.memory.total / machine.memory
    lines.append(f"  it fits: {size(best.memory.total)} are {share:.0%} of a device")
    for title, other in _rivals(choice):
        slower = other.seconds / best.seconds - 1
        lines.append(f"  {title}, {name(other)}: {slower:.1%} slower{_difference(best, other)}")
    if choice.too_large is not None:
        large = choice.too_large
        kinds = large.memory.kinds
        most = max(kinds, key=lambda kind: kinds[kind])
        excess = size(large.memory.total - room(large.config, machine))
        held = size(kinds[most])
        lines.append(f"  does not fit, by {excess}: {name(large)}, most of it {most} ({held})")
    return lines


def _rivals(choice: Choice) -> list[tuple[str, Estimate]]:
    """Return the best layout with another mesh, and the best with another schedule alone."""
    best, *others = choice.best
    found: dict[str, Estimate] = {}
    for other in others:
        same_mesh = other.config.mesh == best.config.mesh
        found.setdefault("next schedule" if same_mesh else "next mesh", other)
    return list(found.items())


def _difference(best: Estimate, other: Estimate) -> str:
    """Return the parts on which the other layout spends more, and less."""
    more: list[str] = []
    less: list[str] = []
    for part, seconds in other.parts.items():
        extra = seconds - best.parts[part]
        if abs(extra) > _NEGLIGIBLE * best.seconds:
            (more if extra > 0 else less).append(f"{in_seconds(abs(extra))} {part}")
    text = f"; {' and '.join(more)} more" if more else ""
    return text + (f", {' and '.join(less)} less" if less else "")


def name(estimate: Estimate) -> str:
    """Return a layout in words."""
    config = estimate.config
    pipeline = config.pipeline
    stages = f" x {pipeline.stages_per_rank}" if pipeline.stages_per_rank > 1 else ""
    schedule = f", {pipeline.schedule}{stages}" if config.mesh.pp > 1 else ""
    if pipeline.stage_layers:
        runs = [(layers, len([*run])) for layers, run in groupby(pipeline.stage_layers)]
        sizes = ", ".join(f"{times} x {n}" if times > 1 else f"{n}" for n, times in runs)
        schedule += f" of {sizes} layers"
    several, recompute = config.train.microbatch_size, config.train.recompute
    gathered = ", gathered by block" if config.mesh.gather == "block" else ""
    again = f", recompute {recompute}" if recompute != "none" else ""
    kept = f"{pipeline.keep_microbatches} kept, others {_GIVEN_UP[pipeline.retention]}"
    gives_up = f", {kept}" if config.mesh.pp > 1 and pipeline.retention != "keep" else ""
    cut = f"{Layout.of(config.mesh)}{schedule}{gathered}"
    return f"{cut}, microbatches of {several}{gives_up}{again}"


_GIVEN_UP = {"keep": "", "recompute": "run again", "offload": "copied to the host"}


def as_dict(estimate: Estimate) -> Mapping[str, object]:
    """Return a layout for programs: keys of the config, seconds and bytes."""
    config, memory = estimate.config, estimate.memory
    mesh = {f"mesh.{key}": getattr(config.mesh, key) for key in config.mesh.__struct_fields__}
    return {
        "config": {
            **mesh,
            "pipeline.schedule": config.pipeline.schedule,
            "pipeline.stages_per_rank": config.pipeline.stages_per_rank,
            "pipeline.stage_layers": config.pipeline.stage_layers,
            "pipeline.retention": config.pipeline.retention,
            "pipeline.keep_microbatches": config.pipeline.keep_microbatches,
            "train.microbatch_size": config.train.microbatch_size,
            "train.recompute": config.train.recompute,
        },
        "seconds": estimate.seconds,
        "parts": dict(estimate.parts),
        "exposed_seconds": estimate.exposed,
        "host_seconds": estimate.host,
        "bubble": estimate.bubble,
        "tokens_per_second": estimate.tokens_per_second,
        "memory": memory.kinds | {"total": memory.total},
        "sent": {transfer.purpose: transfer.bytes for transfer in estimate.transfers},
    }


def in_seconds(value: float) -> str:
    """Return seconds in the unit that fits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
