"""Listens to a program that knows nothing of it: torch's global hooks, and some calls of torch.

A step ends with an update, or where a scaler of losses has left it out: the next call of a root
module with gradients begins another; where none is seen, in a compiled function say, the next
backward does, or another update of the same parameters by the same optimizer. A root module is one
with parameters that no other module calls. What runs inside a backward is recomputation, and was
recorded before. Steps are counted over all launches of a job, see `hp_verify.recording.launches`.
Of what is compiled, updates, backwards and clipping are looked at between graphs, which they break;
calls of modules are not.
"""

import array
import atexit
import hashlib
import os
import random
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
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from hp_base.dtypes import dtype_name
from hp_verify.recording import events as ev
from hp_verify.recording.calls import (
    around,
    has_values,
    is_checkpointed,
    is_for_shapes,
    is_unseen,
    kwargs_of_call,
    may_break_graphs,
)
from hp_verify.recording.digests import digest_of
from hp_verify.recording.launches import is_in_group
from hp_verify.recording.notes import Notes
from hp_verify.recording.parameters import ParameterRecorder, optimizers_here, updated, why
from hp_verify.recording.request import Request
from hp_verify.recording.samples import Made, Samples, batch_of, choices_in
from hp_verify.recording.slices import dense, whole
from hp_verify.recording.trees import is_compared, is_dtensor, tensors_in

TORCH, NUMPY, PYTHON, CUDA = "torch", "numpy", "python", "cuda"
_OF_NO_SAMPLES = "not made of samples, or not told by which dim"


@dataclass
class Call(threading.local):
    """The call of a root module that is under way, of each thread its own."""

    root: nn.Module | None = None
    stack: list[nn.Module] = field(default_factory=list)
    phase: str = ev.FORWARD
    index: int = 0
    samples: Samples | None = None
    states: dict[str, str] = field(default_factory=dict)
    torch: bytes = b""


