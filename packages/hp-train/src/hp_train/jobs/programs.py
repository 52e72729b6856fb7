"""Programs of at most 40 lines that show a difference in one process, with plain torch.

Each reads ``record.pt`` beside it, prints the reference's value, the job's and what it computes
itself, and ends with a verdict.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from hp_train.jobs.reproduction import MOST_LINES

_HEAD = '''"""{title}.

Written by `hp verify`. It unpickles what lies beside it: run it where you trust both jobs."""
import pathlib, sys, torch

HERE, BOUND = pathlib.Path(__file__).parent, {bound:.1e}
record = torch.load(HERE / "record.pt", weights_only=False)
expected, actual, at = record["expected"], record["actual"], record.get("at")


def error(value, other):
    return float((value - other).double().norm() / other.double().norm().clamp(min=1e-300))

'''

_VALUES = """print(f"at {at}: the reference has {expected[at]:.8g}, the job {actual[at]:.8g}; "
      f"error of all {error(actual, expected):.1e}")
"""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """How a module's value is computed again.

    Attributes:
        title: What differs.
        bound: What rounding explains.
        kind: Class of the module.
        name: What it is called.
        outputs: Python for each tensor of ``output`` whose gradient goes in; empty: forward alone.
        result: Python for the value.
        hook: Submodule whose output is watched, and Python for it there; empty: none.
        settings: Whether the job's modules have other numbers and flags.
        is_main: Whether the class is of the program itself.
        prepare: Lines that make the process compute as the job's.
    """

    title: str
    bound: float
    kind: str
    name: str
    outputs: Sequence[str] = ()
    result: str = "output"
    hook: tuple[str, str] = ("", "")
    settings: bool = False
    is_main: bool = False
    prepare: Sequence[str] = ()


def module_program(call: ModuleCall) -> str:
    """A program that computes a module's value again from both jobs' inputs and weights."""
    lines = _HEAD.format(title=call.title, bound=call.bound).splitlines()[:-1]
    lines += ['sys.path += record["path"]']
    if call.is_main:
        lines += [f"import __main__, {OWN_CLASSES}  # classes of the job's own program"]
        lines += [f"vars(__main__).update(vars({OWN_CLASSES}))"]
    lines += call.prepare
    lines += [f'module = torch.load(HERE / "module.pt", weights_only=False)  # {call.kind}']
    lines += ["", "", *_compute(call), "", ""]
    lines += [
        'theirs, mine = compute("reference"), compute("job")',
        'print(f"at {at}: the reference has {expected[at]:.8g}, the job {actual[at]:.8g};"',
        '      f" one process gives {theirs[at]:.8g} from the reference\'s inputs,"',
        '      f" {mine[at]:.8g} from the job\'s")',
        "if error(theirs, expected) > BOUND:",
        '    sys.exit("it is not the reference\'s value that is computed: this proves nothing")',
    ]
    if call.settings:
        lines += [
            'for path, key, value in record["settings"]:',
            "    setattr(module.get_submodule(path), key, value)",
            'if error(compute("job"), actual) <= BOUND:',
            f'    sys.exit(print("other settings of {call.name}:", record["settings"]))',
        ]
    lines += [
        f'print("{call.name} is given other inputs or weights" if error(mine, actual) <= BOUND',
        f'      else "the job\'s layout of {call.name} is wrong: its inputs and weights are right"',
        "      if error(mine, expected) <= BOUND",
        f'      else "{call.name} is given something else, and its layout is wrong as well")',
    ]
    return "\n".join(_fitting(lines)) + "\n"


OWN_CLASSES = "classes_of_the_job"
"""Module beside a program that has the classes of the job's own program."""


def _compute(call: ModuleCall) -> list[str]:
    lines = [
        "def compute(side):",
        '    module.load_state_dict(record[side]["weights"], strict=False)',
    ]
    if call.hook[0]:
        lines += [
            f"    seen, inner = [], module.get_submodule({call.hook[0]!r})",
            "    inner.register_forward_hook(",
            f"        lambda m, a, output: seen.append({call.hook[1]}) or seen[-1].retain_grad())",
        ]
    lines += [
        '    for call in record[side]["calls"]:',
        '        args, kwargs = given = call["given"]',
        '        torch.set_rng_state(call["random"])',
        "        output = module(*args, **kwargs)",
    ]
    if call.outputs:
        lines += [f"        torch.autograd.backward([{', '.join(call.outputs)}], call['grads'])"]
    return [*lines, f"    return {call.result}.detach()"]


