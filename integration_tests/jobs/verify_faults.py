"""Bugs as they are made in training systems, one by one put into a run that `hp verify` judges.

Most are from the issue lists of public systems (Megatron-LM #7452 and what it links to, TTrace):
gradients summed over the wrong ranks or not at all, what is replicated drifting apart, losses
divided by the wrong count, state that a checkpoint loses. Which of them a run has, its name says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import hp_trainer.model.block
import hp_trainer.training.optimizer
import hp_trainer.training.trainer
from hp_expert import TopKRouter
from hp_train.verify.own_trainer import TrainerJob
from hp_trainer.config import Config, to_dict
from hp_trainer.launch.task import Worker
from hp_trainer.model.attention import GroupedQueryAttention
from hp_trainer.model.layers import RMSNorm
from hp_trainer.model.parameters import Parameter
from hp_trainer.training.checkpointer import set_optimizer_steps
from hp_trainer.training.trainer import Trainer

MATRIX, NORM = "layers.2.attention.wk.weight", "layers.1.attention_norm.weight"
DATA, TENSOR, CONTEXT, PIPELINE, SHARDED = (
    "mesh.dp_replicate=2 mesh.ep=2",
    "mesh.tp=2",
    "mesh.cp=2",
    "mesh.pp=2",
    "mesh.dp_shard=2",
)
LAYOUTS = (DATA, TENSOR, CONTEXT, PIPELINE, SHARDED)


@dataclass(frozen=True)
class Fault:
    """A bug.

    Attributes:
        layout: Overrides of the layout that has it; empty: one process has it.
        found: Regular expression of the first difference, or of the first flaw where that is all.
        apply: Puts it into a trainer, in the process of one rank.
        beside: Overrides of the layout that it is judged beside; empty: one process.
    """

    layout: str
    found: str
    apply: Callable[[Trainer], None]
    beside: str = ""


FAULTS: dict[str, Fault] = {}


def fault(
    layout: str, found: str, *, beside: str = ""
) -> Callable[[Callable[[Trainer], None]], None]:
    """Put a function into the table, under its name."""

    def add(apply: Callable[[Trainer], None]) -> None:
        FAULTS[apply.__name__] = Fault(layout, found, apply, beside)

    return add


class FaultyJob(TrainerJob):
    """The training job with the bug that the run is named after; a run without a name has none."""

    def _watch(self, trainer: Any) -> Any:
        trainer = super()._watch(trainer)
        name = self.config.run.name
        if name and bool(FAULTS[name].layout) is (self.config.world_size > 1):
            FAULTS[name].apply(trainer)
        return trainer


def build(config: Config, worker: Worker) -> FaultyJob:
    """Make the job of a rank."""
    return FaultyJob(config, worker)


def wrap(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of an object by what is made of it."""
    setattr(owner, name, make(getattr(owner, name)))


def after_gradients(trainer: Trainer, change: Callable[[Parameter, Tensor], object]) -> None:
    """Change gradients after they were summed over the ranks."""

    def make(original: Callable[[], Any]) -> Callable[[], Any]:
        def compute() -> Any:
            result = original()
            for parameter in trainer.parameters:
                assert parameter.local.grad is not None
                change(parameter, parameter.local.grad)
            return result

        return compute

    wrap(trainer, "compute_gradients", make)


def before_forward(trainer: Trainer, change: Callable[[list[Any], list[Any]], None]) -> None:
    """Change tokens and microbatches of a rank after they were cut."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(args: list[Any], kwargs: list[Any], targets: list[Any]) -> Any:
            change(args, kwargs)
            return original(args, kwargs, targets)

        return run

    wrap(trainer.runner, "run_microbatches", make)


def change_microbatches(trainer: Trainer, change: Callable[[Any], dict[str, Any]]) -> None:
    """Replace attributes of every microbatch of a rank."""

    def apply(_args: list[Any], kwargs: list[Any]) -> None:
        for entry in kwargs:
            entry["microbatch"] = replace(entry["microbatch"], **change(entry["microbatch"]))

    before_forward(trainer, apply)


def after_call(owner: object, name: str, then: Callable[[], None]) -> None:
    """Do something after a method."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        return call

    wrap(owner, name, make)


