"""Programs that compute a module's value again, from what both jobs gave it, see `programs`."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from hp_verify.reproducing.programs import HEAD, MOST_LINES


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Recipe to compute a module's value again.

    Attributes:
        title: Name of the difference.
        bound: Largest error that rounding explains.
        kind: Class of the module.
        name: Name of the module.
        outputs: Python for each tensor of ``output`` whose gradient goes in; empty: forward alone.
        result: Python for the value.
        hook: Submodule whose output is watched, and Python for it there; empty: none.
        settings: Whether the job's modules have other numbers and flags.
        terms: Whether ranks were given gradients that do not add up to the reference's.
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
    terms: bool = False
    is_main: bool = False
    prepare: Sequence[str] = ()


def module_program(call: ModuleCall) -> str:
    """Write a program that computes a module's value again from both jobs' inputs and weights."""
    lines = HEAD.format(title=call.title, bound=call.bound).splitlines()[:-1]
    lines += ['sys.path += record["path"]']
    if call.is_main:
        lines += [f"import __main__, {OWN_CLASSES}; vars(__main__).update(vars({OWN_CLASSES}))"]
    lines += call.prepare
    load = 'torch.load(HERE / "module.pt", map_location="cpu", weights_only=False)'
    lines += [f"module = {load}  # {call.kind}"]
    lines += ["", "", *_compute(call), "", ""]
    lines += [
        'theirs, mine = compute("reference", "reference"), compute("job", "job")',
        'print(f"at {at}: the reference has {expected[at]:.8g}, the job {actual[at]:.8g};"',
        '      f" one process gives {theirs[at]:.8g} from the reference\'s inputs,"',
        '      f" {mine[at]:.8g} from the job\'s")',
        'assert error(theirs, expected) <= BOUND, "this program proves nothing"',
    ]
    if call.settings:
        lines += [
            'for path, key, value in record["settings"]:',
            "    setattr(module.get_submodule(path), key, value)",
            'if error(compute("job", "job"), actual) <= BOUND:',
            f'    sys.exit(print("other settings of {call.name}:", record["settings"]))',
        ]
    lines += [
        f'print("the job\'s layout of {call.name} is wrong: its inputs and weights are right"',
        "      if error(mine, expected) <= BOUND",
        f'      else "{_both_wrong(call)}" if error(mine, actual) > BOUND',
        f'      else "the job\'s {call.name} has other {_WEIGHTS}"',
        '      if error(compute("job", "reference"), expected) <= BOUND',
        f'      else "the job\'s {call.name} has other {_INPUTS}")',
    ]
    if len(lines) > MOST_LINES:
        lines = [line for index, line in enumerate(lines) if line or index == 1]
    return "\n".join(lines) + "\n"


_INPUTS, _WEIGHTS = "inputs", "weights"


def blames_inputs(verdict: str) -> bool:
    """Tell whether a program says that its module is right: what comes before it is wrong."""
    return verdict.endswith(f"has other {_INPUTS}")


def _both_wrong(call: ModuleCall) -> str:
    if call.terms:
        return (
            f"ranks give {call.name} gradients that are not the reference's, and do not add up to "
            "it: what uses its output is wrong"
        )
    return f"{call.name} is given something else, and its layout is wrong as well"


OWN_CLASSES = "classes_of_the_job"
"""Module beside a program that has the classes of the job's own program."""


def _compute(call: ModuleCall) -> list[str]:
    lines = [
        "def compute(side, weights):",
        "    module.zero_grad()",
        '    module.load_state_dict(record[weights]["weights"], strict=False)',
    ]
    if call.hook[0]:
        then = " or seen[-1].retain_grad()" if call.outputs else ""
        hook = f"lambda m, a, output: seen.append({call.hook[1]}){then}"
        lines += [
            f"    seen, inner = [], module.get_submodule({call.hook[0]!r})",
            f"    inner.register_forward_hook({hook})",
        ]
    lines += [
        '    for call in record[side]["calls"]:',
        '        given = torch.load(HERE / call["file"], weights_only=False)',
        '        for place, value in call["tensors"].items(): eval(place).data = value',
        '        torch.set_rng_state(call["random"])',
        "        output = module(*given[0], **given[1])",
    ]
    if call.outputs:
        lines += [f"        torch.autograd.backward([{', '.join(call.outputs)}], call['grads'])"]
    return [*lines, f"    return {call.result}.detach()"]


def classes_of(source: str) -> str:
    """Return what of a program its classes need: imports, and what they name, and what that names.

    Args:
        source: The program.
    """
    tree = ast.parse(source)
    needed: set[ast.stmt] = set()
    later: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    while later:
        needed.update(later)
        names = set[str]().union(*map(_names_in, later))
        later = [node for node in tree.body if node not in needed and names & _defined(node)]
    imports = (ast.Import, ast.ImportFrom)
    tree.body = [node for node in tree.body if node in needed or isinstance(node, imports)]
    return ast.unparse(tree) + "\n"


def _names_in(node: ast.AST) -> set[str]:
    return {inside.id for inside in ast.walk(node) if isinstance(inside, ast.Name)}


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return set[str]().union(*map(_names_in, targets))
