"""Listens to a program that knows nothing of it: torch's global hooks, and some calls of torch.

Note [Steps of a job]. A step ends with an update, or where a scaler of losses has left it out: the
next call of a root module with gradients begins another. A root module is one with parameters that
no other module calls. What runs inside a backward is recomputation, and was recorded before. Where
no module is called, in a compiled function say, a step begins with a backward, or with the second
update by the same optimizer. Steps are counted over all launches of a job, see Note [Launches of a
job].

Note [What a recorder must not do]. What fails in it does not end the job: it is written down, and
listed. A process that is forked begins to write anew, one that loads data writes nothing. Tensors
without values, and those inside of a transform or a trace, are not looked at.
"""

import atexit
import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import get_worker_info
from torch.utils.hooks import RemovableHandle

from hp_train.base.lifting import lift
from hp_train.errors import HpError
from hp_train.jobs import events as ev
from hp_train.jobs import randomness, strays
from hp_train.jobs.adapters import adapters
from hp_train.jobs.calls import (
    apart,
    around,
    has_values,
    is_checkpointed,
    is_for_shapes,
    is_unseen,
    kwargs_of_call,
)
from hp_train.jobs.disturbing import disturb
from hp_train.jobs.dtensors import is_dtensor
from hp_train.jobs.events import Number, Randomness
from hp_train.jobs.launches import Launches
from hp_train.jobs.names import Renaming, plain
from hp_train.jobs.notes import Noted, Notes
from hp_train.jobs.owners import Owners
from hp_train.jobs.parts import Reference
from hp_train.jobs.ranks import rank_here, ranks_here
from hp_train.jobs.request import Request
from hp_train.jobs.rules import read_rules
from hp_train.jobs.samples import Made, Samples, batch_of
from hp_train.jobs.sketch import digest_of
from hp_train.jobs.slices import Run, Slice, all_of, dense
from hp_train.jobs.trees import tensors_in
from hp_train.jobs.updates import Updates, updated
from hp_train.jobs.weights import keep_weights, read_weights, take_weights

_OF_NO_SAMPLES = "not made of samples, or not told by which dim"


