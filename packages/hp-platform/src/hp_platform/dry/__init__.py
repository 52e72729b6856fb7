"""A device that computes nothing: the real code of a rank on CUDA and NCCL, without a GPU."""
