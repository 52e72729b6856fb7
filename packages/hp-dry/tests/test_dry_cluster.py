"""What a rank on a GPU would read from its environment."""

import pytest

from hp_dry.cluster import grows_segments, keeps_launch_order, loads_eagerly


def test_nccl_keeps_the_order_of_the_host_if_it_is_asked_to() -> None:
    assert keeps_launch_order({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})
    assert not keeps_launch_order({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"})
    assert not keeps_launch_order({})


def test_kernels_are_loaded_early_if_cuda_is_asked_to() -> None:
    assert loads_eagerly({"CUDA_MODULE_LOADING": "eager"})
    assert not loads_eagerly({"CUDA_MODULE_LOADING": "LAZY"})
    assert not loads_eagerly({})


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_if_the_allocator_is_asked_to(name: str) -> None:
    assert grows_segments({name: "max_split_size_mb:512, expandable_segments:true"})
    assert not grows_segments({name: "max_split_size_mb:512"})
    assert not grows_segments({name: ""})
    assert not grows_segments({})


def test_the_newer_variable_of_the_allocator_comes_first() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": ""}
    assert not grows_segments(env)