def change_parameter(trainer: Trainer, name: str, change: Callable[[Parameter], Parameter]) -> None:
    """Let the sums over ranks take a parameter for another one."""
    trainer.parameters = [change(p) if p.name == name else p for p in trainer.parameters]


def without_group(trainer: Trainer, name: str, group: str) -> None:
    """Leave out the sum of one gradient over a group."""

    def change(parameter: Parameter) -> Parameter:
        assert group in parameter.unsummed
        left = tuple(other for other in parameter.unsummed if other != group)
        return replace(parameter, unsummed=left)

    change_parameter(trainer, name, change)


def named(trainer: Trainer, name: str) -> Parameter:
    return next(parameter for parameter in trainer.parameters if parameter.name == name)


# Gradients.


@fault(DATA, f"step 1, gradient {MATRIX}")
def one_gradient_a_little_off(trainer: Trainer) -> None:
    after_gradients(trainer, lambda p, g: g.mul_(1 + 1e-9 * (p.name == MATRIX)))


@fault(f"{PIPELINE} pipeline.schedule=gpipe", f"step 1, gradient {MATRIX}", beside=PIPELINE)
def one_number_of_one_gradient_off_by_its_last_bit(trainer: Trainer) -> None:
    def change(parameter: Parameter, gradient: Tensor) -> None:
        if parameter.name == MATRIX:
            first = gradient.view(-1)[:1]
            first.copy_(first.nextafter(first + 1))

    after_gradients(trainer, change)


@fault(DATA, f"step 6, gradient {MATRIX}")
def one_gradient_from_step_six(trainer: Trainer) -> None:
    def change(parameter: Parameter, gradient: Tensor) -> None:
        if parameter.name == MATRIX and trainer.step >= 5:
            gradient.mul_(1 + 1e-9)

    after_gradients(trainer, change)


@fault(DATA, f"step 1, gradient {NORM}")
def a_norm_is_not_summed_over_replicas(trainer: Trainer) -> None:
    without_group(trainer, NORM, "dp_replicate")


@fault(TENSOR, f"step 1, gradient {NORM}")
def a_norm_is_not_summed_over_slices_of_positions(trainer: Trainer) -> None:
    without_group(trainer, NORM, "tp")


@fault(SHARDED, "step 1, gradient ")
def gradients_are_averaged(trainer: Trainer) -> None:
    after_gradients(trainer, lambda _, g: g.div_(2))


@fault(DATA, r"step 1, gradient .*\.moe\.experts\.")
def gradients_of_experts_count_twice(trainer: Trainer) -> None:
    after_gradients(trainer, lambda p, g: g.mul_(2 if p.spec.is_expert else 1))


@fault(
    "mesh.dp_replicate=2 mesh.etp=2 model.expert_bias=true",
    r"step 1, gradient .*\.moe\.experts\.b2",
    beside="model.expert_bias=true",
)
def output_biases_are_summed_over_ranks_that_have_them_whole(trainer: Trainer) -> None:
    def change(parameter: Parameter) -> Parameter:
        return replace(parameter, unsummed=(*parameter.unsummed, "etp"))

    for name in [p.name for p in trainer.parameters if p.name.endswith(".experts.b2")]:
        change_parameter(trainer, name, change)


@fault(DATA, r"step 1, gradient .*\.moe\.router\.weight")
def routers_have_no_gradient(trainer: Trainer) -> None:
    after_gradients(trainer, lambda p, g: g.mul_(".router." not in p.name))


@fault(PIPELINE, "step 1, gradient embedding.weight")
def a_tied_table_has_the_gradient_of_one_end(trainer: Trainer) -> None:
    change_parameter(trainer, "embedding.weight", lambda p: replace(p, tied_ranks=None))


@fault(DATA, "step 1, norm")
def the_norm_counts_experts_twice(trainer: Trainer) -> None:
    twice = torch.tensor([2.0 if ".experts." in name else 1.0 for name in trainer.norm.sizes])

    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda device: original(device) * twice.to(torch.float64)

    wrap(trainer.norm, "local_squares", make)


