"""The rows of a plan, their times after a step is moved, and plans made shorter by such moves.

Tabu search on the orders of the ranks' steps, as for job shops (Nowicki and Smutnicki 1996; Balas
and Vazacopoulos 1998). A longest path through a plan consists of blocks of steps that follow each
other on a rank; a step of a block is moved before its first or behind its last, changes places with
its neighbour, or with another step that takes as much memory or gives as much back. Steps need not
stand in one order of the microbatches, which `construct` asks for: what must be kept is what each
step waits for, and the memory of a row, which its order alone decides.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from math import inf, isinf
from random import Random
from typing import NamedTuple

from hp_schedule.searching.construct import Plan
from hp_schedule.searching.problem import EPSILON, Problem


class Move(NamedTuple):
    """A step that goes to another place of its row, or changes places with the one there."""

    rank: int
    source: int
    target: int
    swaps: bool = False

    def apply(self, row: list[int]) -> None:
        """Move the step."""
        if self.swaps:
            row[self.source], row[self.target] = row[self.target], row[self.source]
        else:
            row.insert(self.target, row.pop(self.source))

    def undo(self, row: list[int]) -> None:
        """Move it back."""
        if self.swaps:
            self.apply(row)
        else:
            row.insert(self.source, row.pop(self.target))


class Rows:
    """The steps of every rank in their order, and the longest path through them.

    Args:
        problem: Problem of the plan.
        plan: First plan.
        keep_order: Whether no move may let one microbatch overtake another.

    Attributes:
        rows: Steps of every rank in their order.
        place: Place of each step in its row.
        change: What its rank holds more of memory after each step.
        end: When each step ends.
        tail: The time from then to the end of all that must follow it.
        makespan: Time from the first start to the last end; infinite if it cannot be run.
    """

    def __init__(self, problem: Problem, plan: Plan, *, keep_order: bool) -> None:
        self._problem = problem
        self._keep_order = keep_order
        self._duration = problem.duration
        self._before, self._lag, self._after = problem.chains()
        self._limit = problem.memory_limit + EPSILON
        pairs = zip(problem.acquires, problem.releases, strict=True)
        self.change = [taken - given for taken, given in pairs]
        self.rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        for step in plan.order():
            self.rows[problem.rank[step]].append(step)
        self.place = [0] * problem.num_steps
        self._held: list[list[float]] = [[] for _ in self.rows]
        for rank in range(problem.num_ranks):
            self._number(rank)
        self.end: list[float] = []
        self.tail: list[float] = []
        self._order: list[int] = []
        self.makespan = inf
        self._evaluate()

    def plan(self) -> Plan:
        """Return the plan as it is now."""
        starts = [end - time for end, time in zip(self.end, self._duration, strict=True)]
        return Plan(starts, self._order.copy(), self.makespan)

    def fits(self) -> bool:
        """Tell whether every row keeps within the memory."""
        return all(max(held, default=0.0) <= self._limit for held in self._held)

    def make(self, move: Move) -> bool:
        """Make a move; undo it and return False if steps would wait for each other."""
        row = self.rows[move.rank]
        move.apply(row)
        if not self._evaluate():
            move.undo(row)
            return False
        self._number(move.rank)
        return True

    def blocks(self, random: Random) -> list[tuple[int, int, int]]:
        """Return the parts of a longest path that lie on one rank without a gap.

        Returns:
            For each part its rank, and the places of its first and its last step in that row.
        """
        path = self._path(random)
        found = []
        begin = path[0]
        for step, following in pairwise([*path, -1]):
            if following < 0 or not self._follow_in_row(step, following):
                found.append((self._problem.rank[begin], self.place[begin], self.place[step]))
                begin = following
        return found

    def is_possible(self, move: Move) -> bool:
        """Tell whether a move keeps chains, memory and, if asked for, the order of microbatches."""
        row = self.rows[move.rank]
        if move.swaps:
            return self._can_swap(row, move)
        held, step, before = self._held[move.rank], row[move.source], self._before
        more = self.change[step]
        passed = range(move.target, move.source)
        if move.source < move.target:
            passed, more = range(move.source + 1, move.target + 1), -more
        num = self._problem.num_microbatches
        # Where a step goes to the left, it comes before what now gives memory back there.
        ahead = held[move.target - 1] if 0 < move.target < move.source else 0.0
        if ahead + more > self._limit:
            return False
        for index in passed:
            other = row[index]
            if before[other] == step or before[step] == other:
                return False
            if self._keep_order and other // num == step // num:
                return False
            if more > 0 and held[index] + more > self._limit:
                return False
        return True

    def estimate(self, move: Move) -> float:
        """Return about how long the plan is after a move: as if only this row changed."""
        row, low, high = self.rows[move.rank], *sorted((move.source, move.target))
        moved = row[low : high + 1]
        Move(move.rank, move.source - low, move.target - low, move.swaps).apply(moved)
        end, before, lag, duration = self.end, self._before, self._lag, self._duration
        now = end[row[low - 1]] if low else 0.0
        ends: dict[int, float] = {}
        for step in moved:
            source = before[step]
            if source >= 0:
                now = max(now, ends.get(source, end[source]) + lag[step])
            now += duration[step]
            ends[step] = now
        follower = row[high + 1] if high + 1 < len(row) else -1
        rest = duration[follower] + self.tail[follower] if follower >= 0 else 0.0
        longest = 0.0
        for step in reversed(moved):
            rest = self._rest(step, rest)
            longest = max(longest, ends[step] + rest)
            rest += duration[step]
        return longest

    def _can_swap(self, row: list[int], move: Move) -> bool:
        """Tell whether two steps that change the memory alike can change places."""
        before, num = self._before, self._problem.num_microbatches
        step, other = row[move.source], row[move.target]
        for between in row[move.source + 1 : move.target + 1]:
            if before[between] == step or before[other] == between:
                return False
            if self._keep_order and between // num in {step // num, other // num}:
                return between == other and other // num != step // num
        return True

    def _follow_in_row(self, step: int, following: int) -> bool:
        rank = self._problem.rank
        return rank[step] == rank[following] and self.place[following] == self.place[step] + 1

    def _path(self, random: Random) -> list[int]:
        """Return a longest path, in order of time."""
        end, duration, before, lag = self.end, self._duration, self._before, self._lag
        rank_of, makespan = self._problem.rank, self.makespan - EPSILON
        step = random.choice([row[-1] for row in self.rows if row and end[row[-1]] >= makespan])
        path = [step]
        while True:
            start = end[step] - duration[step] - EPSILON
            place, source = self.place[step], before[step]
            ahead = self.rows[rank_of[step]][place - 1] if place else -1
            causes = [ahead] if ahead >= 0 and end[ahead] >= start else []
            if source >= 0 and end[source] + lag[step] >= start:
                causes.append(source)
            if not causes:
                return path[::-1]
            step = causes[0] if len(causes) == 1 else random.choice(causes)
            path.append(step)

    def _number(self, rank: int) -> None:
        """Work out places and memory of a row."""
        now, place, change, held = 0.0, self.place, self.change, []
        for index, step in enumerate(self.rows[rank]):
            place[step] = index
            now += change[step]
            held.append(now)
        self._held[rank] = held

    def _evaluate(self) -> bool:
        """Compute the end of each step and the time after it; False if it cannot be run."""
        order: list[int] = []
        end = [-1.0] * len(self._duration)
        waiting: dict[int, int] = {}
        runnable = list(range(len(self.rows)))
        reached = [0] * len(self.rows)
        while runnable:
            rank = runnable.pop()
            reached[rank] = self._run(
                rank, reached[rank], end, order=order, waiting=waiting, runnable=runnable
            )
        if len(order) != len(end):
            return False
        self.end, self._order, self.makespan = end, order, max(end)
        tail, duration, rank_of = [0.0] * len(end), self._duration, self._problem.rank
        self.tail = tail
        rest = [0.0] * len(self.rows)
        for step in reversed(order):
            rank = rank_of[step]
            tail[step] = longest = self._rest(step, rest[rank])
            rest[rank] = longest + duration[step]
        return True

    def _run(
        self,
        rank: int,
        place: int,
        end: list[float],
        *,
        order: list[int],
        waiting: dict[int, int],
        runnable: list[int],
    ) -> int:
        """Run a row from a place on as far as it goes; return where it stands then.

        Args:
            rank: Rank whose row it is.
            place: Where it stands.
            end: When each step ends, negative for those that have not run.
            order: All steps in the order in which they ran.
            waiting: The ranks that wait, by the step that they wait for.
            runnable: Those that can run.
        """
        row, before, lag, duration = self.rows[rank], self._before, self._lag, self._duration
        now = end[row[place - 1]] if place else 0.0
        for step in row[place:]:
            source = before[step]
            if source >= 0:
                arrival = end[source]
                if arrival < 0:
                    waiting[source] = rank
                    return place
                arrival += lag[step]
                if arrival > now:  # noqa: PLR1730 - the innermost loop
                    now = arrival
            now += duration[step]
            end[step] = now
            order.append(step)
            place += 1
            if step in waiting:
                runnable.append(waiting.pop(step))
        return place

    def _rest(self, step: int, rest: float) -> float:
        """Return the time after the end of a step, given the next step's time in its row."""
        duration, tail = self._duration, self.tail
        for follower, gap in self._after[step]:
            time = gap + duration[follower] + tail[follower]
            if time > rest:  # noqa: PLR1730 - the innermost loop
                rest = time
        return rest


