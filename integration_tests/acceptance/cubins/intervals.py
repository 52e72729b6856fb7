"""Where a kernel computes an address in 32 bits, and cannot be shown to stay within them.

A kernel is read as Triton writes it first (TTIR), one operation a line. Every integer gets an
interval: what a constant, the number of a program, an argument or something loaded can be at most,
carried through every operation. What may leave its 32 bits taints all that is made of it, and what
is tainted must be no part of an address, of a mask, or of what a loop counts to. Numbers that are
only stored, such as counts of slots, are for the launchers to bound.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PROGRAMS = {"x": 2**31 - 1, "y": 65_535, "z": 65_535}
"""Programs along each axis of a grid, at most ("Compute Capabilities", CUDA programming guide)."""
ARGUMENTS = {"width": 2**30, "num_blocks": 2**23}
"""What launchers let an argument be at most; any other is whatever 32 bits hold."""
MOST = 2**48
"""What a number of 64 bits is at most, as it counts what is in memory."""
_ADDED = 4096  # numbers that a program adds up in one operation, at most
_TURNS = 64  # of a loop that are gone through one by one; of a longer one nothing is known

_LINE = re.compile(r"^(?:(%[\w.$-]+)(?::\d+)? = )?(.*?)\s*(?:loc\((.*)\))?$")
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_YIELDS = ("scf.yield", "tt.reduce.return", "tt.scan.return")


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        low: What an integer is at least; 0 of what is none.
        high: What it is at most.
        taint: Where it, or what it was made of, may have left its bits.
        says: Of a condition: what is in which bounds where it holds.
    """

    low: int = 0
    high: int = 0
    taint: frozenset[str] = frozenset()
    says: tuple[tuple[str, int, int], ...] = ()

    def joined(self, other: "Value") -> "Value":
        """Return what is one or the other."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Value(low, high, self.taint | other.taint)


@dataclass
class _Block:
    """Operations, each with the blocks that its braces hold."""

    lines: list[tuple[str, list["_Block"]]] = field(default_factory=list)


def overflows(ttir: str) -> list[str]:
    """Return a line for each address of a kernel that 32 bits may not hold.

    Args:
        ttir: A kernel as `compiled.asm["ttir"]` has it.
    """
    reader = _Reader(_places(ttir))
    [(_, [module])] = _parsed(iter(ttir.splitlines()))[0].lines
    for line, [body] in module.lines:
        reader.take(line)
        reader.run(body)
    return sorted(reader.found)


def _parsed(lines: Iterator[str]) -> tuple[_Block, bool]:
    """Operations up to a closing brace, and whether it opens another block."""
    block = _Block()
    for text in map(str.strip, lines):
        if text.startswith("}"):
            return block, text.endswith("{")
        if not text or text.startswith("#loc"):
            continue
        more, inside = re.sub(r" loc\(.*\)$", "", text).endswith(("{", "({")), []
        while more:
            body, more = _parsed(lines)
            inside.append(body)
        block.lines.append((text, inside))
    return block, False


def _places(ttir: str) -> Mapping[str, str]:
    """File and line of each location; of what was inlined, those of the caller."""
    texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def place(name: str) -> str:
        if found := re.match(r'"([^"]*)":(\d+):\d+', texts.get(name, "")):
            return f"{found[1].rpartition('/')[2]}:{found[2]}"
        inner = re.findall(r"#loc\d*", texts.get(name, ""))
        return place(inner[-1]) if inner else ""

    return {name: place(name) for name in texts}


class _Reader:
    """Goes through the operations of a kernel."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.found: set[str] = set()
        self._places, self._values = places, dict[str, Value]()

    def take(self, head: str) -> None:
        """Take the integers among the arguments of a function."""
        for name, bits in re.findall(r"%([\w.$-]+): i(\d+)", head):
            self._values[f"%{name}"] = Value(0, ARGUMENTS.get(name, _top(int(bits)) - 1))

    def run(self, block: _Block) -> list[Value]:
        """Carry out a block, and return what it yields."""
        for text, inside in block.lines:
            matched = _LINE.match(text)
            assert matched is not None
            name, words, place = matched.groups()
            if words.startswith(_YIELDS):
                return self._given(words)
            results = self._results(words, inside, self._places.get(place or "", ""))
            if name is not None:
                self._values |= {f"{name}#{i}": each for i, each in enumerate(results)}
                self._values[name] = results[0]
        return []

    def _given(self, words: str) -> list[Value]:
        return [self._values.get(each, Value()) for each in _NAME.findall(words)]

    def _results(self, words: str, inside: Sequence[_Block], place: str) -> list[Value]:
        op = re.split(r"[ (]", words, maxsplit=1)[0].strip('"')
        if op == "scf.for":
            return self._loop(words, inside[0], place)
        if op == "scf.if":
            condition, sides = self._given(words)[0], [self.run(each) for each in inside]
            joined = [a.joined(b) for a, b in zip(*sides, strict=True)] if sides[-1] else []
            return [each._replace(taint=each.taint | condition.taint) for each in joined]
        given = self._given(words.split(" : ", maxsplit=1)[0])
        if op in ("tt.reduce", "tt.scan"):
            return [_within(_added(given, inside[0]), inside[0].lines[-2][0], place)]
        used = {"tt.addptr": given[1:], "tt.load": given[1:2], "tt.store": given[2:]}.get(op, [])
        self.found |= {f"{why}, used at {place}" for each in used for why in each.taint}
        return [_within(self._computed(op, words, given), words, place)]

    def _loop(self, words: str, body: _Block, place: str) -> list[Value]:
        counter, *names = _NAME.findall(words)
        first, last, step = (self._values[each] for each in names[:3])
        bits = int(words.removesuffix(" {").rpartition("i")[2])
        after_last = Value(0, last.high - 1 + step.high, first.taint | last.taint | step.taint)
        taint = _within(
            after_last, f"{words.split(' iter_args', maxsplit=1)[0]} : i{bits}", place
        ).taint
        self._values[counter] = Value(first.low, max(first.low, last.high - 1), taint)
        carried, state = names[3::2], [self._values.get(each, Value()) for each in names[4::2]]
        turns = -(-(last.high - first.low) // max(step.low, 1))
        for turn in range(_TURNS + 1):
            self._values |= dict(zip(carried, state, strict=True))
            if turn == turns:
                break
            after = [a.joined(b) for a, b in zip(state, self.run(body), strict=True)]
            if turn > turns - 1 or after == state:
                break
            state = after if turns <= _TURNS else list(map(_unknown, state, after))
        return state

    def _computed(self, op: str, words: str, given: Sequence[Value]) -> Value | None:
        """What an operation returns, if its bits hold it; None where that is not known."""
        taint = frozenset[str]().union(*(each.taint for each in given))
        if op in _FIRST:
            return _FIRST[op](words)
        if op == "arith.cmpi":
            return Value(0, 1, taint, _said(words, given))
        if op == "arith.andi" and words.rstrip(">").endswith("i1"):
            return Value(0, 1, taint, given[0].says + given[1].says)
        if op == "arith.select":
            return self._selected(words, given)._replace(taint=taint)
        if op in _KEEP:
            return given[0]
        ends = (
            [_RULES[op](a, b) for a in given[0][:2] for b in given[1][:2]] if op in _RULES else []
        )
        return Value(min(ends), max(ends), taint) if ends else None

    def _selected(self, words: str, given: Sequence[Value]) -> Value:
        condition, one, other = given
        for name, low, high in condition.says:
            if name == _NAME.findall(words)[1]:
                one = one._replace(low=max(one.low, low), high=min(one.high, high))
        return one.joined(other)


def _within(value: Value | None, words: str, place: str) -> Value:
    """What an operation returns in the bits that it has; see the top of this page."""
    typed = re.sub(r" loc\(.*\)$", "", words)
    found = re.search(r"(?:^|x|ptr<)i(\d+)>*$", re.split(r" : | -> | to ", typed)[-1])
    if found is None:
        return Value()
    bits, top = int(found[1]), _top(int(found[1]))
    if value is None:
        return Value(-top, top - 1)
    if bits == 1 or (-top <= value.low and value.high < top):
        return value
    op = words.rpartition(" = ")[2].split(" ")[0]
    where = f"{op} at {place} gives [{value.low}, {value.high}] in {bits} bits"
    return Value(-top, top - 1, value.taint | ({where} if bits < 64 else set()))


def _top(bits: int) -> int:
    return min(1 << (bits - 1), MOST)


def _added(given: Sequence[Value], body: _Block) -> Value | None:
    """Sums of numbers along an axis; the greatest and the least of them are some of them."""
    ops = [line.split(" = ")[1].split(" ")[0] for line, _ in body.lines if " = " in line]
    if len(given) > 1 or ops not in (["arith.addi"], ["arith.maxsi"], ["arith.minsi"]):
        return None
    (value,), times = given, _ADDED if ops == ["arith.addi"] else 1
    return Value(value.low * times, value.high * times, value.taint)


def _said(words: str, given: Sequence[Value]) -> tuple[tuple[str, int, int], ...]:
    name, (_, other) = _NAME.findall(words)[0], given
    bounds = {
        "sge": (other.low, MOST),
        "sgt": (other.low + 1, MOST),
        "sle": (-MOST, other.high),
        "slt": (-MOST, other.high - 1),
    }.get(words.split(" ")[1].removesuffix(","))
    return () if bounds is None else ((name, *bounds),)


def _unknown(before: Value, after: Value) -> Value:
    """What a value is after any number of turns, which one turn has changed."""
    low = before.low if before.low == after.low else -MOST
    return Value(low, before.high if before.high == after.high else MOST, after.taint)


def _constant(words: str) -> Value:
    found = re.search(r"constant (?:dense<)?(-?\d+|true)\b(?!\.)", words)
    number = 0 if found is None else 1 if found[1] == "true" else int(found[1])
    return Value(number, number)


def _range(words: str) -> Value:
    end, start = map(int, re.findall(r"(?:end|start) = (\d+)", words))
    return Value(start, end - 1)


_FIRST: Mapping[str, Callable[[str], Value]] = {
    "arith.constant": _constant,
    "tt.make_range": _range,
    "tt.get_program_id": lambda words: Value(0, PROGRAMS[words.split()[1]] - 1),
    "tt.get_num_programs": lambda words: Value(1, PROGRAMS[words.split()[1]]),
}
_KEEP = (
    "arith.extsi",
    "arith.extui",  # of conditions
    "arith.trunci",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.splat",
)
_RULES: Mapping[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.minsi": min,
    "arith.maxsi": max,
    # Divisors are constants.
    "arith.divsi": lambda a, b: int(a / b) if b else a,
}
