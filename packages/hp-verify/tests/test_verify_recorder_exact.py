"""What the second run of `hp-verify -- JOB` tells, in parts."""

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import REDUCTION, Comparison, Difference, Exact
from hp_verify.comparing.recordings import Digests, Recording, Step
from hp_verify.recording.begin import seed
from hp_verify.recording.events import BACKWARD, FORWARD, GRADIENT, OWN
from hp_verify.recording.recorder import random_states
from hp_verify.recording.trees import expressions, replaced
from hp_verify.recording.values import Part, whole_of
from hp_verify.reproducing.elements import exact, mixture
from hp_verify.reproducing.locate import focus_of
from hp_verify.reproducing.module_programs import ModuleCall, classes_of, module_program
from hp_verify.reproducing.programs import MOST_LINES
from hp_verify.reproducing.second_runs import laid_like

pytestmark = pytest.mark.usefixtures("forked_programs")

ROWS, COLUMNS = 16, 6


def values(seed: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (ROWS, COLUMNS), generator=generator)


def halves(of: Tensor) -> list[Part]:
    """Rows of two ranks."""
    return [Part(of[8 * rank :][:8], tuple(of.shape), (8 * rank, 0), rank) for rank in range(2)]


def told(
    actual: Tensor,
    expected: Tensor | None = None,
    *,
    others: Mapping[str, Tensor] | None = None,
    offsets: Mapping[str, Tensor] | None = None,
) -> Exact:
    theirs = values() if expected is None else expected
    found = exact(
        theirs,
        actual,
        parts=halves(actual) if actual.shape == (ROWS, COLUMNS) else [],
        bound=1e-5,
        others=others or {},
        offsets=offsets or {},
    )
    assert found is not None
    return found


def test_the_rows_of_one_rank_that_are_scaled_are_named() -> None:
    actual = values()
    actual[8:] *= 2

    found = told(actual)

    assert "in rows 8..15 of 16, which rank 1 holds (rank 0: right): they are 2 times" in str(found)
    assert found.ranks == (1,)
    assert (found.num_different, found.num_elements) == (8 * COLUMNS, ROWS * COLUMNS)
    assert found.actual == pytest.approx(2 * found.expected)
    assert values()[found.index].item() == found.expected


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([1, 5, 9, 13], "rows 1, 5, 9, 13 of 16"),
        (list(range(1, 16, 2)), "every second of 16 rows from 1"),
        ([0, 1, 2, 4, 8, 9, 11, 15], "8 of 16 rows"),
    ],
)
def test_rows_that_differ_are_named(rows: list[int], said: str) -> None:
    actual = values()
    actual[rows] += 1

    assert f"in {said}" in str(told(actual))


def test_what_differs_by_rounding_alone_is_equal() -> None:
    actual = values() * (1 + 1e-7)

    assert exact(values(), actual, parts=[], bound=1e-5, others={}, offsets={}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * 0, "zero"),
        (lambda x: x * 0.5, "1/2 times the reference's"),
        (lambda x: -x, "-1 times the reference's"),
        (lambda x: x + values(3, COLUMNS), "off by 2 times bias"),
        (lambda x: x + values(4, COLUMNS), "off by the same row everywhere"),
        (lambda x: x.roll(2, 0), "the reference's rows moved by 2"),
        (lambda x: x.roll(-1, 1), "the reference's columns moved by -1"),
        (
            lambda x: torch.cat([values(5, 3, COLUMNS), x[:-3]]),
            "the reference's rows moved by 3, w",
        ),
        (
            lambda x: torch.cat([x[:, 1:], x[:, :1] + 1], 1),
            "the reference's columns moved by -1, w",
        ),
        (lambda x: x.flip(0), "the reference's rows in another order: 15, 14, 13"),
        (lambda x: x.bfloat16().float(), "rounded to bfloat16"),
        (lambda x: x * torch.nan, "not finite"),
        (lambda _: values(7), "what came before"),
        (lambda x: x + values(8), ""),
    ],
)
def test_a_known_pattern_is_named(change: Callable[[Tensor], Tensor], said: str) -> None:
    found = told(
        change(values()),
        others={"what came before": values(7)},
        offsets={"bias": values(3, COLUMNS) / 2},
    )

    assert found.kind.startswith(said)
    assert bool(found.kind) == bool(said)


