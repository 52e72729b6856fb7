"""Bugs of training systems, as public threads tell them: found and named from outside."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_verify.comparing.compare import compare, with_floor
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import Comparison
from hp_verify.comparing.recordings import Recording, distance
from hp_verify.recording.events import GRADIENT, OWN
from hp_verify.recording.request import Focus, Request
from hp_verify.reproducing.locate import look_again
from hp_verify.reproducing.programs import MOST_LINES
from integration_tests.jobs.demo.found import look_for
from integration_tests.jobs.recorded import record
from integration_tests.jobs.zoo.bugs import BUGS, REPORTS, Bug
from integration_tests.jobs.zoo.job import PRECISIONS, train

WANTED = {(bug.layout, bug.name): bug for bug in BUGS}


class Referee:
    """A reference and what rounding does to it, and jobs that are compared with it."""

    def __init__(self, folder: Path, *, tied: bool, precision: str = "float32") -> None:
        self._folder, self._tied, self._precision = folder, tied, precision
        self._float64 = precision == "float64"
        self._reference = str(folder / "reference")
        self._judged: dict[tuple[str, str], Recording] = {}
        self._expected, self._floor = with_floor(
            lambda name, seed: self._recorded(name, "one", disturb=seed)
        )

    def _recorded(
        self,
        name: str,
        layout: str,
        bug: str = "",
        disturb: int = 0,
        focus: Focus | None = None,
    ) -> Recording:
        request = Request(
            str(self._folder / name),
            reference="" if layout == "one" and not disturb else self._reference,
            disturb=disturb,
            float64=self._float64,
            focus=focus,
        )
        job = functools.partial(train, layout, bug, tied=self._tied, precision=self._precision)
        return record(request, job, ranks=1 if layout == "one" else 2)

    def judge(self, layout: str, bug: str = "", *, again: bool = False) -> Comparison:
        actual = self._judged.get((layout, bug))
        if actual is None:
            actual = self._recorded(f"{layout}-{bug}", layout, bug)
            self._judged[layout, bug] = actual
        self.compared = actual, self._expected
        comparison = compare(actual, self._expected, self._floor)
        if again and comparison.first is not None:
            title = f"{layout}-{bug}-again"

            def run(side: str, focus: Focus) -> Path:
                name = f"{title}-{side}"
                self._recorded(
                    name,
                    layout if side == "job" else "one",
                    bug if side == "job" else "",
                    focus=focus,
                )
                return self._folder / name

            look_again(
                comparison,
                (actual, self._expected),
                run,
                self._folder / title,
                float64=self._float64,
            )
        return comparison


Referees = Callable[..., Referee]


@pytest.fixture(scope="module")
def referees(tmp_path_factory: pytest.TempPathFactory) -> Referees:
    @functools.cache
    def made(*, tied: bool, precision: str) -> Referee:
        return Referee(tmp_path_factory.mktemp("zoo"), tied=tied, precision=precision)

    return made


@pytest.mark.sample(
    *(f"{case}-float64" for case in ("dp", "fsdp", "ep", "cp", "pp tied")), "tp-bfloat16"
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["one", "dp", "fsdp", "tp", "ep", "cp", "pp", "pp tied"])
def test_a_sound_job_is_equal(case: str, precision: str, referees: Referees) -> None:
    layout, _, tied = case.partition(" ")

    comparison = referees(tied=bool(tied), precision=precision).judge(layout)

    assert comparison.first is None, explain(comparison)
    assert comparison.num_steps == 3
    assert comparison.num_compared > 200
    gradients = [name for name in comparison.unaligned if name.startswith("gradient")]
    assert not gradients, comparison.unaligned


@pytest.mark.sample(
    "dp-no-reduce",
    "dp-same-data",
    "dp-resume-moments",
    "dp-eval-other",
    "tp-tp-norm",
    "tp-tp-log-size",
    "tp-lora-no-sum",
    "ep-router-gradient",
    "ep-ep-scaled",
    "cp-cp-documents",
    "pp-tied-end",
)
@pytest.mark.parametrize(("layout", "bug"), WANTED, ids=lambda value: value)
def test_a_public_bug_is_found_and_named(layout: str, bug: str, referees: Referees) -> None:
    wanted = WANTED[layout, bug]

    comparison = referees(tied=wanted.is_tied, precision="float32").judge(layout, bug)

    first = comparison.first
    assert first is not None
    assert first.phase == wanted.phase, first
    assert re.search(wanted.where, first.name), first
    assert wanted.likely in " ".join(explain(comparison)), explain(comparison)


@pytest.mark.sample("scattered", "leftover")
@pytest.mark.parametrize("bug", REPORTS, ids=lambda bug: bug.layout)
def test_a_public_report_is_found_and_named_and_its_job_without_it_equal(bug: Bug) -> None:
    sound, found = look_for([bug], [bug.layout])

    assert sound.is_right, sound
    assert found.is_right, found


# (layout, bug): ranks that are wrong; a word of the sentence; of what the program says at its end
EXACT = {
    ("dp", "no-reduce"): ((0, 1), "what each rank has alone", "the reference has their sum"),
    ("dp", "microbatch-sum"): ((0, 1), "2 times the", "their mean; the job their sum on rank 0"),
    ("dp", "reduce-each-microbatch"): ((0, 1), "2 times backward 1 of rank 0", "none of them"),
    ("dp", "same-data"): ((1,), "rank 1 is given 0, 1; no rank is given 2, 3", ""),
    ("dp", "start"): ((1,), r"\(rank 0: right\)", ""),
    ("dp", "stale-copy"): ((1,), r"samples 2\.\.3 of 4", "norm has other weights"),
    ("dp", "bf16-reduce"): ((0, 1), "rounded to bfloat16", "the reference has their sum"),
    ("dp", "norm-local"): ((1,), "rank 1 has 0 in place of", "rank 1 has 0: none of these"),
    ("dp", "norm-twice"): ((0, 1), "rank 0 has 3.34", "with copies"),
    ("dp", "clip-per-rank"): ((1,), r"\(rank 0: right\)", "none of these"),
    ("dp", "decay"): ((0, 1), "374 of 384 elements", "right for what was other before"),
    ("dp", "rate-per-rank"): ((0, 1), "in place of 0.005", "schedules"),
    ("dp", "resume-moments"): ((0, 1), "191 of 192", "right for what was other before"),
    ("dp", "eval-other"): ((0, 1), "11/10 times", "norm has other weights"),
    ("dp", "eval-mode"): ((0, 1), "all 768", r"other settings of layers\.0\.norm1.*eps"),
    ("tp", "tp-bias-twice"): (
        (0, 1),
        r"off by 1 times .*out\.bias",
        "layout of layers.0.attention",
    ),
    ("tp", "tp-kv"): ((0, 1), "what each rank has alone", "the reference has their sum"),
    ("tp", "tp-norm"): ((0, 1), "what each rank has alone", "the reference has their sum"),
    ("tp", "tp-log-size"): ((0, 1), "on each in place of 4.66", "how losses are made"),
    ("tp", "lora-no-sum"): (
        (0, 1),
        "a sum over ranks 0 and 1 that was not taken",
        "layout of layers.0.attention is wrong",
    ),
    ("ep", "router-gradient"): ((0, 1), "1/2 times the", "layout of layers.1.feed is wrong"),
    ("ep", "router-detached"): ((0, 1), "672 of 768", "layout of layers.1.feed is wrong"),
    ("ep", "router-not-normalised"): ((0, 1), "all 768", "layout of layers.1.feed is wrong"),
    ("ep", "ep-scaled"): ((0, 1), "2 times the", r"the job 2 times rank 1's"),
    ("ep", "ep-averaged"): ((0, 1), "1/2 times the", "the job 0.5 times rank 1's"),
    ("ep", "expert-lost"): ((0, 1), "all 768", "layout of layers.1.feed is wrong"),
    ("ep", "shared-twice"): ((0, 1), "all 768", "layout of layers.1.feed is wrong"),
    ("cp", "cp-documents"): ((0, 1), "sample 3 of 4", "layout of layers.0.attention is wrong"),
    ("cp", "cp-positions"): (
        (1,),
        r"indices 6\.\.11 of 12 of dim 1",
        "layout of the model is wrong",
    ),
    ("cp", "cp-off"): ((1,), r"indices 6\.\.11 of 12 of dim 1", "layers.0.attention"),
    ("cp", "cp-averaged"): ((0, 1), "1/2 times the", "their sum; the job their mean"),
    ("pp", "last-microbatch"): ((0,), "of backward 1 of 2 alone", ""),
    ("pp", "tied-end"): ((0, 1), "what each rank has alone", "the reference has their sum"),
}


@pytest.mark.sample("dp-decay", "tp-tp-bias-twice", "ep-router-gradient")
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(("layout", "bug"), EXACT, ids=lambda value: value)
def test_a_second_run_says_where_a_public_bug_is(layout: str, bug: str, referees: Referees) -> None:
    ranks, word, verdict = EXACT[layout, bug]

    comparison = referees(tied=bug == "tied-end", precision="float32").judge(
        layout, bug, again=True
    )

    found, first = comparison.exact, comparison.first
    assert found is not None
    assert first is not None
    assert found.ranks == ranks
    assert re.search(word, str(found)), found
    if first.phase == "input":
        assert comparison.reproduction is None
        return
    made = comparison.reproduction
    assert made is not None, comparison.again
    assert made.text.count("\n") <= MOST_LINES
    ran = subprocess.run(
        [sys.executable, made.path], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout == made.output
    assert re.search(verdict, made.verdict), made.output
    assert "hp_" not in made.text.replace(
        "integration_tests.jobs.zoo", ""
    )  # where the job's own classes are


@pytest.mark.sample("dp", "fsdp")
@pytest.mark.parametrize("layout", ["one", "dp", "fsdp", "tp", "ep", "cp", "pp"])
def test_own_gradients_of_ranks_add_up_to_a_multiple_of_the_references(
    layout: str, referees: Referees
) -> None:
    referee = referees(tied=False, precision="float64")

    assert referee.judge(layout).first is None

    actual, expected = (recording.steps[1].tensors for recording in referee.compared)
    assert actual[OWN].keys() == expected[GRADIENT].keys()
    for name, theirs in expected[GRADIENT].items():
        mine = actual[OWN][name]
        assert not mine.problem
        (sums, _), (wanted, norm) = mine.rows[""], theirs.rows[""]
        times = 2 if layout == "fsdp" else 1  # its ranks scale losses for the mean that follows
        assert distance(sums, [times * x for x in wanted]) <= 1e-12 * norm, name
