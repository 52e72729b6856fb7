"""Listens to a program that knows nothing of it: torch's global hooks, and three calls of torch.

Note [Steps of a job]. A step ends with an update: the next call of a root module with gradients
begins another. A root module is one with parameters that no other module calls. What runs inside a
backward is recomputation, and was recorded before. Steps are counted over all launches of a job,
see Note [Launches of a job].
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from hp_train.base._internals import in_backward
from hp_train.base.lifting import lift
from hp_train.jobs import events as ev
from hp_train.jobs import randomness
from hp_train.jobs.adapters import adapters
from hp_train.jobs.calls import around, is_for_shapes, kwargs_of_call
from hp_train.jobs.disturbing import disturb
from hp_train.jobs.events import Box, Event, Log, Number, Randomness, Rows
from hp_train.jobs.launches import Launches
from hp_train.jobs.names import Renaming, plain
from hp_train.jobs.owners import Owners
from hp_train.jobs.parts import Reference
from hp_train.jobs.request import Request
from hp_train.jobs.rules import read_rules
from hp_train.jobs.samples import Made, Samples, batch_of
from hp_train.jobs.sketch import Digest, digest_of, sum_of_digests
from hp_train.jobs.slices import Run, Slice, all_of
from hp_train.jobs.trees import tensors_in
from hp_train.jobs.weights import keep_weights, read_weights, take_weights


@contextlib.contextmanager
def recording(request: Request) -> Iterator[None]:
    """Record what this process computes inside; nothing else must be recorded in it.

    Args:
        request: What is asked of it.
    """
    recorder = begin(request)
    yield
    recorder.flush()


def begin(request: Request) -> "Recorder":
    """Record this process from now on; what it has recorded is written at its end.

    Args:
        request: What is asked of it.
    """
    randomness.seed(request.seed)
    if request.float64:
        lift()
    if request.disturb:
        disturb(request.disturb)
    kind: type[Recorder] = Recorder
    if request.focus is not None:
        from hp_train.jobs.keeping import Keeper as kind  # noqa: N813, PLC0415 - it is a recorder
    recorder = kind(request)
    recorder.listen()
    return recorder


@dataclass(slots=True)
class Call:
    """A call of a root module that is under way in a thread."""

    root: nn.Module | None = None
    stack: list[nn.Module] = field(default_factory=list)
    phase: str = ev.FORWARD
    index: int = 0
    samples: Samples | None = None
    states: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Own:
    """A rank's gradient of a part of a parameter, before it is reduced: one term a backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: list[Digest] = field(default_factory=list)


@dataclass(slots=True)
class _Tensor:
    """A tensor to be written down when the step ends."""

    step: int
    phase: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    digests: list[Digest]
    call: int = 0
    note: str = ""
    may_add: bool = False


