# ruff: noqa: ARG001 - names of the arguments are those of the autograd functions
"""The zoo's bugs as `spmd_types` sees them: its job annotated, run on two ranks under the checker.

spmd_types tells before any number is compared whether ranks have copies (R, I), parts (V) or terms
(P) of a tensor, and refuses what would give other gradients. The job of
`integration_tests.jobs.zoo` says nothing of its tensors; what is said of them is all in here: the
types of parameters, of gradients as they arrive, of batches and losses, rules of the five autograd
functions, and lines of the job at which a sum over ranks begins or ends, or a message arrives
(`LINES`). Checked, strictly, are forward, gradients, their reduction, norm and clipping, and
evaluation; not what autograd computes by itself, nor the optimizer, nor sends and receives, of
which it has no rules.

    pip install spmd_types==0.3.1 msgspec
    python benchmarks/spmd_types_zoo.py          # all; or layouts, or names of bugs
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import spmd_types as spmd
import torch
from integration_tests.jobs.zoo import collectives, job, model
from integration_tests.jobs.zoo.bugs import BUGS, SOUND
from integration_tests.jobs.zoo.model import Model, Place
from integration_tests.models.architectures.forks import run_ranks
from spmd_types import I, P, R, V, rules
from spmd_types.checker import typecheck
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

AXIS = "ranks"
SECONDS = 60
GRADIENT_OF = {R: P, I: I, V: V}
CUT_BY_TP = (".q.", ".out.weight", ".lora_a.", ".feed.up.", ".feed.down.", "head.")

LINES: dict[tuple[Any, str], list[tuple[str, str]]] = {
    (model.Attention, "forward"): [
        ("F.linear(mixed, self.out.weight)", "terms(F.linear(mixed, self.out.weight))"),
    ],
    (model.Experts, "forward"): [
        ("result = torch.zeros_like(tokens)", "result = terms(torch.zeros_like(tokens), place)"),
        ("weight.sum(-1, keepdim=True) * out", "terms(weight.sum(-1, keepdim=True) * out, place)"),
    ],
    (job, "_norm"): [
        (
            "torch.tensor(total, dtype=torch.float64)",
            "terms(torch.tensor(total, dtype=torch.float64))",
        ),
    ],
    (job, "_reduce"): [
        ("grad.to(dtype)", "(grad if dtype == grad.dtype else grad.to(dtype))"),
        ("grad.copy_(", "whole(grad).copy_("),
    ],
    (job, "_evaluate"): [  # `data` of a tensor has no type
        ("weight.data.mul_(1.1)", "weight.mul_(1.1)"),
        ("weight.data.div_(1.1)", "weight.div_(1.1)"),
    ],
    (job, "_pipeline"): [
        ("given.requires_grad_()", "parts(given).requires_grad_()"),
        ("out.backward(grad)", "out.backward(parts(grad))"),
        ("given.grad.contiguous()", "parts(given.grad).contiguous()"),
        (
            "tied.grad.copy_(summed(tied.grad))",
            "total = summed(tied.grad)\n        whole(tied.grad).copy_(total)",
        ),
    ],
}
"""Function -> its lines, and what stands in their place: `terms` of a sum over ranks, `parts` of
ranks, `whole`: a tensor that is about to be given the sum of its terms."""


def type_of(name: str, place: Place, *, tied: bool) -> Any:
    """What ranks have of a parameter: copies, used by each (R) or by all alike (I), or parts."""
    if place.layout == "pp":
        return R if tied and name in ("embed.weight", "head.weight") else V
    if place.layout == "ep":
        return V if name.endswith((".feed.up", ".feed.down")) else R
    if place.layout != "tp":
        return R
    if any(word in name for word in CUT_BY_TP):
        return V
    return R if ".kv." in name or name == "norm.weight" else I


def terms(x: Tensor, place: Place | None = None) -> Any:
    """Say that ranks have terms of a sum over them; of experts, only where ranks share these."""
    if place is not None and place.layout != "ep":
        return x
    kind = spmd.get_axis_local_type(x, AXIS)
    if kind is P:
        return x
    return spmd.reinterpret(x, AXIS, src=kind, dst=P, expert_mode=True)


def parts(x: Tensor) -> Any:
    """Say that each rank has something of its own."""
    return spmd.assert_type(x, {AXIS: V})


def whole(x: Tensor) -> Any:
    """Say that terms are about to be overwritten by their sum; parts are not."""
    return spmd.mutate_type(x, AXIS, src=P, dst=R)


def annotate() -> None:
    """Say of the job of this process what it does not say itself."""
    rule: dict[Any, Callable[..., Any]] = {
        collectives.Copy: _copy,
        collectives.Reduce: _reduce,
        collectives.Gather: _gather,
        collectives.Split: _split,
        collectives.ReduceSplit: _reduce_split,
    }
    for function, check in rule.items():
        function.spmd_typecheck = staticmethod(check)
    typed = spmd.no_typecheck(in_types=({AXIS: V}, None), out_types={AXIS: R})
    for module in (model, job):
        module.gathered = typed(collectives.gathered)  # type: ignore[attr-defined]
    for (owner, name), lines in LINES.items():
        _rewrite(owner, name, lines)
    _around(job, "fill", after=_parameters)
    _around(job, "_cut", inside=spmd.no_typecheck, after=_batch)
    _around(job, "loss_of", after=_loss)
    for name in ("_gradients", "_evaluate"):
        _around(job, name, inside=typecheck, before=_copies)
    for name in ("send", "recv"):  # it has no rules for them
        _around(torch.distributed, name, inside=spmd.no_typecheck)
    for name in ("_norm", "_clip"):
        _around(job, name, inside=typecheck)


def _copy(*, x: Tensor) -> Any:
    return rules.convert(x, AXIS, src=I, dst=R)


def _reduce(*, x: Tensor) -> Any:
    is_terms = spmd.get_axis_local_type(x, AXIS) is P
    return rules.all_reduce(x, AXIS, src=P if is_terms else V, dst=I)


def _gather(out: Tensor, *, x: Tensor, dim: int) -> None:
    parts(x)
    spmd.assert_type(out, {AXIS: R})


def _split(*, x: Tensor, dim: int) -> Any:
    return rules.convert(x, AXIS, src=I, dst=V)


def _reduce_split(out: Tensor, *, x: Tensor, dim: int) -> None:
    spmd.assert_type(x, {AXIS: P})
    parts(out)


def _copies(_model: Model, _place: Place, tokens: Tensor) -> None:
    spmd.assert_type(tokens, {AXIS: R})


def _parameters(_: None, filled: Model, place: Place, stage: int | None = None) -> None:
    """Say what parameters are, and what their gradients are once autograd has added to them."""
    for name, parameter in filled.named_parameters():
        kind = type_of(name, place, tied=filled.tied)
        spmd.assert_type(parameter, {AXIS: kind})

        def arrived(p: Tensor, kind: Any = GRADIENT_OF[kind]) -> None:
            spmd.assert_type(p.grad, {AXIS: kind})

        parameter.register_post_accumulate_grad_hook(arrived)


def _batch(batch: tuple[Tensor, Tensor], _tokens: Tensor, place: Place) -> None:
    kind = V if place.layout in ("dp", "ep", "cp") else R
    for x in batch:
        spmd.assert_type(x, {AXIS: kind})


def _loss(loss: Tensor, _logits: Tensor, _targets: Tensor, place: Place) -> Tensor:
    """A loss is the sum of what ranks have, but under tp, where all have all of it."""
    return loss if place.layout == "tp" else terms(loss)


def _around(
    owner: Any,
    name: str,
    *,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    before: Callable[..., None] | None = None,
    after: Callable[..., Tensor | None] | None = None,
) -> None:
    """Have something done around a function; what `after` gives, if anything, is its result."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        with inside():
            result = function(*args, **kwargs)
        other = None if after is None else after(result, *args)
        return result if other is None else other

    setattr(owner, name, wrapped)