def test_a_transposed_matrix_is_named() -> None:
    square = values(1, 5, 5)

    assert told(square.T, square).kind == "the reference's, transposed"


def test_what_is_zero_in_the_reference_is_named() -> None:
    expected, actual = values(), values()
    expected[3] = 0

    found = told(actual, expected)

    assert "in row 3 of 16" in str(found)
    assert found.kind == "zero in the reference"


def test_ranks_with_factors_of_their_own_are_told_apart() -> None:
    actual = values()
    actual[:8] *= 3
    actual[8:] *= 0.5

    assert told(actual).kind == (
        "3 times the reference's on rank 0, 1/2 times the reference's on rank 1"
    )


def test_copies_of_which_one_is_wrong_are_told_apart() -> None:
    right, wrong = values(), values() * 2
    parts = [Part(each, (ROWS, COLUMNS), (0, 0), rank) for rank, each in enumerate((right, wrong))]

    found = exact(values(), right, parts=parts, bound=1e-5, others={}, offsets={})

    assert found is not None
    assert found.ranks == (1,)
    assert "rank 1 holds (rank 0: right)" in str(found)


@pytest.mark.parametrize(("how", "scale"), [("sum", 1), ("mean", 2)])
def test_terms_that_were_not_added_up_are_named(how: str, scale: int) -> None:
    terms = values(5) * scale, (values() - values(5)) * scale
    parts = [Part(term, (ROWS, COLUMNS), (0, 0), rank) for rank, term in enumerate(terms)]

    found = exact(values(), terms[0], parts=parts, bound=1e-5, others={}, offsets={})

    assert found is not None
    assert found.kind == f"terms of a {how} over ranks 0 and 1 that was not taken"


def test_a_sum_of_multiples_of_terms_is_taken_apart() -> None:
    terms = {"a": values(0), "b": values(1), "c": values(2)}

    found = mixture(2 * terms["a"] + terms["b"] / 4, terms, 1e-5)

    assert found == "a sum of 2 times a and 1/4 times b; nothing of c"
    assert not mixture(values(9), terms, 1e-5)


def test_terms_add_up_and_copies_do_not() -> None:
    parts = [Part(values(rank), (ROWS, COLUMNS), (0, 0), rank, adds=True) for rank in range(2)]

    assert torch.equal(whole_of(parts).values, values(0) + values(1))
    assert torch.equal(whole_of([parts[0], parts[0]]).values, values(0))


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2, 4), (6, 4)], ids=str)
def test_samples_are_laid_as_a_module_has_them(shape: tuple[int, ...]) -> None:
    samples = values(0, 2, 3, 4)

    laid = laid_like(samples, shape)

    assert tuple(laid.shape) == shape
    assert torch.equal(laid.reshape(-1).sort()[0], samples.reshape(-1).sort()[0])


def test_tensors_inside_of_arguments_are_found_and_replaced() -> None:
    given = ((torch.ones(1), 3), {"mask": [torch.zeros(2)], "name": "x"})

    texts = [text for text, _ in expressions(given, "given")]
    doubled = replaced(given, lambda tensor: tensor + 1)

    assert texts == ["given[0][0]", "given[1]['mask'][0]"]
    assert eval(texts[1], {"given": doubled}).tolist() == [1.0, 1.0]
    assert doubled[1]["name"] == "x"


def test_of_a_program_only_what_its_classes_need_is_taken() -> None:
    source = textwrap.dedent(
        """
        import torch
        RANK = int("0")
        SIZE: int = RANK + 1
        model = torch.ones(SIZE)

        def scale():
            return SIZE

        def train():
            return model

        class Net(torch.nn.Module):
            def forward(self, x):
                return x * scale()

        print(train())
        """
    )

    text = classes_of(source)

    assert "model" not in text
    assert "train" not in text
    assert "print" not in text
    found: dict[str, Any] = {}
    exec(text, found)
    assert found["Net"]()(3) == 3