_TENURE = (8, 20)
"""For how many moves a pair of steps keeps the order that a move gave it, at least and at most."""
_LOOKED_AT = 16
"""Moves of one path that are estimated."""
_PARTNERS = 3
"""Steps that one changes places with."""


class Walk:
    """A walk from plan to plan, each one move away from the last.

    Args:
        problem: Problem of the plans.
        plan: Where it starts.
        random: Random numbers.
        keep_order: Whether microbatches must not overtake each other.

    Attributes:
        best: The shortest plan so far.
    """

    def __init__(
        self, problem: Problem, plan: Plan, random: Random, *, keep_order: bool = False
    ) -> None:
        self._rows = Rows(problem, plan, keep_order=keep_order)
        self._random = random
        self._tabu: dict[tuple[int, int], int] = {}
        self._turn = 0
        self.best = plan if isinf(self._rows.makespan) else self._rows.plan()

    def improve(self, num_moves: int) -> bool:
        """Make some moves; return whether the best plan is a shorter one now."""
        if isinf(self._rows.makespan):
            return False  # steps that take no time stand in an order that cannot be run
        shortest = self.best.makespan
        for _ in range(num_moves):
            if not self._step():
                break
        return self.best.makespan < shortest - EPSILON

    def _step(self) -> bool:
        """Make the move that looks best; return whether there was one."""
        self._turn += 1
        rows, random = self._rows, self._random
        found = sorted((rows.estimate(move), random.random(), move) for move in self._moves())
        shortest = self.best.makespan - EPSILON
        free = [entry for entry in found if entry[0] < shortest or not self._is_tabu(entry[2])]
        # Where all are tabu, any one leads on.
        return any(self._make(move) for _, _, move in free or found)

    def _make(self, move: Move) -> bool:
        row = self._rows.rows[move.rank]
        pair = row[move.source], row[move.target]
        if not self._rows.make(move):
            return False
        self._tabu[pair] = self._turn + self._random.randint(*_TENURE)
        if self._rows.makespan < self.best.makespan - EPSILON:
            self.best = self._rows.plan()
        return True

    def _is_tabu(self, move: Move) -> bool:
        """Tell whether a move takes a step back past one that it was moved past not long ago."""
        row = self._rows.rows[move.rank]
        step, other = row[move.source], row[move.target]
        return max(self._tabu.get(pair, 0) for pair in ((step, other), (other, step))) >= self._turn

    def _moves(self) -> list[Move]:
        """Return moves along a longest path, of a long one some at random."""
        blocks = self._rows.blocks(self._random)
        self._random.shuffle(blocks)
        wanted: dict[Move, None] = {}
        for block in blocks:
            wanted |= dict.fromkeys(self._of_block(*block))
            if len(wanted) > 2 * _LOOKED_AT:
                break
        moves = list(wanted)
        self._random.shuffle(moves)
        return list(islice(filter(self._rows.is_possible, moves), _LOOKED_AT))

    def _of_block(self, rank: int, first: int, last: int) -> Iterator[Move]:
        for place in range(first, last):
            yield Move(rank, place, place + 1)
            yield Move(rank, place, last)
            yield Move(rank, place + 1, first)
        row, change = self._rows.rows[rank], self._rows.change
        for place in range(first, last + 1):
            size = change[row[place]]
            if size:
                earlier = (at for at in range(place - 1, -1, -1) if change[row[at]] == size)
                for at in islice(earlier, _PARTNERS):
                    yield Move(rank, at, place, swaps=True)