# What a rank is given.


def shift_data(trainer: Trainer, *, from_step: int) -> None:
    """Give rank 1 the sequences of rank 0."""
    if trainer.mesh.rank != 1:
        return
    mine = trainer.config.train.global_batch_size // 2

    class Shifted:
        def __getattr__(self, name: str) -> Any:
            return getattr(data, name)

        def batch(self, indices: range) -> Any:
            late = trainer.step + 1 >= from_step
            return data.batch(range(indices.start - mine, indices.stop - mine) if late else indices)

    data = trainer.data
    trainer.data = Shifted()  # type: ignore[assignment]


@fault(DATA, "step 1, tokens")
def both_ranks_have_the_same_sequences(trainer: Trainer) -> None:
    shift_data(trainer, from_step=1)


@fault(DATA, "step 5, tokens")
def one_rank_has_other_sequences_from_step_five(trainer: Trainer) -> None:
    shift_data(trainer, from_step=5)


@fault(PIPELINE, "step 1, loss")
def a_microbatch_comes_twice(trainer: Trainer) -> None:
    def change(args: list[Any], kwargs: list[Any]) -> None:
        args[-1] = args[0]
        del kwargs

    before_forward(trainer, change)


@fault(DATA, "step 1, loss")
def losses_are_divided_by_the_tokens_of_a_rank(trainer: Trainer) -> None:
    def change(_args: list[Any], _kwargs: list[Any]) -> None:
        trainer.runner.loss_scale *= 2 if trainer.mesh.rank else 1

    before_forward(trainer, change)


@fault(DATA, "step 1, loss")
def dropout_depends_on_the_rank(trainer: Trainer) -> None:
    rank = trainer.mesh.rank
    change_microbatches(trainer, lambda m: {"key": m.key._replace(seed=m.key.seed + rank)})


@fault(CONTEXT, "step 1, loss")
def positions_of_a_rank_begin_one_later(trainer: Trainer) -> None:
    rank = trainer.mesh.rank
    change_microbatches(trainer, lambda m: {"positions": m.positions + rank})


@fault(PIPELINE, "step 1, loss")
def documents_see_each_other(trainer: Trainer) -> None:
    change_microbatches(trainer, lambda _: {"documents": None})