class Recorder(ParameterRecorder):
    """Records the computation of one process of a job.

    Args:
        request: Request to the process.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._clipped: dict[int, int] = {}  # parameter -> calls of models before it was
        self._call = Call()
        self._known = ev.batches(Path(request.reference)) if request.reference else None
        self._times: Counter[tuple[str, str]] = Counter()
        self._root_calls = 0
        self._made = Made()
        self._seen: dict[int, Counter[str]] | None = None
        self._optimizers: dict[int, int] = {}
        self._random, self._drawn, self._drawing = random_states(), set[str](), ""
        self._hooks: list[RemovableHandle] = []
        self._is_left_out = False

    def listen(self) -> None:
        """Register all hooks."""
        tried = self._tried
        self._hooks = [
            modules.register_module_forward_pre_hook(tried(self._enter, breaks_graphs=False)),
            modules.register_module_forward_hook(
                tried(self._leave, breaks_graphs=False), always_call=True
            ),
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
        may_break_graphs()
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self.close)

    def leave(self) -> Request:
        """Listen no more: something else records this process. Returns what is asked of it."""
        self._steps.stop()
        for hook in self._hooks:
            hook.remove()
        return self._request

    def _in_child(self) -> None:
        """Begin anew in a process that was forked: what is noted down is its parent's."""
        self._lock = threading.RLock()
        self._notes = Notes(Path(self._request.folder), self._steps)
        self._is_within, self._had_group = self._launches is not None, is_in_group()

    # Modules.

    def _enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if is_unseen():
            return
        call = self._call
        call.stack.append(module)
        if len(call.stack) == 1:
            is_root = next(module.parameters(), None) is not None and not is_for_shapes()
            kwargs = kwargs_of_call() if is_root else {}
            parameters = () if id(module) in self._roots else (*module.parameters(),)
            is_root = is_root and has_values((*parameters, args, kwargs))
            if is_root and self._is_no_rank():
                self._leave_out()
                is_root = False
            call.root = module if is_root else None
            if call.root is not None:
                self._begin(call, module, args, kwargs)

    def _leave_out(self) -> None:
        """Say that a process which one of the job has started computes something."""
        if not self._is_left_out:
            self._is_left_out = True
            name = f"({Path(sys.argv[0]).name or 'a process'}, started by the job)"
            why = "no rank, and not compared"
            self._notes.add(ev.Event(1, ev.EVALUATION, name, (), "", note=why))
            self._notes.flush(1)

    def _begin(
        self, call: Call, root: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
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
            is_known = id(root) in self._roots or any(map(is_lazy, root.parameters()))
            if not is_known and not self._is_over():
                self._meet(root)  # in any step: hooks are to be there when one is written down
            if not self._is_wanted(call.phase):
                return
            call.states, call.torch = random_states(), torch.get_rng_state().numpy().tobytes()
            if not self._root_calls:
                self._random = call.states
            call.index = self._root_calls
            self._root_calls += 1
        batch = batch_of(args, kwargs)
        if batch is not None:
            place = self._place(call.phase)
            known = None if self._known is None else self._known.get(place, {})
            given = self._made.samples_of(batch)
            seen = None if self._seen is None else self._seen.setdefault(id(root), Counter())
            both = {"": args, **kwargs}
            call.samples = Samples(batch, call.index, known, given=given, seen=seen, kwargs=both)
            self._notes.write(call.samples.rows(place, call.phase))

    def _next_step(self) -> None:
        self.flush()
        self._step, self._has_updated, self._clipped = self._step + 1, False, {}
        self._times.clear()
        self._updates.done.clear()
        self._root_calls = 0

    def _leave(self, module: nn.Module, _args: tuple[object, ...], output: object) -> None:
        if is_unseen():
            return
        call = self._call
        while call.stack and call.stack.pop() is not module:
            pass
        if call.root is None or not self._is_wanted(call.phase):
            return
        if module is call.root and id(module) not in self._roots:  # its first call has made it
            self._meet(module)
        if call.phase == ev.FORWARD:
            self._hear(module)
        if module is call.root and call.samples is not None:
            self._made.add(output, call.samples.names)
        if module is call.root and call.phase == ev.FORWARD:
            now = random_states()
            self._drawn |= {kind for kind in now if now[kind] != call.states.get(kind)}
        name = self._modules.get(id(module))
        if name is not None and not self._drawing and call.phase == ev.FORWARD:
            self._drawing = name if call.torch != torch.get_rng_state().numpy().tobytes() else ""
        if name is not None and self._request.outputs:
            self._note_outputs(call, name, output)

    def _note_outputs(self, call: Call, name: str, output: object) -> None:
        """Note down all tensors that a module gives."""
        for path, tensor in tensors_in(output):
            if is_compared(tensor):
                self._output(call, f"{name}{':' if path else ''}{path}", tensor)
        if call.phase == ev.FORWARD and call.samples is not None:
            for choice in choices_in(output, call.samples):
                place = self._place(call.phase)
                self._notes.write(replace(choice, step=place, name=name, call=call.index))

    def _output(self, call: Call, name: str, tensor: Tensor) -> None:
        """Note down what a module gives, and later the gradient of it."""
        with self._lock:
            count = self._times[call.phase, f"{call.index} {name}"]
            self._times[call.phase, f"{call.index} {name}"] += 1
        name = f"{name}#{count}" if count else name
        samples, index = call.samples, call.index
        self._sample(call.phase, name, tensor, samples, index)
        if tensor.requires_grad and call.phase == ev.FORWARD:

            def noted(grad: Tensor | None) -> None:
                if grad is not None and self._is_wanted():  # autograd knows that it is zero
                    self._sample(ev.BACKWARD, name, grad, samples, index)

            tensor.register_hook(self._tried(noted, breaks_graphs=False))

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
            laid, note = None, why(error)
        if laid is None:
            self._not_recorded(phase, name, note, shape, index)
            return
        shape, digests = laid
        adds = phase == ev.BACKWARD or name in self._terms
        dtype = dtype_name(tensor.dtype)
        event = ev.Event(place, phase, name, shape, dtype, call=index, may_add=adds)
        with self._lock:
            self._notes.add(event, digests)

    # Losses, norms, updates.

    def _losses(self, losses: object, *_args: object, **_kwargs: object) -> None:
        if is_unseen() or self._is_no_rank() or not has_values(losses):
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
            some = optimizers_here()
            self._updates.are_by_hand = not some
            self._updates.are_made_by_hand()  # from now on
            if some and not self._is_called:
                self._launch()
                for optimizer in some:
                    self._meet_unowned(updated(optimizer))
        self._look_for_update()
        if self._has_updated:
            self._next_step()

    def _look_for_update(self) -> None:
        """Note down weights that no optimizer has updated, if they are others."""
        if self._is_over() or not self._updates.are_made_by_hand():
            return
        if self._is_wanted():
            self._not_recorded(ev.GRADIENT, "", "no optimizer of torch updates weights")
            self._parameters(ev.WEIGHT, ((p, p) for p in self._updates.weights))
        self._end_of_update()

    def _before_clipping(
        self, parameters: Tensor | Iterable[Tensor], *_args: object, **_kwargs: object
    ) -> None:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.before_clipping((p, p.grad) for p in listed)

    def before_clipping(self, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Take in parameters or flat tensors with their gradients, before these are clipped."""
        if self._is_wanted():
            with self._lock:
                self._parameters(ev.GRADIENT, self._not_clipped(gradients))

    def _not_clipped(
        self, gradients: Iterable[tuple[Tensor, Tensor | None]]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield those that no earlier clipping has changed, as one that a norm is logged by.

        Where a model was called since, no update was made of what was clipped: it is forgotten.
        """
        for parameter, gradient in gradients:
            before = self._clipped.get(id(parameter))
            if before != self._root_calls:
                for part in self._all_owners().parts(parameter) if before is not None else ():
                    self._notes.forget(ev.GRADIENT, part.name, part.box)
                self._clipped[id(parameter)] = self._root_calls
                yield parameter, gradient

    def _before_scaling(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: object,
        total_norm: Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> None:
        self._before_clipping(parameters, max_norm)
        self.clipped(total_norm)

    def clipped(self, norm: Tensor | float) -> None:
        """Take in the norm by which gradients were clipped."""
        if self._is_wanted():
            self._number(ev.NORM, float(norm.full_tensor() if is_dtensor(norm) else norm))

    def _before_attempt(self, *_args: object, **_kwargs: object) -> None:
        self._updates.num_made = 0

    def _after_attempt(self, _result: object) -> None:
        """End the step where a scaler has left an update out."""
        if not self._updates.num_made:
            with self._lock:
                self._end_of_update()

    def _before_update(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self._is_no_rank() or _moves_nothing(optimizer):
            return
        self._seen = {}
        self._updates.are_by_hand = False
        self._updates.num_made += 1
        with self._lock:
            self._launch()
            # DeepSpeed calls one optimizer with some parameters after the others.
            one = id(optimizer), id(next(iter(updated(optimizer)), None))
            if one in self._updates.done:
                self._next_step()
            self._updates.done.add(one)
            if self._is_wanted() and not _has_closure(args, kwargs):
                self._to_be_used(optimizer)

    def _to_be_used(self, optimizer: Optimizer) -> None:
        """Note down what an update is made of."""
        phase = ev.CLIPPED if self._clipped else ev.GRADIENT
        if any("lr" in group for group in optimizer.param_groups):
            self._meet_unowned(updated(optimizer))
        self._parameters(phase, ((p, p.grad) for p in updated(optimizer)))
        if not any("lr" in group for group in optimizer.param_groups):
            return  # a container of optimizers, which come next
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        of = f"optimizer {number} " if number else ""
        for index, group in enumerate(optimizer.param_groups):
            rate = ev.Number(self._step, ev.RATE, f"{of}group {index}", float(group["lr"]))
            self._notes.write(rate)

    def _after_update(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._seen = None
        if _moves_nothing(optimizer):
            return
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
        if self._launches is not None and not self._is_no_rank():
            self._launches.count(self._step)
        if self._owners is not None:
            self._owners.forget()

    def _is_updated(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Say if an update may have changed it; of a model that was never called none does."""
        return (
            parameter.grad is not None
            or bool(optimizer.state.get(parameter))
            or bool(self._all_owners().parts(parameter))
        )

    def _states(self, optimizer: Optimizer) -> None:
        for parameter in updated(optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if value.shape == parameter.shape:
                    self._parameters(f"{ev.MOMENT} {key}", [(parameter, value)])
                elif value.numel() > 1:
                    self._tried(self._state_beside)(f"{ev.MOMENT} {key}", parameter, value)

    def _state_beside(self, phase: str, parameter: Tensor, value: Tensor) -> None:
        """Note down state that has another shape than its parameter, as of a factored optimizer."""
        name, parts = self._all_owners().of(parameter, "of an optimizer")
        shape = tuple(value.shape)
        if len(parts) != 1 or parts[0].box != whole(parts[0].shape):
            self._not_recorded(phase, name, "of another shape than its parameter, in parts", shape)
            return
        dtype, place = dtype_name(value.dtype), self._place(phase)
        self._notes.add(
            ev.Event(place, phase, parts[0].name, shape, dtype),
            [digest_of(dense(value.detach()), whole(shape))],
        )

    # Writing.

    def flush(self) -> None:
        """Write the step that has ended."""
        with self._lock:
            if self._root_calls and not self._steps.are_over(self._step):
                drawn = tuple(sorted(self._drawn))
                self._notes.write(ev.Randomness(self._step, self._random, drawn, self._drawing))
            self._notes.flush(self._step)
            self._drawn.clear()
            self._drawing = ""

    def close(self) -> None:
        """Write what is left at the end of the process."""
        with self._lock:
            self._tried(self._look_for_update)()
            self.flush()


def _moves_nothing(optimizer: Optimizer) -> bool:
    """Tell whether all rates and gradients are 0, as where torch makes an optimizer's state."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    gradients = (p.grad for p in updated(optimizer) if p.grad is not None)
    parts = (grad.to_local() if is_dtensor(grad) else grad for grad in gradients)
    return bool(rates) and not any(rates) and not any(bool(part.any()) for part in parts)


def _has_closure(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether an optimizer was given what computes the loss, and was called before that."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def random_states() -> dict[str, str]:
    """Name each generator's state: generator -> the same text for the same state."""
    found = {TORCH: _text(torch.get_rng_state().numpy().tobytes())}
    found[PYTHON] = _text(array.array("Q", random.getstate()[1]).tobytes())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        found[NUMPY] = _text(keys.tobytes() + bytes(str(position), "ascii"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[CUDA] = _text(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def _text(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()