@contextlib.contextmanager
def recording(request: Request) -> Iterator[None]:
    """Record what this process computes inside; nothing else must be recorded in it.

    Args:
        request: What is asked of it.
    """
    recorder = begin(request)
    yield
    recorder.close()


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
        self._notes = Notes(Path(request.folder))
        self._known = ev.batches(Path(request.reference)) if request.reference else None
        self._times: Counter[tuple[str, str]] = Counter()
        self._root_calls, self._is_called = 0, False
        self._made = Made()
        self._seen: dict[int, Counter[str]] | None = None
        self._optimizers: dict[int, int] = {}
        self._updates = Updates()
        self._heard: dict[int, Tensor] = {}
        self._asked: set[int] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._random, self._drawn = randomness.states(), set[str]()
        self._launches: Launches | None = None
        self._hooks: list[RemovableHandle] = []

    def listen(self) -> None:
        """Register all hooks."""
        tried = self._tried
        self._hooks = [
            modules.register_module_forward_pre_hook(tried(self._enter)),
            modules.register_module_forward_hook(tried(self._leave), always_call=True),
            optimizers.register_optimizer_step_pre_hook(tried(self._before_update)),
            optimizers.register_optimizer_step_post_hook(tried(self._after_update)),
        ]
        around(torch.autograd, "backward", before=tried(self._losses))
        for place in (nn.utils, nn.utils.clip_grad):
            before = tried(self._before_clipping)
            around(place, "clip_grad_norm_", before=before, after=tried(self.clipped))
        around(nn.utils, "clip_grads_with_norm_", before=tried(self._before_scaling))
        before, after = tried(self._before_attempt), tried(self._after_attempt)
        around(torch.amp.GradScaler, "step", before=before, after=after)
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self.close)

    def _tried(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Have what fails in a hook be told, see Note [What a recorder must not do]."""

        @functools.wraps(hook)
        def tried(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            try:
                with apart():
                    hook(*args, **kwargs)
            except HpError:  # a rule that does not fit, say: the job is to end
                raise
            except Exception as error:  # noqa: BLE001 - a stranger's objects may raise anything
                name = f"({hook.__name__.strip('_').replace('_', ' ')})"
                self._not_recorded(ev.FORWARD, name, _why(error))

        return tried

    def _not_recorded(
        self, phase: str, name: str, why: str, shape: tuple[int, ...] = (), index: int = 0
    ) -> None:
        """Note down what could not be."""
        with self._lock:
            self._notes.add(Noted(self._place(phase), phase, name, shape, None, [], index, why))

    def leave(self) -> Request:
        """Listen no more: something else records this process. Returns what is asked of it."""
        asked, self._request = self._request, replace(self._request, steps=0)
        for hook in self._hooks:
            hook.remove()
        return asked

    def _in_child(self) -> None:
        """Begin anew in a process that was forked: what is noted down is its parent's."""
        self._lock = threading.RLock()
        self._notes = Notes(Path(self._request.folder))

    # Modules.

    def _call(self) -> Call:
        if not hasattr(self._calls, "call"):
            self._calls.call = Call()
        call: Call = self._calls.call
        return call

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_unseen():
            return
        call = self._call()
        call.stack.append(module)
        if len(call.stack) == 1:
            is_root = next(module.parameters(), None) is not None and not is_for_shapes()
            kwargs = kwargs_of_call() if is_root else {}
            parameters = () if id(module) in self._roots else (*module.parameters(),)
            is_root = is_root and has_values((*parameters, args, kwargs))
            call.root = module if is_root and get_worker_info() is None else None
            if call.root is not None:
                self._begin(call, module, args, kwargs)

    def _begin(
        self, call: Call, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a call of a root module, and perhaps a step."""
        is_trained = torch.is_grad_enabled() or is_checkpointed()
        call.phase = ev.FORWARD if is_trained else ev.EVALUATION
        call.samples = None
        with self._lock:
            self._launch()
            if is_trained:
                self._is_called = True
                self._look_for_update()
            if self._has_updated and is_trained:
                self._next_step()
            if not self._is_wanted(call.phase):
                return
            call.states = randomness.states()
            if not self._root_calls:
                self._random = call.states
            call.index = self._root_calls
            self._root_calls += 1
            if id(root) not in self._roots and not any(map(is_lazy, root.parameters())):
                self._meet(root)
        batch = batch_of(args, kwargs)
        if batch is not None:
            place = self._place(call.phase)
            known = None if self._known is None else self._known.get(place, {})
            given = self._made.samples_of(batch)
            seen = None if self._seen is None else self._seen.setdefault(id(root), Counter())
            call.samples = Samples(batch, call.index, known, given=given, seen=seen)
            self._notes.write(call.samples.rows(place, call.phase))

    def _next_step(self) -> None:
        self.flush()
        self._step, self._has_updated, self._is_clipped = self._step + 1, False, False
        self._notes.begin_step()
        self._times.clear()
        self._updates.done.clear()
        self._root_calls = 0

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if is_unseen():
            return
        call = self._call()
        while call.stack and call.stack.pop() is not module:
            pass
        if call.root is None or not self._is_wanted(call.phase):
            return
        if module is call.root and id(module) not in self._roots:  # its first call has made it
            self._meet(module)
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
        if tensor.is_nested:
            self._not_recorded(phase, name, "rows have lengths of their own", index=index)
            return
        shape, place = tuple(tensor.shape), self._place(phase)
        try:
            laid = None if samples is None else samples.digest(tensor)
            note = _OF_NO_SAMPLES if samples else "no batch was seen"
        except Exception as error:  # noqa: BLE001 - of a kind of tensor that nobody foresaw
            laid, note = None, _why(error)
        if laid is None:
            self._not_recorded(phase, name, note, shape, index)
            return
        shape, digests = laid
        adds = phase == ev.BACKWARD or name in self._terms
        entry = Noted(place, phase, name, shape, tensor.dtype, digests, index, may_add=adds)
        with self._lock:
            self._notes.add(entry)

    # Parameters.

    def _meet(self, root: nn.Module, named: Mapping[str, Tensor] | None = None) -> None:
        """Learn what a root module's parameters are, and what its modules are called.

        Names of any but the first have its number in them. What is a part of an earlier one has
        the names that it has there.

        Args:
            root: A module.
            named: Its parameters; None: as it has them.
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
        self._updates.weights += [p for p in learned.tensors if p.requires_grad]

    def _meet_strays(self, parameters: Sequence[Tensor]) -> None:
        """Learn of parameters that no call of a module has shown."""
        owners = self._all_owners()
        if not self._is_called:
            unknown = [p for p in parameters if id(p) not in self._own_names]
            for model in strays.models_of(unknown) if unknown else ():
                if id(model) not in self._roots:
                    self._meet(model)
        bare = {
            f"parameter {index}": p
            for index, p in enumerate(parameters)
            if p.is_leaf and p.requires_grad and not is_dtensor(p) and not owners.of(p, "")[1]
        }
        if bare:
            self._meet(nn.Module(), bare)

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
                Reference(lambda: read_weights(Path(folder or self._request.folder))),
                read_rules(Path(rules)) if rules else None,
                rank_here(),
                ranks_here(),
                self._launch(),
                is_reference=not folder,
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
            try:
                self._parameter(phase, name, slices, parameter, value)
            except Exception as error:  # noqa: BLE001 - of a kind of tensor that nobody foresaw
                self._not_recorded(phase, name, _why(error), tuple(value.shape))

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
        digest = digest_of(part.of(local), part.box)
        place = self._place(phase)
        self._notes.add(Noted(place, phase, part.name, part.shape, local.dtype, [digest]))

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

    def _own_gradient(self, parameter: Tensor, slices: list[Slice], grad: Tensor) -> None:
        if not self._is_wanted():
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

    # Losses, norms, updates.

    def _losses(self, losses: Any, *_args: Any, **_kwargs: Any) -> None:
        if is_unseen() or not has_values(losses):
            return
        with self._lock:
            self._before_backward()
        if not self._is_wanted():
            return
        for loss in losses if isinstance(losses, tuple | list) else [losses]:
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self._number(ev.LOSS, float(loss.detach()), loss.dtype)

    def _before_backward(self) -> None:
        """See whether the job updates by hand, and begin a step where no module's call does."""
        if self._updates.are_by_hand is None:
            some = strays.optimizers_here()
            self._updates.are_by_hand = not some
            self._updates.are_made_by_hand()  # from now on
            if some and not self._is_called:
                self._launch()
                for optimizer in some:
                    self._meet_strays(updated(optimizer))
        if not self._is_called:
            self._look_for_update()
            if self._has_updated:
                self._next_step()

    def _look_for_update(self) -> None:
        """Note down weights that no optimizer has updated, if they are others."""
        if not self._is_wanted() or not self._updates.are_made_by_hand():
            return
        self._not_recorded(ev.GRADIENT, "", "no optimizer of torch updates weights")
        self._parameters(ev.WEIGHT, ((p, p) for p in self._updates.weights))
        self._end_of_update()

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
            full = norm.full_tensor() if is_dtensor(norm) else norm
            self._number(ev.NORM, float(full))

    def _before_attempt(self, *_args: Any, **_kwargs: Any) -> None:
        self._updates.num_made = 0

    def _after_attempt(self, _result: Any) -> None:
        """End the step where a scaler has left an update out."""
        if not self._updates.num_made:
            with self._lock:
                self._end_of_update()

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._seen = {}
        self._updates.are_by_hand = False
        self._updates.num_made += 1
        with self._lock:
            if not self._is_called:
                self._launch()
                if id(optimizer) in self._updates.done:
                    self._next_step()
                self._updates.done.add(id(optimizer))
            if self._is_wanted() and not _has_closure(args, kwargs):
                self._to_be_used(optimizer)

    def _to_be_used(self, optimizer: Optimizer) -> None:
        """Note down what an update is made of."""
        phase = ev.CLIPPED if self._is_clipped else ev.GRADIENT
        if any("lr" in group for group in optimizer.param_groups):
            self._meet_strays(updated(optimizer))
        self._parameters(phase, ((p, p.grad) for p in updated(optimizer)))
        if not any("lr" in group for group in optimizer.param_groups):
            return  # a container of optimizers, which come next
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        of = f"optimizer {number} " if number else ""
        for index, group in enumerate(optimizer.param_groups):
            rate = Number(self._step, ev.RATE, f"{of}group {index}", float(group["lr"]))
            self._notes.write(rate)

    def _after_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._seen = None
        with self._lock:
            try:
                if self._is_wanted():
                    if _has_closure(args, kwargs):  # which has computed the gradients
                        self._to_be_used(optimizer)
                    some = [p for p in updated(optimizer) if self._is_updated(optimizer, p)]
                    self._parameters(ev.WEIGHT, ((p, p) for p in some))
                    self._states(optimizer)
            finally:
                self._end_of_update()

    def _end_of_update(self) -> None:
        """Write what there is: the process may be killed before another step begins."""
        if self._is_wanted():
            self.flush()
        self._has_updated = True
        if self._launches is not None:
            self._launches.count(self._step)
        if self._owners is not None:
            self._owners.forget()

    def _is_updated(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Whether an update may have changed it; of a model that was never called none does."""
        is_used = parameter.grad is not None or bool(optimizer.state.get(parameter))
        return is_used or bool(self._all_owners().parts(parameter))

    def _states(self, optimizer: Optimizer) -> None:
        for parameter in updated(optimizer):
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

    def _number(self, phase: str, value: float, dtype: torch.dtype = torch.float32) -> None:
        with self._lock:
            self._notes.number(self._step, phase, value, dtype)

    def flush(self) -> None:
        """Write the step that has ended."""
        with self._lock:
            if self._root_calls and self._step <= self._request.steps:
                drawn = tuple(sorted(self._drawn))
                self._notes.write(Randomness(self._step, self._random, drawn))
            self._notes.flush(self._step)
            self._drawn.clear()

    def close(self) -> None:
        """Write what is left at the end of the process."""
        with self._lock:
            self._tried(self._look_for_update)()
            self.flush()


def _why(error: Exception) -> str:
    """Why something could not be recorded."""
    told = (str(error).strip().splitlines() or [""])[0]
    return f"the recorder could not read it: {type(error).__name__}: {told}"[:200]


def _is_of_columns(part: Slice) -> bool:
    """Whether a part of a matrix has some of its columns: a product with it is a term of a sum."""
    is_cut = len(part.shape) == 2 and part.box[-1] != (0, part.shape[-1])
    return is_cut and part.laid is None


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer was given what computes the loss, and was called before that."""
    return any(map(callable, (*args[1:], *kwargs.values())))
