"""A plan of a step, as data and as text."""

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile

from hp_base.errors import ConfigError
from hp_base.folder import why_not
from hp_context import Deal
from hp_schedule import Schedule, from_csv, to_csv

_HEAD = re.compile(r"step plan 1, (\d+) documents\Z")
_TEAM = re.compile(r"team (\d+)\Z")
_MICROBATCH = re.compile(r"microbatch (\d+): documents ([\d ]+), padding (\d+), heads over (\d+)\Z")
_RANK = re.compile(r"rank (\d+): ([\d \-]+)\Z")


@dataclass(frozen=True)
class PlannedMicrobatch:
    """Documents that go through the pipeline together.

    Attributes:
        documents: Indices of the documents in the global batch, in the order of their positions.
        padding: Number of positions of padding behind them.
        deal: Positions of each rank of the team.
        heads: Number of consecutive ranks that share heads.
    """

    documents: tuple[int, ...]
    padding: int
    deal: Deal
    heads: int = 1


@dataclass(frozen=True)
class Team:
    """Ranks of a stage that share microbatches, and the same ranks of every other stage.

    Attributes:
        microbatches: Microbatches of the team, in the order of their indices in the schedule.
        schedule: Order of the steps of each stage, without messages.
    """

    microbatches: tuple[PlannedMicrobatch, ...]
    schedule: Schedule


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step, for all of its ranks.

    Attributes:
        num_documents: Number of documents of the global batch.
        teams: Teams of R ranks each; rank r of a stage is in team r // R.
        origin: Search or rule that made the schedule, for people.
    """

    num_documents: int
    teams: tuple[Team, ...]
    origin: str = ""

    @property
    def microbatches(self) -> list[PlannedMicrobatch]:
        """Return the microbatches of all teams."""
        return [each for team in self.teams for each in team.microbatches]

    @cached_property
    def digest(self) -> str:
        """Return the digest of the plan's text."""
        return _digest(_body(self))

    @cached_property
    def ranks_per_team(self) -> int:
        """Return the number of ranks of a team in every stage."""
        return len(self.teams[0].microbatches[0].deal.parts)


def to_text(plan: StepPlan) -> str:
    """Write a plan, one line for each microbatch and each rank of it, and schedules as CSV."""
    return f"{_body(plan)}digest {plan.digest}\n"


def _body(plan: StepPlan) -> str:
    lines = [f"step plan 1, {plan.num_documents} documents"]
    for number, team in enumerate(plan.teams):
        lines.append(f"team {number}")
        for index, microbatch in enumerate(team.microbatches):
            documents = " ".join(map(str, microbatch.documents))
            rest = f"padding {microbatch.padding}, heads over {microbatch.heads}"
            lines.append(f"microbatch {index}: documents {documents}, {rest}")
            for rank, part in enumerate(microbatch.deal.parts):
                runs = " ".join(f"{run.start}-{run.stop}" for run in part)
                lines.append(f"rank {rank}: {runs}")
        lines.append("schedule")
        lines += to_csv(team.schedule, as_is=True).rstrip("\n").split("\n")
        lines.append("end")
    return "\n".join(lines) + "\n"


def from_text(text: str) -> StepPlan:
    """Parse the text of `to_text`.

    Raises:
        ConfigError: When a line is not of a plan, with its number; or the text was changed.
    """
    body, _, digest = text.rpartition("digest ")
    if digest.strip() != _digest(body):
        raise ConfigError("step plan: the digest at its end must be that of all lines before it")
    reader = _Reader(body.splitlines())
    try:
        return _plan(reader)
    except ValueError as error:  # of a number, a deal or a schedule
        raise ConfigError(f"step plan, before line {reader.line}: {why_not(error)}") from None


def _plan(reader: "_Reader") -> StepPlan:
    (number,) = reader.take(_HEAD, "the head of a plan")
    teams: list[Team] = []
    while not reader.at_end:
        reader.numbered(_TEAM, "team", len(teams))
        teams.append(_team(reader))
    if not teams:
        raise reader.error("team 0")
    return StepPlan(int(number), tuple(teams))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


class _Reader:
    """Reads lines of a plan one after the other."""

    def __init__(self, lines: list[str]) -> None:
        self._lines, self._at = lines, 0

    @property
    def line(self) -> int:
        """Return the number of the next line, counted from 1."""
        return self._at + 1

    @property
    def at_end(self) -> bool:
        """Tell whether there is no further line."""
        return self._at == len(self._lines)

    def next_is(self, word: str) -> bool:
        """Tell whether the next line begins with a word."""
        return not self.at_end and self._lines[self._at].startswith(word)

    def take(self, pattern: "re.Pattern[str]", what: str) -> tuple[str, ...]:
        """Return the groups of the next line."""
        found = None if self.at_end else pattern.match(self._lines[self._at])
        if found is None:
            raise self.error(what)
        self._at += 1
        return found.groups()

    def numbered(self, pattern: "re.Pattern[str]", word: str, number: int) -> tuple[str, ...]:
        """Return the groups of the next line behind its number, which must be the given one."""
        found, *others = self.take(pattern, f"{word} {number}")
        if int(found) != number:
            raise self.error(f"{word} {number}")
        return tuple(others)

    def until(self, word: str) -> str:
        """Return all lines before a line with a word, and skip that line."""
        lines = list(takewhile(lambda line: line != word, self._lines[self._at :]))
        self._at += len(lines)
        self.take(re.compile(rf"{word}\Z"), word)
        return "\n".join(lines) + "\n"

    def error(self, what: str) -> ConfigError:
        """Return an error about the next line, which is not of the expected kind."""
        found = "the end" if self.at_end else repr(self._lines[self._at][:60])
        return ConfigError(f"step plan, line {self.line}: {found} must be {what}")


def _team(reader: _Reader) -> Team:
    microbatches: list[PlannedMicrobatch] = []
    while reader.next_is("microbatch"):
        documents, padding, heads = reader.numbered(_MICROBATCH, "microbatch", len(microbatches))
        parts: list[tuple[range, ...]] = []
        while reader.next_is("rank"):
            (runs,) = reader.numbered(_RANK, "rank", len(parts))
            parts.append(tuple(map(_run, runs.split())))
        numbers = tuple(map(int, documents.split()))
        deal = Deal(tuple(parts))
        microbatches.append(PlannedMicrobatch(numbers, int(padding), deal, int(heads)))
    reader.take(re.compile(r"schedule\Z"), "schedule")
    return Team(tuple(microbatches), from_csv(reader.until("end")))


def _run(text: str) -> range:
    start, _, stop = text.partition("-")
    return range(int(start), int(stop or start))
