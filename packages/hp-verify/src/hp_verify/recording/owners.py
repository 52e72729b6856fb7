"""Owners of values: parameters of models, and tensors that optimizers hold in their places.

An optimizer may update a view of a parameter, a copy in float32, or a part of many that lie end to
end. Which, is asked of the library's adapter, then of memory (a view of what is known), then of
values (found in the reference's first weights).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hp_base.errors import ConfigError
from hp_verify.recording.adapters import Held, adapters
from hp_verify.recording.launches import Launches
from hp_verify.recording.names import Renaming
from hp_verify.recording.parts import Reference
from hp_verify.recording.rules import Rule, Rules
from hp_verify.recording.slices import Flat, Run, Slice, all_of, composed, placed, sizes_of, whole
from hp_verify.recording.trees import is_dtensor


@dataclass(frozen=True, slots=True)
class Learned:
    """Facts about the parameters of a model.

    Attributes:
        values: Local parameters of the model, by the names that the model gave them.
        renaming: Translation of the model's names of modules into the reference's.
        whole: Parameters that are tensors of their own here.
        flat: Flat tensors with the values of other parameters.
    """

    values: Mapping[str, Tensor | Flat]
    renaming: Renaming
    whole: list[Tensor]
    flat: list[Tensor]


class Owners:
    """Maps every tensor of a job to parts of the reference's parameters.

    Args:
        reference: First weights of the reference; of this job where it is the reference.
        rules: Declared places of parameters.
        rank: Rank of this process.
        ranks: Number of ranks.
        launches: Findings of earlier launches of the job; None: it has one launch.
        is_reference: Whether this job is the reference, whose names and places count.
    """

    def __init__(
        self,
        reference: Reference,
        rules: Rules | None = None,
        rank: int = 0,
        ranks: int = 1,
        launches: Launches | None = None,
        *,
        is_reference: bool = False,
    ) -> None:
        self._reference, self._rules = reference, rules or Rules()
        self._is_reference = is_reference
        self._rank, self._ranks, self._launches = rank, ranks, launches
        self._slices: dict[int, list[Slice]] = {}
        self._names: dict[int, str] = {}
        self._runs: dict[int, Held] = {}
        self._real: dict[str, tuple[list[Slice], Tensor]] = {}
        self._flat: dict[str, tuple[list[Slice], Run]] = {}

    def learn(self, root: nn.Module, named: Mapping[str, Tensor], inside: str = "") -> "Learned":
        """Learn what a model's parameters are.

        Args:
            root: The model.
            named: Parameters of the model, by the names that the model gave them.
            inside: Prefix of these names where several models have the same.
        """
        for adapter in adapters().values():
            with contextlib.suppress(AttributeError):  # of another version of the library
                for tensor, runs in adapter.held(root, named):
                    self.hold(tensor, [replace(r, name=f"{inside}{r.name}") for r in runs])
        named = {f"{inside}{name}": parameter for name, parameter in named.items()}
        held = {key for key, (_, runs) in self._runs.items() if runs}
        real = {n: p for n, p in named.items() if id(p) not in held and p.numel()}
        flats: dict[str, tuple[Flat, Run, Tensor]] = {}
        for tensor, runs in self._runs.values():
            for run in runs:
                if run.name not in real.keys() | self._real.keys() | self._flat.keys():
                    values = tensor.detach().reshape(-1)[run.at : run.at + run.size]
                    flats.setdefault(run.name, (Flat(values, run.shape, run.first), run, tensor))
        there: dict[str, Tensor | Flat] = {**real, **{n: flat for n, (flat, *_) in flats.items()}}
        found, renaming = self._recalled(there)
        for name, parameter in real.items():
            parts = self._slices[id(parameter)] = found.get(name, [])
            self._names[id(parameter)] = parts[0].name if len(parts) == 1 else renaming(name)
            self._real[name] = parts, parameter
            if not is_dtensor(parameter):
                own = Run(name, tuple(parameter.shape), 0, parameter.numel(), 0)
                self._runs[id(parameter)] = parameter, [own]
        for name, (_, run, _) in flats.items():
            self._flat[name] = found.get(name, []), run
        for tensor, runs in self._runs.values():
            self._slices.setdefault(id(tensor), self._of_runs(runs))
        stand_ins = {id(tensor): tensor for *_, tensor in flats.values()}
        return Learned(there, renaming, list(real.values()), list(stand_ins.values()))

    def has_parameters(self, module: str) -> bool:
        """Tell whether a module of the reference has parameters.

        Args:
            module: Name of the module in the reference.
        """
        weights = () if self._is_reference else self._reference.weights
        return any(name.startswith(f"{module}.") for name in weights)

    def hold(self, tensor: Tensor, runs: list[Run]) -> None:
        """Take in a flat tensor and the runs of parameters in it."""
        if id(tensor) not in self._runs:
            self._runs[id(tensor)] = tensor, runs

    def forget(self) -> None:
        """Free what was read of the reference, until something is to be found again."""
        self._reference.forget()

    def parts(self, tensor: Tensor) -> list[Slice]:
        """Return what a tensor that is known is of the reference."""
        return self._slices.get(id(tensor), [])

    def of(self, tensor: Tensor, what: str) -> tuple[str, list[Slice]]:
        """Return a tensor's name in the reference, and its slices of the reference.

        Args:
            tensor: A parameter, or what an optimizer has in place of some.
            what: Name for an unknown tensor.
        """
        key = id(tensor)
        if key not in self._names:
            is_plain = tensor.is_floating_point() and not is_dtensor(tensor)
            known = self._by_memory(tensor) if is_plain else ()
            runs = self._runs[key][1] if key in self._runs else list(known)
            self._runs[key] = tensor, runs  # kept, so that no other gets its id
            slices = self._of_runs(runs)
            if is_plain and not slices:
                slices = self._reference.runs(tensor.detach().reshape(-1))
            self._names[key] = runs[0].name if runs else what
            self._slices[key] = slices
        return self._names[key], self._slices[key]

    def slices(self) -> Iterator[tuple[Tensor, list[Slice]]]:
        """Yield all known tensors, with their slices of the reference."""
        tensors = [tensor for tensor, _ in self._runs.values()]
        tensors += [tensor for _, tensor in self._real.values() if is_dtensor(tensor)]
        for tensor in tensors:
            yield tensor, self._slices[id(tensor)]

    def _recalled(
        self, parameters: Mapping[str, Tensor | Flat]
    ) -> tuple[dict[str, list[Slice]], Renaming]:
        """Return what an earlier launch has found of parameters, or what is found now."""
        if self._launches is None:
            return self._find(parameters)
        known = self._launches.recall(parameters)
        if known is not None:
            pairs = ((name, parts[0].name) for name, parts in known.items() if parts)
            return known, Renaming(pairs)
        found, renaming = self._find(parameters)
        self._launches.remember({name: found.get(name, []) for name in parameters})
        return found, renaming

    def _find(
        self, parameters: Mapping[str, Tensor | Flat]
    ) -> tuple[dict[str, list[Slice]], Renaming]:
        if not self._is_reference:
            declared = {}
            for name, parameter in parameters.items():
                if isinstance(parameter, Tensor) and (rule := self._rules.of(name)):
                    declared[name] = [self._declared(name, parameter, *rule)]
            others = {n: p for n, p in parameters.items() if n not in declared}
            return self._reference.find(others, declared)
        return {name: all_of(name, p) for name, p in parameters.items()}, Renaming(())

    def _declared(self, name: str, parameter: Tensor, other: str, rule: Rule) -> Slice:
        """Return what a rule says that a parameter is."""
        weight = self._reference.weights.get(other)
        if weight is None:
            raise ConfigError(f"rule {rule.name}: the reference has no parameter {other}")
        local, _, _ = placed(parameter)
        box = self._rules.box(rule, tuple(weight.shape), self._rank, self._ranks)
        if sizes_of(box) != tuple(local.shape):
            raise ConfigError(
                f"rule {rule.name}: rank {self._rank} has {name} of shape {tuple(local.shape)}, "
                f"and {sizes_of(box)} of {other} would be its part"
            )
        return Slice(other, tuple(weight.shape), whole(local.shape), box)

    def _of_runs(self, runs: Iterable[Run]) -> list[Slice]:
        """Return the reference's slices of runs, as far as their parameters are known here."""
        slices: list[Slice] = []
        for run in runs:
            if run.name in self._real:
                parts, parameter = self._real[run.name]
                if tuple(parameter.shape) == run.shape:
                    slices += composed(parts, run)
            elif run.name in self._flat:
                parts, held = self._flat[run.name]
                if (held.first, held.size) == (run.first, run.size):
                    slices += [part.moved(run.at) for part in parts]
        return slices

    def _by_memory(self, tensor: Tensor) -> Iterator[Run]:
        """Yield runs of what is known that are, in memory, values of a tensor."""
        begin, size = int(tensor.storage_offset()), tensor.numel()
        if not size or not tensor.is_contiguous():
            return
        place = tensor.untyped_storage().data_ptr()
        for other, runs in list(self._runs.values()):
            if other.dtype != tensor.dtype or not other.is_contiguous() or not other.numel():
                continue
            if other.untyped_storage().data_ptr() != place:
                continue
            for run in runs:
                start = int(other.storage_offset()) + run.at
                first, last = max(start, begin), min(start + run.size, begin + size)
                if last > first:
                    skipped = first - start
                    yield Run(run.name, run.shape, run.first + skipped, last - first, first - begin)
