"""Plans made shorter by moving steps within their rows.

Tabu search on the orders of the ranks' steps, as for job shops (Nowicki and Smutnicki 1996; Balas
and Vazacopoulos 1998). A longest path through a plan consists of blocks of steps that follow each
other on a rank; a step of a block is moved before its first or behind its last, changes places with
its neighbour, or with another step that takes as much memory or gives as much back. Steps need not
stand in one order of the microbatches, which `construct` asks for: what must be kept is what each
step waits for, and the memory of a row, which its order alone decides.
"""

from collections.abc import Iterator
from itertools import islice
from math import isinf
from random import Random

from hp_schedule.searching.construct import Plan
from hp_schedule.searching.problem import EPSILON, Problem
from hp_schedule.searching.rows import Move, Rows

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
