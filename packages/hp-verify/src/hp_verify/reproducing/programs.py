"""Programs of at most 40 lines that show a difference in one process, with plain torch.

Each reads ``record.pt`` beside it, prints the reference's value, the job's and what it computes
itself, and ends with a verdict.
"""

MOST_LINES = 40
"""Of a program that shows a difference."""
HEAD = '''"""{title}.

Written by `hp-verify`."""
import pathlib, sys, torch

HERE, BOUND = pathlib.Path(__file__).parent, {bound:.1e}
record = torch.load(HERE / "record.pt", weights_only=True)
expected, actual, at = record["expected"], record["actual"], record.get("at")


def error(value, other):
    return float((value - other).double().norm() / other.double().norm().clamp(min=1e-300))

'''

VALUES = """print(f"at {at}: the reference has {expected[at]:.8g}, the job {actual[at]:.8g}; "
      f"error of all {error(actual, expected):.1e}")
"""

REDUCTION = """
own, after = record["own"], record["after"]  # rank -> gradient before and after it is reduced
print(f"the reference has {expected[at]:.8g} at {at}")
for rank, value in own.items():
    print(f"rank {rank} has {value[at]:.8g} before its reduction", end="")
    print(f", {after[rank][at]:.8g} after it" if rank in after else "")
ways = {f"rank {rank}'s": value for rank, value in own.items()}
if len(own) > 1:
    ways |= {"their sum": sum(own.values()), "their mean": sum(own.values()) / len(own)}


def nearest(value):
    for name, way in ways.items():
        if error(way, value) <= BOUND:
            return name
    for name, way in ways.items():
        times = float((way * value).sum() / (way * way).sum().clamp(min=1e-300))
        if error(times * way, value) <= BOUND:
            return f"{times:.4g} times {name}"
    return "none of them, nor their sum"


print("of these the reference has", nearest(expected) + "; the job",
      ", ".join(f"{nearest(value)} on rank {rank}" for rank, value in after.items()))
"""
"""Lays ranks' own gradients beside what became of them."""

NORM = """
def norm(values):
    return sum(value * value for value in values) ** 0.5


parts = record["parts"]  # (parameter, box, rank) -> norm of the gradient there
ranks = sorted({rank for *_, rank in parts})
once = {(name, box): value for (name, box, _), value in reversed(parts.items())}
ways = {"all parts, each once": norm(once.values()), "with copies": norm(parts.values())}
ways |= {f"rank {r}'s parts": norm(v for (*_, k), v in parts.items() if k == r) for r in ranks}
for name, value in ways.items():
    print(f"{name}: {value:.8g}")
print(f"the reference has {float(expected):.8g}")
for rank, value in actual.items():
    near = [name for name, way in ways.items() if abs(way - value) <= BOUND * value]
    print(f"rank {rank} has {value:.8g}: {near[0] if near else 'none of these'}")
"""
"""Takes a norm of gradients from those of parts."""

CLIPPING = (
    VALUES
    + """

def clipped(side):
    gradient, norm, most = (record[side][key] for key in ("gradient", "norm", "most"))
    return gradient * min(1.0, most / (norm + 1e-6))


for side in ("reference", "job"):
    print(side, {key: record[side][key] for key in ("norm", "most")})
print("clipped again from the job's gradient and norm:", clipped("job")[at].item())
if error(clipped("reference"), expected) > BOUND:
    sys.exit("this is not the reference's value: the program proves nothing")
right = error(clipped("job"), actual) <= BOUND
print("the job clips as it should, with another gradient, norm or limit" if right else
      "the job's gradient is not what clipping makes of it")
"""
)
"""Clips gradients again."""

NUMBERS = """
print(f"the reference has {expected}, {sum(expected):.8g} together")
for who, values in actual.items():
    print(f"{who} has {values}, {sum(values):.8g} together")
total = sum(map(sum, actual.values()))
print(f"all together {total:.8g}, {total / sum(expected):.6g} times the reference's")
"""
"""Shows numbers of both jobs, such as losses."""


def program(title: str, bound: float, body: str) -> str:
    """Write a program.

    Args:
        title: Name of the difference.
        bound: Largest error that rounding explains.
        body: Source after the head.
    """
    return HEAD.format(title=title, bound=bound) + body


def of_update(kind: tuple[str, str], result: str) -> str:
    """Return what makes a parameter's update again, of an optimizer's module and class."""
    return f"""{VALUES}
from {kind[0]} import {kind[1]} as Optimizer


def updated(side):
    p = torch.nn.Parameter(record[side]["weight"].clone())
    p.grad, optimizer = record[side]["gradient"], Optimizer([p], **record[side]["options"])
    optimizer.state[p].update({{k: v.clone() for k, v in record[side]["state"].items()}})
    optimizer.step()
    return {result}.detach()


if error(updated("reference"), expected) > BOUND:
    sys.exit("this is not the reference's value: the program proves nothing")
print("other before the update:", record["others"])
is_right = error(updated("job"), actual) <= BOUND
print("the job's update is right for what was other before" if is_right else
      "the job's update is not what its gradient, state and options give")
"""