def _fitting(lines: Sequence[str]) -> list[str]:
    """Without empty lines of code where there are too many."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [line for index, line in enumerate(lines) if line or index == 1]


def classes_of(source: str) -> str:
    """What of a program only defines something: its imports, classes, functions, constants.

    Args:
        source: The program.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if _defines(node)]
    return ast.unparse(tree) + "\n"


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return not any(isinstance(inside, ast.Call) for inside in ast.walk(node))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)


def reduction_program(title: str, bound: float) -> str:
    """A program that lays ranks' own gradients beside what became of them."""
    head = _HEAD.format(title=title, bound=bound)
    return (
        head
        + """
own, after = record["own"], record["after"]  # rank -> gradient before and after it is reduced
print(f"the reference has {expected[at]:.8g} at {at}")
for rank, value in own.items():
    print(f"rank {rank} has {value[at]:.8g} before its reduction", end="")
    print(f", {after[rank][at]:.8g} after it" if rank in after else "")
total = sum(own.values())
ways = {"their sum": total, "their mean": total / len(own)}
ways |= {f"rank {rank}'s alone": value for rank, value in own.items()}


def nearest(value):
    way = min(ways, key=lambda name: error(ways[name], value))
    return way if error(ways[way], value) <= BOUND else "none of their sum, mean or own"


print("of ranks' own gradients the reference has", nearest(expected), "; the job:",
      "; ".join(f"{nearest(value)} on rank {rank}" for rank, value in after.items()))
"""
    )


def norm_program(title: str, bound: float) -> str:
    """A program that takes a norm of gradients from those of parts."""
    head = _HEAD.format(title=title, bound=bound)
    return (
        head
        + """
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
    )


def clipping_program(title: str, bound: float) -> str:
    """A program that clips gradients again."""
    head = _HEAD.format(title=title, bound=bound)
    return (
        head
        + _VALUES
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


def update_program(title: str, bound: float, kind: tuple[str, str], result: str) -> str:
    """A program that makes a parameter's update again."""
    head = _HEAD.format(title=title, bound=bound)
    body = f"""
from {kind[0]} import {kind[1]} as Optimizer


def updated(gradient_of, options_of, state_of="job"):
    sides = record[gradient_of], record[options_of], record[state_of]
    p = torch.nn.Parameter(sides[2]["weight"].clone())
    p.grad, optimizer = sides[0]["gradient"].clone(), Optimizer([p], **sides[1]["options"])
    optimizer.state[p].update({{k: v.clone() for k, v in sides[2]["state"].items()}})
    optimizer.step()
    return {result}.detach()


if error(updated("reference", "reference", "reference"), expected) > BOUND:
    sys.exit("this is not the reference's value: the program proves nothing")
print("other options:", record["options"] or "none")
if error(updated("job", "job"), actual) > BOUND:
    sys.exit(print("the job's update is not what its gradient, state and options give"))
print("the job's update is right for other",
      "options" if error(updated("job", "reference"), expected) <= BOUND else
      "state or weights" if error(updated("job", "job", "reference"), expected) <= BOUND else
      "gradients, state and options")
"""
    return head + _VALUES + body


def values_program(title: str, bound: float, said: str) -> str:
    """A program that shows both values, where there is nothing to compute again.

    Args:
        title: What differs.
        bound: What rounding explains.
        said: What it ends with.
    """
    return _HEAD.format(title=title, bound=bound) + "\n" + _VALUES + f"print({said!r})\n"


def numbers_program(title: str, bound: float, said: str) -> str:
    """A program that shows numbers of both jobs, such as losses.

    Args:
        title: What differs.
        bound: What rounding explains.
        said: What it ends with.
    """
    body = """
print(f"the reference has {expected}, {sum(expected):.8g} together")
for who, values in actual.items():
    print(f"{who} has {values}, {sum(values):.8g} together")
total = sum(map(sum, actual.values()))
print(f"all together {total:.8g}, {total / sum(expected):.6g} times the reference's")
"""
    return _HEAD.format(title=title, bound=bound) + body + f"print({said!r})\n"
