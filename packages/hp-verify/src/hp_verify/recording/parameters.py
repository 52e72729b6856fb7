"""The recorder of parameters of one process: their names, values, own gradients and updates."""

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hp_base.dtypes import dtype_name
from hp_base.errors import HpError
from hp_platform import outside_graph
from hp_verify.recording import events as ev
from hp_verify.recording.adapters import Listener, adapters
from hp_verify.recording.calls import apart
from hp_verify.recording.digests import digest_of
from hp_verify.recording.launches import Launches, is_in_group, rank_here, ranks_here
from hp_verify.recording.names import Renaming, plain
from hp_verify.recording.notes import Notes
from hp_verify.recording.owners import Owners
from hp_verify.recording.parts import Reference, keep_weights, read_weights, take_weights
from hp_verify.recording.request import WITHIN, Request
from hp_verify.recording.rules import read_rules
from hp_verify.recording.slices import Run, Slice, all_of, dense, placed, whole
from hp_verify.recording.trees import is_dtensor

_BARE = "parameter "


@dataclass(slots=True)
class Updates:
    """State of the updates of the weights in a process.

    Attributes:
        are_by_hand: Whether the job has no optimizer of torch; None: not known before a backward.
        weights: Parameters that may be updated.
        done: Optimizers that have made an update in this step, and the first parameter of each.
        num_made: Updates by optimizers since a scaler has begun one.
    """

    are_by_hand: bool | None = None
    weights: list[Tensor] = field(default_factory=list)
    done: set[tuple[int, int]] = field(default_factory=set)
    num_made: int = 0
    _then: list[list[float]] | None = None

    def are_made_by_hand(self) -> bool:
        """Tell whether weights have other values than when this was asked last."""
        if not self.are_by_hand:
            return False
        parts = [placed(weight)[0] for weight in self.weights]
        now = [digest_of(part, whole(part.shape)).sums.flatten().tolist() for part in parts]
        before, self._then = self._then, now
        return before is not None and before != now[: len(before)]