def test_the_longest_program_has_forty_lines() -> None:
    call = ModuleCall(
        "title",
        1e-5,
        "a.B",
        "layers.0",
        outputs=["output"],
        hook=("inner", "output"),
        result="seen[0].grad",
        settings=True,
        is_main=True,
        prepare=["pass"],
    )

    text = module_program(call)

    compile(text, "program", "exec")
    assert text.count("\n") <= MOST_LINES


def gradients(own: Mapping[str, float], final: float) -> Comparison:
    """A job whose ranks' own gradients and gradient are multiples of the reference's, or not."""
    sums = (1.0, -2.0, 0.5, 3.0)

    def recording(scale: float, factor: float, other: float = 0.0) -> Recording:
        step = Step()
        before = tuple(scale * x + other * i for i, x in enumerate(sums))
        step.tensors[OWN] = {"w": Digests((4,), "float32", {"": (before, 2.0 * abs(scale))})}
        after = tuple(factor * x for x in sums)
        step.tensors[GRADIENT] = {"w": Digests((4,), "float32", {"": (after, 2.0 * abs(factor))})}
        return Recording({1: step}, [{"rank": "0"}])

    expected = recording(1.0, 1.0)
    actual = recording(own["scale"], final, own.get("other", 0.0))
    return compare(actual, expected, Floor(expected, []))


@pytest.mark.parametrize(
    ("own", "origin", "said"),
    [
        ({"scale": 1.0}, REDUCTION, "what they reduce is right"),
        ({"scale": 1.0, "other": 0.5}, BACKWARD, "wrong before ranks reduce it"),
        ({"scale": 2.0}, "", "or its reduction"),
    ],
    ids=["reduction", "backward", "scaled"],
)
def test_a_wrong_reduction_is_told_from_a_wrong_backward(
    own: Mapping[str, float], origin: str, said: str
) -> None:
    comparison = gradients(own, 2.0)

    assert comparison.first is not None
    assert comparison.first.origin == origin
    assert said in " ".join(explain(comparison))


def randomly(drawn: set[str], *states: str) -> Comparison:
    """A job of as many ranks as states, whose forward differs from a reference with state "a"."""

    def recording(scale: float, *names: str) -> Recording:
        sums: tuple[float, ...] = (scale, -scale, scale, scale)
        rows = {"sample": (sums, 2.0 * scale)}
        step = Step(drawn=drawn, states={f"rank-{i}": {"torch": s} for i, s in enumerate(names)})
        step.tensors[FORWARD] = {"layer": Digests((4,), "float32", rows)}
        return Recording({1: step}, [{"rank": "0"}])

    expected = recording(1.0, "a")
    return compare(recording(1.5, *states), expected, Floor(expected, []))


def test_dropout_is_named_where_it_could_explain_a_difference() -> None:
    assert explain(randomly({"torch"}, "b"))[0] == (
        "dropout could explain it: the model draws random numbers of torch, "
        "and random state differs at step 1"
    )
    assert "ranks draw other shapes" in explain(randomly({"torch"}, "a", "a"))[0]
    assert "dropout" not in " ".join(explain(randomly({"torch"}, "a")))
    assert "dropout" not in " ".join(explain(randomly(set(), "b")))


def test_generators_of_all_three_are_seeded_and_told_apart() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        seed(5)
        first = random_states()
        for draw, kind in (
            (lambda: torch.rand(1), "torch"),
            (random.random, "python"),
            (np.random.rand, "numpy"),
        ):
            seed(5)
            assert random_states() == first
            draw()
            now = random_states()
            assert {name for name in now if now[name] != first[name]} == {kind}
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002


