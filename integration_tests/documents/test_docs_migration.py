"""What docs/reference/migration.md says of names of other projects and of ours is so."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration.md"
# Public names of hyper_parallel.core.pipeline_parallel.scheduler and of what it uses: each class
# with its public members, "-" for the name itself.
SCHEDULER = """
MetaStepType: - FWD BWD BWD_INPUT BWD_WEIGHT FWD_RECV FWD_SEND BWD_RECV BWD_SEND OVERLAP_F_B
    OVERLAP_B_F FSDP_UNSHARD FSDP_RESHARD FSDP_REDUCE_GRAD
MetaStep: - micro_index stage_index type sub_steps from_str
generate_stage_to_rank_mapping: -
generate_rank_to_stage_mapping: -
iter_leaf_meta_steps: -
PipelineContext: - schedule arg_mbs kwarg_mbs losses fwd_recv_ops bwd_recv_ops send_handles
PipelineScheduleRuntime: - register_custom_function construct_exec_order build_exec_order
    convert_stages_dict split_microbatches run run_microbatches sync_shared_parameters_grad
    update_losses exec_order stages micro_batch_num n_local_stages real_stage_num
    split_micro_batch fwd_handle_cache bwd_handle_cache
add_send_recv: -
auto_align_and_add_send_recv: -
add_fsdp_unshard_reshard: -
add_fsdp_reduce_grad: -
ScheduleGPipe: - construct_exec_order
Schedule1F1B: - construct_exec_order
ScheduleInterleaved1F1B: - construct_exec_order construct_stage_exec_order warmup_ops
    forward_stage_index backward_stage_index n_rounds n_microbatch_per_round
    n_microbatch_per_round_accu
validate_pipeline_execution: -
detect_cycle_in_graph: -
output_cycle_results: -
parse_and_validate: -
generate_operations: -
PipelineStage: - forward_one_chunk backward_one_chunk init is_last_stage exec_fwd_recv_ops
    exec_fwd_send_ops exec_bwd_recv_ops exec_bwd_send_ops execute_reduce_grad
    sync_shared_parameters_grad
HSDPModule: -
platform: micro_batch get_cells_and_names
"""
# The same of hyper_parallel.core.context_parallel.async_context_parallel, with its arguments and
# the functions and hooks that programs have subclassed or called.
CONTEXT = """
ContextParallel: - apply
AsyncContextParallel: - apply seq_dim head_dim ulysses_degree qkv_indices qkv_kwarg_names
    load_balance _register_proj_hooks _proj_post_hook _wait_a2a _attn_pre_hook_ulysses
    _attn_pre_hook_hybrid _attn_post_hook_ata _proj_bwd_pre_hook
_launch_async_a2a_seq_to_head: -
_a2a_reconstruct: -
_build_2d_mesh: -
_ensure_1d: -
_gather_seq: -
_gather_head_to_seq: -
platform: Module Tensor all_to_all_single differentiable_async_a2a_wait
    register_full_backward_pre_hook
get_platform: -
DeviceMesh: -
DTensor: -
Shard: -
Replicate: -
"""
# The same of hyper_parallel.core.pipeline_parallel.comm_compute_overlap and of what it uses.
OVERLAP = """
CommComputeOverlap: - coordinator wrap_dispatch wrap_combine run
HookCoordinator: - enable disable is_enabled rendezvous notify_dispatched
platform: differentiable_sync_hook
get_platform: -
"""
# The same of hyper_parallel.core.expert_parallel.expert_parallel, and what its subclasses override.
EXPERTS = """
BaseExpertParallel: - apply _partition_fn _token_dispatch _token_combine
ExpertParallel: - apply
TensorParallel: - apply
ExpertTensorParallel: - apply
GroupedExperts: -
_generate_permute_indices: -
_permute: -
_unpermute: -
platform: all_to_all_single differentiable_all_to_all_single arange Module
distribute_module: -
distribute_tensor: -
ParallelStyle: -
"""
# The same of the point-to-point communication of MindSpeed-MM's VTP, and what it imports.
VTP = """
Shape: -
ModelParallelConfig: -
recv_forward_with_reqs: -
recv_backward_with_reqs: -
send_forward: -
send_backward: -
vtp_recv_forward: -
vtp_recv_backward: -
vtp_send_forward: -
vtp_send_backward: -
_VTPRecvWork: - wait
_communicate_impl: -
_batched_p2p_ops: -
_p2p_ops: -
get_tensor_model_parallel_group: -
get_pipeline_model_parallel_group: -
get_pipeline_model_parallel_next_rank: -
get_pipeline_model_parallel_prev_rank: -
is_vtp_stage_rank0: -
get_vtp_size_list: -
get_vtp_stage_ranks: -
get_vtp_my_stage_idx: -
"""
STATUSES = ("here", "planned: hp-", "none: ")


def rows() -> list[tuple[str, str, str]]:
    """Return (there, here, status) of every row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(there, here, status) for there, here, status in cells]


def resolve(path: str) -> object:
    """Return what a dotted path names, importing as much of it as is a module.

    An attribute that a class sets on its instances is the name of it.
    """
    parts = path.split(".")
    target: object = importlib.import_module(parts[0])
    for i, name in enumerate(parts[1:], start=2):
        if isinstance(target, type) and re.search(
            rf"^ +self\.{name}(?:: .*)? = ", inspect.getsource(target), re.MULTILINE
        ):
            return name
        if not hasattr(target, name):
            importlib.import_module(".".join(parts[:i]))
        target = getattr(target, name)
    return target


def names_here() -> list[str]:
    here = [cell for _, cell, status in rows() if status == "here"]
    return sorted({name for cell in here for name in re.findall(r"`(hp_[\w.]+)`", cell)})


def test_every_row_has_a_status() -> None:
    unclear = [there for there, _, status in rows() if not status.startswith(STATUSES)]
    assert not unclear


def test_every_row_that_says_here_names_a_place() -> None:
    placeless = [there for there, here, status in rows() if status == "here" and "`hp_" not in here]
    assert not placeless


def public_names(listed: str) -> set[str]:
    owner = ""
    found = set()
    for word in listed.split():
        if word.endswith(":"):
            owner = word[:-1]
        else:
            found.add(owner if word == "-" else f"{owner}.{word}")
    return found


@pytest.mark.parametrize(
    ("listed", "least"), [(SCHEDULER, 80), (CONTEXT, 30), (EXPERTS, 16), (OVERLAP, 12), (VTP, 20)]
)
def test_every_public_name_has_a_row(listed: str, least: int) -> None:
    there = {cell.strip("`") for cell, _, _ in rows()}
    assert len(public_names(listed)) > least
    assert public_names(listed) - there == set()


def test_no_name_has_two_rows() -> None:
    names = [there for there, _, _ in rows()]
    assert len(names) > 60
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", names_here())
def test_name_that_is_said_to_be_here_exists(name: str) -> None:
    assert resolve(name) is not None
