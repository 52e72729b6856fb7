"""Pickles of torch, interpreted as data: nothing is imported, called or executed.

A pickle is a program for a stack machine. This machine knows the instructions of torch's
checkpoints. Instructions that name or call something leave a description of it, a `Named` or a
`Called`; the caller gives the names that are allowed. Nothing here can run code of a pickle.
"""

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from hp_base.folder import DamageError

_MARK = object()
_MAX_MEMO = 1 << 24


@dataclass(frozen=True, slots=True)
class Named:
    """A reference of a pickle by module and name, such as ``torch.float32``."""

    name: str


@dataclass(slots=True, eq=False)
class Called:
    """A call in a pickle, which is not made."""

    name: str
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something outside of the pickle."""

    key: object


def read_pickle(data: bytes, *, allowed: Container[str]) -> object:
    """Interpret a pickle.

    Args:
        data: Bytes of the pickle.
        allowed: Names that it may contain, as ``module.name``.

    Returns:
        Numbers, strings, tuples, lists and dicts as they are; other objects as descriptions.

    Raises:
        DamageError: If it is cut off, contains another name, or has any other instruction.
    """
    machine = _Machine(allowed)
    try:
        for code, arg, _ in pickletools.genops(data):
            if code.name == "STOP":
                [value] = machine.stack
                return value
            machine.run(code.name, arg)
    except DamageError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"is no pickle of torch: {type(error).__name__}: {error}") from None
    raise DamageError("is no pickle of torch: it does not end")


@dataclass
class _Machine:
    allowed: Container[str]
    stack: list[object] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def run(self, name: str, arg: object) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self.stack.append(arg)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _NUM_TUPLE:
            self.stack.append(self._pop(_NUM_TUPLE[name]))
        elif name in _RULES:
            _RULES[name](self, arg)
        elif name not in ("PROTO", "FRAME"):
            raise DamageError(f"pickle instruction {name} is none that torch writes")

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def put(self, index: int | None) -> None:
        key = len(self.memo) if index is None else index
        if not 0 <= key < _MAX_MEMO:
            raise ValueError(f"memo index ({key}) must be below {_MAX_MEMO}")
        self.memo[key] = self.stack[-1]

    def named(self, arg: str | None) -> None:
        module, name = self._pop(2) if arg is None else arg.split(" ", 1)
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise DamageError(f"names {full[:80]!r}, which no checkpoint of tensors needs")
        self.stack.append(Named(full))

    def call(self, _: object) -> None:
        named, args = self._pop(2)
        if not isinstance(named, Named) or not isinstance(args, tuple):
            raise TypeError("what is called must have a name, and its arguments be a tuple")
        self.stack.append(Called(named.name, args))

    def build(self, _: object) -> None:
        called, state = self._pop(2)
        if not isinstance(called, Called):
            raise TypeError("only what was made can be given a state")
        called.state = state
        self.stack.append(called)

    def collect(self) -> list[object]:
        """Pop all values above the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("there is no mark")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("only a list can be appended to")
        target.extend(values)

    def fill(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("only a dict has items")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_as_key(key)] = value

    def _pop(self, count: int) -> tuple[object, ...]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values


def _as_key(key: object) -> str | int | Called:
    """Return a key of a dict; raise TypeError unless it is a string, a number or a `Called`."""
    if not isinstance(key, str | int | Called):
        raise TypeError("a key must be a string, a number or an object")
    return key


_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_NUM_TUPLE = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_RULES: dict[str, Callable[[_Machine, Any], None]] = {
    "MEMOIZE": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.stack.append(Persistent(machine.stack.pop())),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.collect())),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.collect()),
    "SETITEM": lambda machine, _: machine.fill([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.fill(machine.collect()),
}
