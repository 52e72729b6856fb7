"""Planned steps of documents of all kinds of lengths in generated layouts, beside one process."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random

from hp_plan.layouts.space import AXES, Axis, sample_layouts
from hp_train.verify.pairs import described
from hp_train.verify.program import Program
from hp_train.verify.runs import Runs, judge_all
from hp_trainer.config import Config, rules
from hp_trainer.config.options import checked_config, one_process, resolve, with_keys

SEQ_LEN = 48
_DOCUMENTS = 160
_MODEL: Mapping[str, object] = {
    "model.dim": 32,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.expert_hidden": 8,
    "model.num_experts": 12,
    "model.top_k": 2,
    "model.dense_hidden": 24,
    "model.num_dense_layers": 1,
    "model.init_std": 0.1,
    "data.seq_len": SEQ_LEN,
    "data.packing": "planned",
    "data.eval_fraction": 0.2,
    "train.steps": 4,
    "train.microbatch_size": 1,
    "train.warmup_steps": 2,
}
_MLA = {
    "model.attention": "mla",
    "model.kv_lora_rank": 16,
    "model.nope_head_dim": 8,
    "model.rope_head_dim": 4,
    "model.v_head_dim": 8,
}
_WINDOW = {
    "model.sliding_window": 7,
    "model.full_attention_every": 2,
    "model.attention_sinks": True,
}
_CORRECTED = {
    "model.correction_bias": True,
    "model.router_score": "sigmoid",
    "model.num_expert_groups": 4,
    "model.num_limited_groups": 2,
}
# Steps are planned for machines that take something for tokens, pairs and keys alone, for each
# microbatch alone, and for messages: so plans have many microbatches, few, and other orders.
_MANY = "token = 1e-5\npair = 1e-6\nkey = 1e-6\nmicrobatch = 0.0\nmessage = 0.0\n"
_FEW = "token = 1e-6\npair = 1e-7\nkey = 0.0\nmicrobatch = 1e-2\n"
_LATE = "token = 1e-5\npair = 1e-5\nkey = 1e-5\nmicrobatch = 1e-5\nmessage = 1e-4\n"


@dataclass(frozen=True)
class Case:
    """Documents, a model that trains on them, and what a machine takes.

    Attributes:
        draw: Draws the letters of a document.
        costs: A file of `data.plan_costs`.
        model: Keys of the config.
        layouts: Layouts besides those that are drawn.
    """

    draw: Callable[[Random], float]
    costs: str
    model: Mapping[str, object] = field(default_factory=dict)
    layouts: tuple[Mapping[str, object], ...] = ()


_PP_CP: Mapping[str, object] = {"mesh.pp": 2, "mesh.cp": 2, "mesh.cp_heads": 1}
CASES: Mapping[str, Case] = {
    "lognormal": Case(
        lambda r: r.lognormvariate(2.5, 1.1),
        _MANY,
        {"model.dropout": 0.1, "model.num_mtp_modules": 1, "model.tie_embeddings": True},
        ({**_PP_CP, "mesh.ep": 2, "train.recompute": "full"}, {"mesh.cp": 4, "mesh.cp_ring": True}),
    ),
    "few long": Case(
        lambda r: 200 if r.random() < 0.1 else 5,
        _LATE,
        _MLA,
        ({"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.ep": 4}, {**_PP_CP, "mesh.ep": 2}),
    ),
    "log-uniform": Case(lambda r: 1.1 ** r.uniform(0, 50), _MANY, _WINDOW, (_PP_CP,)),
    "one or two letters": Case(lambda r: r.randint(1, 2), _FEW, _CORRECTED, (_PP_CP,)),
    "a sequence each": Case(lambda _: SEQ_LEN - 1, _MANY, {}, ({"mesh.pp": 4},)),
    "one more than a sequence": Case(
        lambda _: SEQ_LEN,
        _LATE,
        {"model.num_mtp_modules": 2},
        ({**_PP_CP, "mesh.dp_shard": 2}, {**_PP_CP, "mesh.ep": 2, "mesh.ep_buffer": 1.2}),
    ),
    "much longer than sequences": Case(
        lambda r: r.uniform(90, 1000),
        _LATE,
        {"model.num_experts": 0},
        ({"mesh.cp": 3, "mesh.cp_heads": 1},),
    ),
    "more than half a sequence": Case(
        lambda r: r.uniform(25, 40),
        _MANY,
        {**_MLA, "model.dropout": 0.2},
        ({**_PP_CP, "pipeline.stage_layers": (3, 1)},),
    ),
}
_OF_A_PLAN = (
    "data.packing",
    "pipeline.schedule",
    "pipeline.overlap",
    "pipeline.retention",
    "mesh.cp_deal",
)


def write_documents(case: Case, path: Path) -> Path:
    """Write documents whose lengths are drawn, the same on every machine."""
    rng = Random(7)
    with path.open("w") as file:
        for _ in range(_DOCUMENTS):
            letters = rng.choices("abcdefgh ", k=max(1, int(case.draw(rng))))
            file.write(json.dumps({"text": "".join(letters)}) + "\n")
    return path


def config_of(case: Case, folder: Path, *, sequences: int) -> Config:
    """The config of one process, with files in a folder."""
    documents = write_documents(case, folder / "documents.jsonl")
    (folder / "costs.toml").write_text(case.costs)
    (folder / "plain.toml").write_text("")
    given = {**_MODEL, **case.model, "data.paths": (str(documents),)}
    given["train.global_batch_size"] = sequences
    resolved = resolve(str(folder / "plain.toml"), [*given.items()])
    return checked_config(resolved.config, dtype="float64")


def layouts_of(case: Case, config: Config, count: int, *, seed: int, costs: Path) -> list[Config]:
    """Some layouts, those that a case names first, with plans of little and of usual memory."""
    axes = [axis for axis in AXES if axis.key not in _OF_A_PLAN]
    axes.append(Axis("data.plan_tokens", (0, SEQ_LEN // 2, 2 * SEQ_LEN)))
    planned = with_keys(config, {"data.plan_costs": str(costs)})
    named = [with_keys(planned, layout) for layout in case.layouts]
    for each in named:
        rules.check(each)
    named.append(with_keys(planned, {"data.plan_tokens": SEQ_LEN}))  # of one process
    if count <= len(named):
        return named[:count]
    drawn = sample_layouts(planned, count, seed=seed, num_processes=range(2, 7), axes=axes)
    return [*named, *drawn.layouts][:count]


def verify(
    name: str, count: int, *, steps: int, sequences: int, seed: int, having: str = ""
) -> Iterator[tuple[bool, str]]:
    """Train a case in some layouts and compare each with one process; yield what came out.

    Args:
        name: Name of the case.
        count: Number of layouts.
        steps: Number of steps.
        sequences: Global batch size.
        seed: Seed by which they are drawn.
        having: Only those of them are looked at whose overrides have this text.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="hp-planned-") as scratch:
        folder = Path(scratch)
        program = Program(steps=steps)
        config = program.applied_to(config_of(case, folder, sequences=sequences))
        layouts = layouts_of(case, config, count, seed=seed, costs=folder / "costs.toml")
        (folder / "runs").mkdir()
        base = one_process(config)
        layouts = [layout for layout in layouts if having in described(layout, base)]
        runs = Runs(folder / "runs", base=base, program=program, every_tensor=False)
        for verdict in judge_all(runs, layouts, has_oracle=False):
            why = [] if verdict.comparison else sorted((folder / "runs").glob("*/errors/*"))[-1:]
            told = "".join(f"\n{path.read_text()}" for path in why)
            yield verdict.ok, f"{name}: {verdict}{told}"


def main() -> int:
    """Verify cases; 1: some differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--count", type=int, default=11, help="layouts of each")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=12, help="of a global batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--having", default="", help="only layouts with this in their overrides")
    options = parser.parse_args()
    found = []
    chosen = options.cases or [*CASES]
    for ok, told in chain.from_iterable(
        verify(
            name,
            options.count,
            steps=options.steps,
            sequences=options.sequences,
            seed=options.seed,
            having=options.having,
        )
        for name in chosen
    ):
        found.append(ok)
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{sum(found)} of {len(found)} equal\n")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
