"""Steps of documents of real lengths: the planner beside static packs, Megatron's rule and greedy.

    python benchmarks/bench_step_plan.py --batches 10            # of each of six distributions
    python benchmarks/bench_step_plan.py --planner 16 64 256     # ranks of a stage: CPU and memory

By the cost model of `hp step-plan`: Llama 3.1 8B on H100s, 4 stages of 32 ranks, packs of 128k
shared by 8 ranks, memory of 4 such packs, exchanges priced. Every plan is proven before it counts.
"""

import argparse
import resource
import time
from statistics import mean

from hp_packing import Pipeline, Planner, StepCosts, learned_costs, price, step_layout
from hp_packing.comparison import Comparison, compare
from hp_packing.generators import GENERATORS, draw, stream
from hp_plan.costs.machine import MACHINES
from hp_trainer.config.options import resolve, with_keys

K = 1024
STAGES, RANKS, PACK, DEGREE = 4, 32, 128 * K, 8
MEMORY = 4 * PACK // DEGREE
STATIC = "static packs, 1F1B"


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--packs", type=int, default=32)
    parser.add_argument("--only", choices=GENERATORS)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, nargs="*", default=(), help="of each stage")
    parser.add_argument("--planner", type=int, nargs="*")
    options = parser.parse_args()
    layout = step_layout(resolve(options.model, [], env={}).config, stages=STAGES, ranks=RANKS)
    layout = with_keys(layout, {"pipeline.stage_layers": tuple(options.layers)})
    vocab_size = layout.model.vocab_size
    costs = learned_costs(layout, MACHINES["h100"], vocab_size=vocab_size)
    if options.planner is not None:
        _planner(costs, options.planner)
        return
    every: list[Comparison] = []
    behind = still = 0
    for name in [options.only] if options.only else GENERATORS:
        seeds, tokens = range(options.batches), options.packs * PACK
        batches = [draw(name, tokens=tokens, longest=PACK, seed=seed) for seed in seeds]
        planner = Planner(costs, Pipeline(STAGES, RANKS, MEMORY), typical=batches[:8])
        found = [compare(batch, planner, pack=PACK, degree=DEGREE) for batch in batches]
        _print(name, found)
        every += found
        for lengths, each in zip(batches, found, strict=True):
            if _others(each) < _planned(each):
                behind += 1
                cut = [piece for pack in stream(lengths, seq_len=PACK) for piece in pack]
                plan = planner.plan(cut)
                still += _others(each) < price(plan, cut, costs, planner.pipeline).seconds
    _print("all", every)
    below = sum(each.searched_bound < _planned(each) for each in every)
    print(f"{len(every)} batches; behind one of the others: {behind}, and {still} with documents ")
    print(f"cut as packs cut them; above the bound of any schedule of static packs: {below}")


def _others(each: Comparison) -> float:
    return min(row.seconds for row in each.rows[:-1])


def _planned(each: Comparison) -> float:
    return each.rows[-1].seconds


def _print(name: str, found: list[Comparison]) -> None:
    assert not any(each.problems for each in found)
    names = dict.fromkeys(row.name for each in found for row in each.rows)
    shown = []
    for rule in names:
        factors = [each.by_name[rule].factor for each in found if rule in each.by_name]
        shown.append(f"{rule} {mean(factors):.3f} (worst {max(factors):.3f})")
    of_bound = [_planned(each) / each.bound for each in found]
    faster = [each.by_name[STATIC].seconds / _planned(each) for each in found]
    cpu = [each.cpu_seconds / _planned(each) for each in found]
    print(f"{name}: step / pure work: {'; '.join(shown)}")
    print(
        f"    planned / bound {mean(of_bound):.4f} (worst {max(of_bound):.4f}), static / planned "
        f"{mean(faster):.3f} (least {min(faster):.3f}), imbalance "
        f"{max(each.imbalance for each in found):.4f}, CPU {mean(cpu):.2%} of the step",
        flush=True,
    )


def _planner(costs: StepCosts, of_stage: list[int]) -> None:
    """Time the planner by ranks of a stage, with up to 4,096 documents a step."""
    for ranks in of_stage or [16, 64, 256]:
        planner = Planner(costs, Pipeline(STAGES, ranks, MEMORY))
        documents = draw("lognormal-2k", tokens=PACK * 256, longest=PACK, seed=0)[:4096]
        planner.plan([each + 2 for each in documents])  # templates are made once
        began = time.process_time()
        plan = planner.plan(documents)
        took = time.process_time() - began
        began = time.process_time()
        planner.team([each + 1 for each in documents], 0)  # nothing of it is remembered
        of_team = time.process_time() - began
        seconds = price(plan, documents, costs, planner.pipeline).seconds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{STAGES * ranks} ranks, {len(documents)} documents, a step of {seconds:.2f} s: what "
            f"a rank needs {of_team:.3f} CPU s ({of_team / seconds:.2%}), the plan of all "
            f"{planner.num_teams} teams {took:.3f} s ({took / seconds:.2%}), {peak:.0f} MiB"
        )


if __name__ == "__main__":
    main()