def test_the_second_run_looks_at_the_module_around_a_difference() -> None:
    comparison = randomly(set(), "a")
    expected = Recording({1: Step()}, [{"rank": "0"}])
    for name in ("layers.0.mlp.up", "layers.0.mlp", "layers.0", ""):
        sums: tuple[float, ...] = (1.0,) * 4
        rows = {"sample": (sums, 2.0)}
        expected.steps[1].tensors.setdefault(FORWARD, {})[name] = Digests((4,), "float32", rows)
    first = comparison.first
    assert first is not None

    assert focus_of(first, expected).modules == ("layer", "")
    gradient = Difference(1, GRADIENT, "layers.0.mlp.up.weight", 1.0, 1e-5)
    assert focus_of(gradient, expected).modules == ("layers.0.mlp.up", "layers.0.mlp")
    assert focus_of(gradient, expected).parameters == ("layers.0.mlp.up.weight",)
    backward = Difference(1, BACKWARD, "layers.0.mlp.up:[0]#1", 1.0, 1e-5)
    assert focus_of(backward, expected).modules == ("layers.0.mlp.up", "layers.0.mlp", "")


def program_of(folder: Path, change: Callable[[Tensor], Tensor], given: float = 1.0) -> str:
    """What the program of a linear layer says: the job's value changed, its input scaled."""
    module, x = nn.Linear(3, 2), values(1, 4, 3)
    expected = module(x).detach()
    sides = {
        side: {
            "weights": module.state_dict(),
            "calls": [{"file": "call.pt", "tensors": tensors, "random": torch.get_rng_state()}],
        }
        for side, tensors in (("reference", {}), ("job", {"given[0][0]": x * given}))
    }
    torch.save(((x,), {}), folder / "call.pt")
    record = sides | {"path": [], "settings": [], "expected": expected, "at": (0, 1)}
    torch.save(record | {"actual": change(module(x * given)).detach()}, folder / "record.pt")
    torch.save(module, folder / "module.pt")
    (folder / "it.py").write_text(module_program(ModuleCall("t", 1e-5, "nn.Linear", "head")))

    done = subprocess.run(
        [sys.executable, folder / "it.py"], capture_output=True, text=True, check=True, timeout=120
    )
    assert f"the reference has {expected[0, 1].item():.8g}" in done.stdout
    return done.stdout.splitlines()[-1]


def test_a_program_says_whether_inputs_or_the_layout_are_wrong(tmp_path: Path) -> None:
    said = [program_of(tmp_path, lambda out: out * 2), program_of(tmp_path, lambda out: out, 3.0)]

    assert said == [
        "the job's layout of head is wrong: its inputs and weights are right",
        "the job's head has other inputs",
    ]


@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["layout", "inputs"])
def test_a_parameters_gradient_is_added_up_over_calls(tmp_path: Path, scale: float) -> None:
    module, xs, grads = nn.Linear(3, 2), values(1, 2, 4, 3), values(2, 2, 4, 2)
    expected = sum(g.T @ x for x, g in zip(xs, grads, strict=True))
    random = torch.get_rng_state()
    sides = {}
    for side, factor in (("reference", 1.0), ("job", scale)):
        calls = []
        for i, (x, grad) in enumerate(zip(xs, grads, strict=True)):
            torch.save(((x,), {}), tmp_path / f"call-{i}.pt")
            tensors = {"given[0][0]": x * factor}
            call = {"file": f"call-{i}.pt", "tensors": tensors, "random": random, "grads": [grad]}
            calls.append(call)
        sides[side] = {"weights": module.state_dict(), "calls": calls}
    actual = expected * (2 if scale == 1 else scale)
    record = {"path": [], "expected": expected, "actual": actual, "at": (1, 2)} | sides
    torch.save(record, tmp_path / "record.pt")
    torch.save(module, tmp_path / "module.pt")
    result = "module.get_parameter('weight').grad"
    text = module_program(ModuleCall("t", 1e-5, "Linear", "head", ["output"], result))
    (tmp_path / "it.py").write_text(text)

    done = subprocess.run(
        [sys.executable, tmp_path / "it.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    said = "the job's layout of head is wrong" if scale == 1 else "the job's head has other inputs"
    assert said in done.stdout.splitlines()[-1]