@fault(DATA, "step 1, balance loss")
def the_balancing_loss_is_that_of_half_a_batch(trainer: Trainer) -> None:
    change_microbatches(trainer, lambda m: {"num_sequences": m.num_sequences // 2})


@fault(PIPELINE, "step 1, prediction loss")
def predictions_further_ahead_are_divided_by_all_positions(trainer: Trainer) -> None:
    whole = trainer.config.train.global_batch_size * trainer.config.data.seq_len
    change_microbatches(trainer, lambda m: {"ahead": m.ahead._replace(num_targets=(whole,))})


@fault(DATA, r"step 1, start model\..*\.moe\.experts\.")
def experts_begin_with_other_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters:
            if parameter.spec.is_expert:
                parameter.local.copy_(parameter.local.flip(0))


# The update.


@fault(DATA, "step [12], first moment")
def gradients_are_clipped_too_far_when_they_are(trainer: Trainer) -> None:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def update(grad_norm: float, rate: float, *, max_norm: float) -> None:
            clips = 0 < max_norm < grad_norm
            original(grad_norm * (1 + 1e-9 * clips), rate, max_norm=max_norm)

        return update

    wrap(trainer.update, "apply", make)


@fault(DATA, "step 3, learning rate")
def the_rate_is_wrong_after_warm_up(_trainer: Trainer) -> None:
    def make(original: Callable[..., float]) -> Callable[..., float]:
        return lambda step, train: original(step, train) * (1 + 1e-9 * (step >= train.warmup_steps))

    wrap(hp_trainer.training.trainer, "learning_rate", make)


@fault(DATA, "step 1, weight ")
def a_rank_has_a_rate_of_its_own(trainer: Trainer) -> None:
    def make(original: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 1 + 1e-3 * trainer.mesh.rank
            original()

        return step

    wrap(trainer.optimizer, "step", make)


@fault(TENSOR, r"step 1, weight .*norm\.weight")
def norms_decay(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[1]["weight_decay"] = 0.1


@fault(DATA, f"step 8, second moment {MATRIX}")
def a_moment_is_wrong_in_the_end(trainer: Trainer) -> None:
    def then() -> None:
        if trainer.step == 7:
            state = trainer.optimizer.state[named(trainer, MATRIX).local]
            state["exp_avg_sq"].mul_(1 + 1e-9)

    after_call(trainer.optimizer, "step", then)


@fault(DATA, r"step 1, correction bias .*\.correction_bias")
def correction_biases_follow_the_load_of_a_rank(trainer: Trainer) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stage, *, rate, **_: original(stage, rate=rate, group=None)

    del trainer
    wrap(hp_trainer.training.optimizer, "update_correction_biases", make)


@fault(DATA, r"step 4, correction bias .*\.correction_bias")
def a_skipped_step_moves_correction_biases_later(_trainer: Trainer) -> None:
    wrap(hp_trainer.training.optimizer, "take_loads", lambda _: lambda _stage: {})


# Evaluation, saves and loads.


def change_evaluation(trainer: Trainer) -> None:
    """Make the losses of held-out text a little larger."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = original(*args)
            result.losses[:] = [loss * (1 + 1e-9) for loss in result.losses]
            return result

        return run

    wrap(trainer.runner, "evaluate_microbatches", make)


@fault(DATA, "step 4, eval loss")
def evaluation_alone_is_wrong(trainer: Trainer) -> None:
    change_evaluation(trainer)


@fault(SHARDED, f"step 4, saved optimizer.exp_avg.{MATRIX}")
def shards_of_a_moment_are_saved_in_the_wrong_order(trainer: Trainer) -> None:
    def make(original: Callable[[], Any]) -> Callable[[], Any]:
        def tensors() -> Any:
            found = dict(original())
            if trainer.step == 4:
                local = found[f"optimizer.exp_avg.{MATRIX}"].to_local()
                local.copy_(local.flip(0))
            return found

        return tensors

    # What is saved is the live state, so its copy is put back.
    def make_save(original: Callable[[], Any]) -> Callable[[], Any]:
        def save() -> Any:
            moment = trainer.optimizer.state[named(trainer, MATRIX).local]["exp_avg"]
            before = moment.clone()
            path = original()
            moment.copy_(before)
            return path

        return save

    wrap(trainer.checkpointer, "_tensors", make)
    wrap(trainer, "save", make_save)


@fault(SHARDED, r"step 5, loaded optimizer\.exp_avg\.")
def moments_are_not_loaded(trainer: Trainer) -> None:
    def then() -> None:
        for state in trainer.optimizer.state.values():
            state["exp_avg"].zero_()

    after_call(trainer, "resume", then)


@fault(SHARDED, r"step 5, loaded optimizer\.exp_avg\.")
def moments_that_another_layout_saved_are_not_loaded(trainer: Trainer) -> None:
    mesh = to_dict(trainer.config)["mesh"]

    def make(original: Callable[[], Any]) -> Callable[[], Any]:
        def load() -> Any:
            loaded = original()
            if loaded.extra["config"]["mesh"] != mesh:
                for state in trainer.optimizer.state.values():
                    state["exp_avg"].zero_()
            return loaded

        return load

    wrap(trainer.checkpointer, "load", make)


@fault(DATA, "step 5, updates")
def a_skipped_step_counts_as_an_update_after_a_load(trainer: Trainer) -> None:
    after_call(trainer, "resume", lambda: set_optimizer_steps(trainer.optimizer, trainer.step))


@fault(DATA, "step 5, first sequence")
def data_begin_anew_after_a_load(trainer: Trainer) -> None:
    def then() -> None:
        trainer.next_sequence = 0

    after_call(trainer, "resume", then)


@fault(PIPELINE, "step 5: loaded model.embedding.weight: rank-00001 differs")
def a_tied_copy_is_not_loaded(trainer: Trainer) -> None:
    def then() -> None:
        for parameter in trainer.parameters:
            if parameter.name == "embedding.weight" and trainer.mesh.rank:
                with torch.no_grad():
                    parameter.local.add_(1e-9)

    after_call(trainer, "resume", then)


# The model itself, which layouts have in common and the oracle has not.


def of_type(trainer: Trainer, kind: type[nn.Module]) -> list[Any]:
    stages = trainer.pipeline.modules.values()
    return [module for stage in stages for module in stage.modules() if isinstance(module, kind)]


@fault("", "step 1, loss")
def heads_are_scaled_by_the_width_of_the_model(trainer: Trainer) -> None:
    for attention in of_type(trainer, GroupedQueryAttention):
        attention.core.scale = trainer.config.model.dim**-0.5


@fault("", "step 1, loss")
def norms_have_another_epsilon(trainer: Trainer) -> None:
    for norm in of_type(trainer, RMSNorm):
        norm.eps *= 2


@fault("", "step 1, loss")
def weights_of_experts_are_not_normalized(trainer: Trainer) -> None:
    for router in of_type(trainer, TopKRouter):
        router.normalize = False


@fault("", "step 1, loss")
def groups_of_experts_count_as_their_best_one(trainer: Trainer) -> None:
    for router in of_type(trainer, TopKRouter):
        router.num_groups, router.num_limited_groups, router.group_score = 2, 1, "max"


@fault("", "step 1, balance loss")
def balancing_has_another_weight(trainer: Trainer) -> None:
    change_microbatches(trainer, lambda m: {"num_sequences": m.num_sequences + 1})


@fault("", "step 1, targets")
def the_end_of_a_document_predicts_the_next_one(trainer: Trainer) -> None:
    data = trainer.data

    class Joined:
        def __getattr__(self, name: str) -> Any:
            return getattr(data, name)

        def batch(self, indices: range) -> Any:
            batch = data.batch(indices)
            return batch._replace(targets=batch.targets.clamp(min=0))

    trainer.data = Joined()  # type: ignore[assignment]


@fault("", r"step 1, first moment")
def adam_has_another_beta(trainer: Trainer) -> None:
    for group in trainer.optimizer.param_groups:
        group["betas"] = (0.9 + 1e-9, 0.95)


@fault("", "step 1, updates")
def bias_corrections_count_one_step_less(trainer: Trainer) -> None:
    def then() -> None:
        if trainer.step == 0:
            for state in trainer.optimizer.state.values():
                state["step"].zero_()

    after_call(trainer.optimizer, "step", then)


@fault("", r"step 1, correction bias .*\.correction_bias")
def correction_biases_move_the_other_way(_trainer: Trainer) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(stage: nn.Module, *, rate: float, group: Any) -> Any:
            before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
            loads = original(stage, rate=rate, group=group)
            for name, buffer in stage.named_buffers():
                buffer.copy_(2 * before[name] - buffer)
            return loads

        return update

    wrap(hp_trainer.training.optimizer, "update_correction_biases", make)


@fault("", "step 3, learning rate")
def the_rate_falls_in_a_line(_trainer: Trainer) -> None:
    def make(original: Callable[..., float]) -> Callable[..., float]:
        def rate(step: int, train: Any) -> float:
            if step < train.warmup_steps:
                return original(step, train)
            share = (step + 1 - train.warmup_steps) / (train.steps - train.warmup_steps)
            return float(train.learning_rate * (1 - share))

        return rate

    wrap(hp_trainer.training.trainer, "learning_rate", make)


@fault("", "step 1, loss")
def dropout_does_not_scale_up(trainer: Trainer) -> None:
    def make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def dropped(x: Tensor, rate: float, key: Any, layer: str) -> Tensor:
            return original(x, rate, key, layer) * (1.0 if key is None else 1 - rate)

        return dropped

    del trainer
    wrap(hp_trainer.model.block, "dropout", make)


@fault("", "step 4, eval loss")
def evaluation_is_wrong_without_a_layout(trainer: Trainer) -> None:
    change_evaluation(trainer)