class Recorder:
    """What one process of a job computes.

    Args:
        request: What is asked of it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._step, self._has_updated, self._is_clipped = 1, False, False
        self._calls = threading.local()
        self._lock = threading.RLock()
        self._roots: dict[int, nn.Module] = {}
        self._modules: dict[int, str] = {}
        self._owners: Owners | None = None
        self._libraries: set[str] = set()
        self._own_names: dict[int, str] = {}
        self._terms: set[str] = set()
        self._log: Log | None = None
        self._known = ev.batches(Path(request.reference)) if request.reference else None
        self._tensors: list[_Tensor] = []
        self._numbers: Counter[str] = Counter()
        self._times: Counter[tuple[str, str]] = Counter()
        self._root_calls = 0
        self._made = Made()
        self._seen: dict[int, Counter[str]] | None = None
        self._optimizers: dict[int, int] = {}
        self._heard: dict[int, Tensor] = {}
        self._asked: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._own: dict[tuple[str, Box], _Own] = {}
        self._random, self._drawn = randomness.states(), set[str]()
        self._launches: Launches | None = None
        self._hooks: list[RemovableHandle] = []

    def listen(self) -> None:
        """Register all hooks."""
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_update),
            optimizers.register_optimizer_step_post_hook(self._after_update),
        ]
        around(torch.autograd, "backward", before=lambda loss, *_, **__: self._losses(loss))
        for place in (nn.utils, nn.utils.clip_grad):
            around(place, "clip_grad_norm_", before=self._before_clipping, after=self.clipped)
        around(nn.utils, "clip_grads_with_norm_", before=self._before_scaling)
        atexit.register(self.flush)

    def leave(self) -> Request:
        """Listen no more: something else records this process. Returns what is asked of it."""
        asked, self._request = self._request, replace(self._request, steps=0)
        for hook in self._hooks:
            hook.remove()
        return asked

    # Modules.

    def _call(self) -> Call:
        if not hasattr(self._calls, "call"):
            self._calls.call = Call()
        call: Call = self._calls.call
        return call

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        call = self._call()
        if not call.stack:
            is_root = next(module.parameters(), None) is not None and not is_for_shapes()
            call.root = module if is_root else None
            if is_root:
                self._begin(call, module, args, kwargs_of_call())
        call.stack.append(module)

    def _begin(
        self, call: Call, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a call of a root module, and perhaps a step."""
        call.phase = ev.FORWARD if torch.is_grad_enabled() else ev.EVALUATION
        with self._lock:
            self._launch()
            if self._has_updated and torch.is_grad_enabled():
                self.flush()
                self._step, self._has_updated, self._is_clipped = self._step + 1, False, False
                self._numbers.clear()
                self._times.clear()
                self._root_calls = 0
            call.samples = None
            if not self._is_wanted(call.phase):
                return
            call.states = randomness.states()
            if not self._root_calls:
                self._random = call.states
            if id(root) not in self._roots:
                self._roots[id(root)] = root
                self._learn(root, len(self._roots))
            call.index = self._root_calls
            self._root_calls += 1
        batch = batch_of(args, kwargs)
        if batch is not None:
            place = self._place(call.phase)
            known = None if self._known is None else self._known.get(place, {})
            given = self._made.samples_of(batch)
            seen = None if self._seen is None else self._seen.setdefault(id(root), Counter())
            call.samples = Samples(batch, call.index, known, given=given, seen=seen)
            self._write(call.samples.rows(place, call.phase))

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        call = self._call()
        while call.stack and call.stack.pop() is not module:
            pass
        if call.root is None or not self._is_wanted(call.phase):
            return
        if call.phase == ev.FORWARD:
            self._hear(module)
        if module is call.root:
            self._end(call, output)
        if not self._request.outputs:
            return
        name = self._modules.get(id(module))
        if name is None:
            return
        for path, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.ndim > 0:
                self._output(call, f"{name}{':' if path else ''}{path}", tensor)

    def _end(self, call: Call, output: Any) -> None:
        """End a call of a root module."""
        if call.samples is not None:
            self._made.add(output, call.samples.names)
        if call.phase == ev.FORWARD:
            now = randomness.states()
            self._drawn |= {kind for kind in now if now[kind] != call.states.get(kind)}

    def _output(self, call: Call, name: str, tensor: Tensor) -> None:
        """Note down what a module gives, and later the gradient of it."""
        with self._lock:
            count = self._times[call.phase, f"{call.index} {name}"]
            self._times[call.phase, f"{call.index} {name}"] += 1
        name = f"{name}#{count}" if count else name
        samples, index = call.samples, call.index
        self._sample(call.phase, name, tensor, samples, index)
        if tensor.requires_grad and call.phase == ev.FORWARD:
            tensor.register_hook(lambda grad: self._sample(ev.BACKWARD, name, grad, samples, index))

    def _sample(
        self, phase: str, name: str, tensor: Tensor, samples: Samples | None, index: int
    ) -> None:
        """Note down a tensor that is made of samples."""
        laid = None if samples is None else samples.digest(tensor)
        if laid is None:
            note = (
                "not made of samples, or not told by which dim" if samples else "no batch was seen"
            )
            entry = _Tensor(
                self._place(phase), phase, name, tuple(tensor.shape), tensor.dtype, [], index, note
            )
        else:
            shape, digests = laid
            adds = phase == ev.BACKWARD or name in self._terms
            entry = _Tensor(
                self._place(phase), phase, name, shape, tensor.dtype, digests, index, may_add=adds
            )
        with self._lock:
            self._tensors.append(entry)

    # Parameters.

    def _learn(self, root: nn.Module, number: int) -> None:
        """Learn what a root module's parameters are, and what its modules are called.

        Args:
            root: A module.
            number: Which it is, in the order in which they were called: where names are those of an
                earlier one, it comes into them.
        """
        for library, adapter in adapters().items():
            if library not in self._libraries:
                self._libraries.add(library)
                with contextlib.suppress(AttributeError):  # of another version of the library
                    adapter.listen(self)
        named = {plain(name): p for name, p in root.named_parameters(remove_duplicate=True)}
        taken = {name: parameter for parameter, name in self._own_names.items()}
        inside = ""
        if any(taken.get(name, id(p)) != id(p) for name, p in named.items()):
            inside = f"model{number}."
        self._own_names |= {id(p): f"{inside}{name}" for name, p in named.items()}
        owners = self._all_owners()
        learned = owners.learn(root, named, inside)
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
            self._parameters(phase, ((p, p) for p in learned.tensors))

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
        """Which launch of its job this process is of; steps go on from those before it."""
        if self._launches is None:
            self._launches = Launches(Path(self._request.folder), rank_here())
            self._step += self._launches.steps
        return self._launches

    def _all_owners(self) -> Owners:
        if self._owners is None:
            folder, rules = self._request.reference, self._request.rules
            self._owners = Owners(
                Reference(read_weights(Path(folder))) if folder else None,
                read_rules(Path(rules)) if rules else None,
                rank_here(),
                int(os.environ.get("WORLD_SIZE", "1")),
                self._launch(),
            )
        return self._owners

    def hold(self, tensor: Tensor, runs: list[Run]) -> None:
        """A flat tensor, and what its values are."""
        self._all_owners().hold(tensor, runs)

    def name_of(self, parameter: Tensor) -> str | None:
        """What the model calls a parameter; None: it is of no model that was called."""
        return self._own_names.get(id(parameter))

    def _parameters(self, phase: str, values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Note down what parameters have: parameter, value of its shape and placement."""
        for index, (parameter, value) in enumerate(values):
            if value is None:
                continue
            name, slices = self._all_owners().of(parameter, f"of an optimizer, number {index}")
            local = value.to_local() if isinstance(value, DTensor) else value
            if not slices:
                note = "" if local.numel() == 0 else "not found among the reference's"
                if note:
                    self._tensors.append(
                        _Tensor(
                            self._place(phase),
                            phase,
                            name,
                            tuple(value.shape),
                            value.dtype,
                            [],
                            note=note,
                        )
                    )
                continue
            if isinstance(value, DTensor) and isinstance(parameter, DTensor):
                # A gradient may be whole, or a term of a sum, where a rank has a part of its own.
                local = value.redistribute(placements=parameter.placements).to_local()
            for part in slices:
                self._part(phase, part, local.detach())

    def _part(self, phase: str, part: Slice, local: Tensor) -> None:
        """Note down what a parameter has of the reference's."""
        digest = digest_of(part.of(local), part.box)
        place = self._place(phase)
        entry = _Tensor(place, phase, part.name, part.shape, local.dtype, [digest])
        self._tensors.append(entry)

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
            hook = functools.partial(self._own_gradient, parameter, slices)
            hook.__torch_unserializable__ = True  # type: ignore[attr-defined] # quiet pickles
            parameter.register_hook(hook)

    def _own_gradient(self, parameter: Tensor, slices: list[Slice], grad: Tensor) -> None:
        if not self._is_wanted():
            return
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.shape != held.shape:  # placed otherwise until it is accumulated
            return
        with self._lock:
            for part in slices:
                self._own_term(part, local.detach())

    def _own_term(self, part: Slice, local: Tensor) -> None:
        own = self._own.setdefault((part.name, part.box), _Own(part.shape, local.dtype))
        own.terms.append(digest_of(part.of(local), part.box))

    def _own_tensors(self) -> Iterable[_Tensor]:
        for (name, _), own in self._own.items():
            digest = sum_of_digests(own.terms)
            yield _Tensor(self._step, ev.OWN, name, own.shape, own.dtype, [digest], may_add=True)

    # Losses, norms, updates.

    def _losses(self, losses: Any) -> None:
        if not self._is_wanted() or in_backward():
            return
        for loss in losses if isinstance(losses, tuple | list) else [losses]:
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self._number(ev.LOSS, float(loss.detach()))

    def _before_clipping(self, parameters: Any, *_args: Any, **_kwargs: Any) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.before_clipping((p, p.grad) for p in listed)

    def before_clipping(self, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Parameters or flat tensors with their gradients, which are to be clipped."""
        if self._is_wanted():
            with self._lock:
                self._parameters(ev.GRADIENT, gradients)
                self._is_clipped = True

    def _before_scaling(
        self, parameters: Any, max_norm: Any, total_norm: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        self._before_clipping(parameters, max_norm)
        self.clipped(total_norm)

    def clipped(self, norm: Tensor | float) -> None:
        """The norm by which gradients were clipped."""
        if self._is_wanted():
            full = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self._number(ev.NORM, float(full))

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._seen = {}
        if self._is_wanted() and not _has_closure(args, kwargs):
            with self._lock:
                self._to_be_used(optimizer)

    def _to_be_used(self, optimizer: Optimizer) -> None:
        """Note down what an update is made of."""
        phase = ev.CLIPPED if self._is_clipped else ev.GRADIENT
        self._parameters(phase, ((p, p.grad) for p in _updated(optimizer)))
        if not any("lr" in group for group in optimizer.param_groups):
            return  # a container of optimizers, which come next
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        of = f"optimizer {number} " if number else ""
        for index, group in enumerate(optimizer.param_groups):
            self._write(Number(self._step, ev.RATE, f"{of}group {index}", float(group["lr"])))

    def _after_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._seen = None
        if self._is_wanted():
            with self._lock:
                if _has_closure(args, kwargs):  # which has computed the gradients
                    self._to_be_used(optimizer)
                updated = [p for p in _updated(optimizer) if self._is_updated(optimizer, p)]
                self._parameters(ev.WEIGHT, ((p, p) for p in updated))
                self._states(optimizer)
                self.flush()  # the process may be killed before another step begins
        self._has_updated = True
        if self._launches is not None:
            self._launches.count(self._step)

    def _is_updated(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Whether an update may have changed it; of a model that was never called none does."""
        is_used = parameter.grad is not None or bool(optimizer.state.get(parameter))
        return is_used or bool(self._all_owners().parts(parameter))

    def _states(self, optimizer: Optimizer) -> None:
        for parameter in _updated(optimizer):
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._parameters(f"{ev.MOMENT} {key}", [(parameter, value)])

    # Writing.

    def _place(self, phase: str) -> int:
        """The step that a phase is of: what is evaluated after an update is before the next one."""
        return self._step + (self._has_updated and phase == ev.EVALUATION)

    def _is_wanted(self, phase: str = ev.FORWARD) -> bool:
        return self._step <= self._request.steps and self._place(phase) <= self._request.steps + 1

    def _number(self, phase: str, value: float) -> None:
        with self._lock:
            self._write(Number(self._step, phase, "", value, self._numbers[phase]))
            self._numbers[phase] += 1

    def _write(self, line: Event | Number | Rows | Randomness) -> None:
        if self._log is None:
            self._log = Log(Path(self._request.folder), f"{rank_here():05d}-{os.getpid()}")
            world = os.environ.get("WORLD_SIZE", "1")
            facts = {"rank": str(rank_here()), "ranks": world, "program": " ".join(sys.argv)}
            self._log.add({**facts, "torch": str(torch.__version__)})
        self._log.add(line)

    def flush(self) -> None:
        """Write the step that has ended."""
        with self._lock:
            if self._root_calls and self._step <= self._request.steps:
                self._write(Randomness(self._step, self._random, tuple(sorted(self._drawn))))
            for entry in [*self._tensors, *self._own_tensors()]:
                dtype = str(entry.dtype).removeprefix("torch.")
                pieces = tuple(piece for digest in entry.digests for piece in digest.pieces())
                self._write(
                    Event(
                        entry.step,
                        entry.phase,
                        entry.name,
                        entry.shape,
                        dtype,
                        pieces,
                        entry.call,
                        entry.note,
                        entry.may_add,
                    )
                )
            self._tensors.clear()
            self._own.clear()
            self._drawn.clear()
            if self._log is not None:
                self._log.flush()


def _is_of_columns(part: Slice) -> bool:
    """Whether a part of a matrix has some of its columns: a product with it is a term of a sum."""
    is_cut = len(part.shape) == 2 and part.box[-1] != (0, part.shape[-1])
    return is_cut and part.laid is None


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer was given what computes the loss, and was called before that."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _updated(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def rank_here() -> int:
    """Rank of this process; 0 where there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