def _rewrite(owner: Any, name: str, lines: list[tuple[str, str]]) -> None:
    """Put other lines in a function of the zoo."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in lines:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} must be in {name} once")
        source = source.replace(old, new)
    scope = sys.modules[function.__module__].__dict__
    scope.update(terms=terms, parts=parts, whole=whole)
    made: dict[str, Any] = {}
    exec(source, scope, made)  # noqa: S102 - the zoo's own source
    setattr(owner, name, made[name])


def checked(layout: str, bug: str, *, tied: bool) -> None:
    """Run the job under the checker; it raises where spmd_types refuses it."""
    torch.set_num_threads(1)
    annotate()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(AXIS,))
    with spmd.set_current_mesh(mesh):
        job.train(layout, bug, tied=tied)


def refused(layout: str, bug: str = "") -> str:
    """Why spmd_types refuses a job; empty: it does not. A job that fails otherwise raises.

    Args:
        layout: One of `SOUND`.
        bug: One of the layout's bugs; empty: none.
    """
    layout, _, tied = layout.partition(" ")
    is_tied = bool(tied) or bug == "tied-end"
    with tempfile.TemporaryDirectory() as folder:
        reason = run_ranks(
            lambda: checked(layout, bug, tied=is_tied),
            size=2,
            folder=Path(folder) / "run",
            seconds=SECONDS,
        )
    kind, _, why = reason.partition(": ")
    if kind not in ("", "SpmdTypeError"):
        raise RuntimeError(f"{layout} {bug} fails: {reason}")
    return why


def main() -> None:
    """Print what is refused, and why."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    names = set(parser.parse_args().names)
    cases = [(layout, "") for layout in SOUND if layout != "fsdp"]
    cases += [(bug.layout, bug.name) for bug in BUGS]
    cases = [case for case in cases if not names or names & set(case)]
    began, found = time.monotonic(), 0
    for layout, bug in cases:
        why = refused(layout, bug)
        found += bool(bug and why)
        print(f"{layout:8} {bug or 'sound':24} {why or 'accepted'}", flush=True)
    num_bugs = sum(1 for _, bug in cases if bug)
    print(f"{found} of {num_bugs} bugs are refused; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