class ParameterRecorder(Listener):
    """Learns what parameters are of the reference, and notes down what they have.

    Args:
        request: Request to this process.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._step, self._has_updated, self._is_called = 1, False, False
        self._lock, self._steps = threading.RLock(), request.wanted()
        self._notes = Notes(Path(request.folder), self._steps)
        self._roots: dict[int, nn.Module] = {}
        self._modules: dict[int, str] = {}
        self._owners: Owners | None = None
        self._libraries: set[str] = set()
        self._own_names: dict[int, str] = {}
        self._terms: set[str] = set()
        self._updates = Updates()
        self._heard: dict[int, Tensor] = {}
        self._asked: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._launches: Launches | None = None
        self._is_within = os.environ.get(WITHIN, str(os.getpid())) != str(os.getpid())
        self._had_group = False

    def _tried(
        self, hook: Callable[..., None], *, breaks_graphs: bool = True
    ) -> Callable[..., None]:
        """Have what fails in a hook be told.

        A hook that fails does not end the job: the failure is written down, and listed. A program
        that a recorded process starts, with or without an interpreter of its own, is no rank; the
        list says that it computes something. Tensors without values, and those inside of a
        transform or a trace, are not looked at.

        Args:
            hook: Function that listens.
            breaks_graphs: Whether it is called between graphs where what calls it is compiled; else
                it is not called there.
        """

        @functools.wraps(hook)
        def tried(*args: object, **kwargs: object) -> None:
            if torch.compiler.is_compiling():
                return
            try:
                with apart():
                    hook(*args, **kwargs)
            except HpError:  # a rule that does not fit, say: the job is to end
                raise
            except Exception as error:  # noqa: BLE001 - a stranger's objects may raise anything
                name = f"({hook.__name__.strip('_').replace('_', ' ')})"
                self._not_recorded(ev.FORWARD, name, why(error))

        return outside_graph(tried) if breaks_graphs else tried

    def _not_recorded(
        self, phase: str, name: str, why: str, shape: tuple[int, ...] = (), index: int = 0
    ) -> None:
        """Note down what could not be."""
        with self._lock:
            self._notes.add(ev.Event(self._place(phase), phase, name, shape, "", (), index, why))

    def _place(self, phase: str) -> int:
        """Return the step of a phase; an evaluation after an update belongs to the next step."""
        return self._step + (self._has_updated and phase == ev.EVALUATION)

    def _is_wanted(self, phase: str = ev.FORWARD) -> bool:
        return not self._is_over() and self._steps.has(self._place(phase))

    def _is_over(self) -> bool:
        return self._is_no_rank() or self._steps.are_over(self._step)

    def _is_no_rank(self) -> bool:
        """Say if a process of the job has started this one, and it is in no group of ranks."""
        return self._is_within and is_in_group() == self._had_group

    def _number(self, phase: str, value: float, dtype: torch.dtype = torch.float32) -> None:
        with self._lock:
            self._notes.write(ev.Number(self._step, phase, "", value, dtype_name(dtype)))

    def _meet(self, root: nn.Module, named: Mapping[str, Tensor] | None = None) -> None:
        """Learn what a root module's parameters are, and what its modules are called.

        Names of any but the first have its number in them. What is a part of an earlier one has
        the names that it has there.

        Args:
            root: A module.
            named: Parameters of the module by name; None: its own.
        """
        self._roots[id(root)] = root
        number = len(self._roots)
        for library, adapter in adapters().items():
            if library not in self._libraries:
                self._libraries.add(library)
                with contextlib.suppress(AttributeError):  # of another version of the library
                    adapter.listen(self)
        if named is None:
            own = root.named_parameters(remove_duplicate=True)
            named = {plain(n): p for n, p in own if id(p) not in self._own_names}
        inside = f"model{number}." if number > 1 else ""
        self._own_names |= {id(p): f"{inside}{name}" for name, p in named.items()}
        owners = self._all_owners()
        learned = owners.learn(root, named, inside)
        tensors = [*learned.whole, *learned.flat]
        if self._launch().steps:
            pass  # these are no first weights
        elif not self._request.reference:
            keep_weights(Path(self._request.folder), rank_here(), number, learned.values)
        elif self._request.start:
            take_weights(owners.slices(), read_weights(Path(self._request.reference)))
        for parameter in learned.whole:
            parts = owners.parts(parameter)
            self._listen_to(parameter, parts)
            self._terms.update(p.name.rpartition(".")[0] for p in parts if _is_of_columns(p))
        self._shapes |= {p.name: p.shape for _, parts in owners.slices() for p in parts}
        self._name_modules(root, learned.renaming, inside)
        if not self._launch().steps:
            # Of a model that is first called after an update, an average say, they are made of it.
            is_late = self._has_updated or self._step > 1
            phase = ev.EVALUATION if is_late else ev.START
            self._parameters(phase, ((p, p) for p in tensors))
        self._updates.weights += [p for p in tensors if p.requires_grad]
        owners.forget()

    def _meet_unowned(self, parameters: Sequence[Tensor]) -> None:
        """Learn of parameters that no call of a module has shown."""
        owners = self._all_owners()
        if not self._is_called:
            unknown = [p for p in parameters if id(p) not in self._own_names]
            for model in models_of(unknown) if unknown else ():
                if id(model) not in self._roots:
                    self._meet(model)
        bare, late = {}, None
        for index, p in enumerate(parameters):
            is_used = p.grad is not None or not self._is_called
            if id(p) in self._own_names or not is_used or not p.is_leaf or is_dtensor(p):
                continue
            late = self._names_in_roots() if late is None else late
            _, parts = owners.of(p, "")
            if id(p) in late or not parts or any(_BARE in part.name for part in parts):
                bare[late.get(id(p), f"{_BARE}{index}")] = p
        if bare:
            self._meet(nn.Module(), bare)

    def _names_in_roots(self) -> dict[int, str]:
        """Return the names of the parameters that known models have now, by id."""
        roots = [*self._roots.values()]
        return {id(p): plain(name) for root in roots for name, p in root.named_parameters()}

    def _name_modules(self, root: nn.Module, renaming: Renaming, inside: str) -> None:
        """Note down what the reference calls a model's modules."""
        innermost = {
            f"{inside}{plain(name)}".rstrip("."): module for name, module in root.named_modules()
        }
        for own, module in innermost.items():  # of wrappers and what they wrap, the latter
            name = renaming(own)
            if isinstance(module, nn.Identity) and self._all_owners().has_parameters(name):
                continue  # it stands in for a module of another rank
            self._modules.setdefault(id(module), name)

    def _launch(self) -> Launches:
        """Return which launch of its job this process is of; steps go on from those before it."""
        if self._launches is None:
            os.environ[WITHIN] = str(os.getpid())
            self._launches = Launches(Path(self._request.folder), rank_here())
            self._step += self._launches.steps
        return self._launches

    def _all_owners(self) -> Owners:
        if self._owners is None:
            folder, rules = self._request.reference, self._request.rules
            self._owners = Owners(
                Reference(
                    lambda: read_weights(Path(folder or self._request.folder)),
                    are_given=self._request.start,
                ),
                read_rules(Path(rules)) if rules else None,
                rank_here(),
                ranks_here(),
                self._launch(),
                is_reference=not folder,
            )
        return self._owners

    def hold(self, tensor: Tensor, runs: list[Run]) -> None:
        """Take in a flat tensor and the runs of parameters in it."""
        self._all_owners().hold(tensor, runs)

    def name_of(self, parameter: Tensor) -> str | None:
        """Return what the model calls a parameter; None: it is of no model that was called."""
        return self._own_names.get(id(parameter))

    def _parameters(self, phase: str, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Note down what parameters have: parameter, value of its shape and placement."""
        for index, (parameter, value) in enumerate(values):
            if value is None:
                continue
            name, slices = self._all_owners().of(parameter, f"of an optimizer, number {index}")
            try:
                self._parameter(phase, name, slices, parameter, value)
            except Exception as error:  # noqa: BLE001 - of a kind of tensor that nobody foresaw
                self._not_recorded(phase, name, why(error), tuple(value.shape))

    def _parameter(
        self, phase: str, name: str, slices: Sequence[Slice], parameter: Tensor, value: Tensor
    ) -> None:
        local = value.to_local() if is_dtensor(value) else value
        if not slices:
            if local.numel():
                why = "not found among the reference's"
                self._not_recorded(phase, name, why, tuple(value.shape))
            return
        if is_dtensor(value) and is_dtensor(parameter):
            # A gradient may be whole, or a term of a sum, where a rank has a part of its own.
            local = value.redistribute(placements=parameter.placements).to_local()
        for part in slices:
            self._part(phase, part, dense(local.detach()))

    def _part(self, phase: str, part: Slice, local: Tensor) -> None:
        """Note down what a parameter has of the reference's."""
        dtype, place = dtype_name(local.dtype), self._place(phase)
        event = ev.Event(place, phase, part.name, part.shape, dtype)
        self._notes.add(event, [digest_of(part.of(local), part.box)])

    # Gradients before they are reduced.

    def _hear(self, module: nn.Module) -> None:
        """Have parameters that are in a module while it runs tell what autograd gives them.

        FSDP2 computes with gathered parameters, which are there now: those get the gradients.
        """
        if id(module) in self._asked:
            return
        self._asked.add(id(module))
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in self._heard:
                name = ".".join(filter(None, (self._modules.get(id(module)), own)))
                is_whole = self._shapes.get(name) == tuple(parameter.shape)
                self._listen_to(parameter, all_of(name, parameter) if is_whole else [])

    def _listen_to(self, parameter: Tensor, slices: list[Slice]) -> None:
        """Have a parameter tell what autograd gives it; DDP and others reduce that afterwards."""
        self._heard[id(parameter)] = parameter
        if slices and parameter.requires_grad and parameter.is_leaf:
            hook = functools.partial(self._tried(self._own_gradient), parameter, slices)
            hook.__torch_unserializable__ = True  # type: ignore[attr-defined] # quiet pickles
            parameter.register_hook(hook)

    def _own_gradient(self, parameter: Tensor, slices: list[Slice], grad: Tensor | None) -> None:
        if grad is None or not self._is_wanted():
            return
        local = grad.to_local() if is_dtensor(grad) else grad
        held = parameter.to_local() if is_dtensor(parameter) else parameter
        if local.shape != held.shape:  # placed otherwise until it is accumulated
            return
        with self._lock:
            for part in slices:
                self._own_term(part, dense(local.detach()))

    def _own_term(self, part: Slice, local: Tensor) -> None:
        terms = self._notes.own((part.name, part.box), (part.shape, local.dtype))
        terms.append(digest_of(part.of(local), part.box))


def why(error: Exception) -> str:
    """Say why something could not be recorded."""
    told = (str(error).strip().splitlines() or [""])[0]
    return f"the recorder could not read it: {type(error).__name__}: {told}"[:200]


def _is_of_columns(part: Slice) -> bool:
    """Say if a part of a matrix has some of its columns: a product with it is a term of a sum."""
    is_cut = len(part.shape) == 2 and part.box[-1] != (0, part.shape[-1])
    return is_cut and part.laid is None


def updated(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizers_here() -> list[Optimizer]:
    """Return all optimizers of this process, in the order in which they were made."""
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]


def models_of(parameters: Collection[Tensor]) -> list[nn.Module]:
    """Return the outermost modules that have some of these parameters.

    Args:
        parameters: Parameters, of any models.
    """
    wanted = {id(parameter) for parameter in parameters}
    objects: list[nn.Module] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    holders = [o for o in objects if any(id(p) in wanted for p in o.parameters())]
    inner = {id(m) for holder in holders for m in holder.modules() if m is not holder}
    return [holder for holder in holders if id(holder) not in inner]
