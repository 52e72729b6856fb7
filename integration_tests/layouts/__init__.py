"""Layouts of a training job beside each other, in real runs and on GPUs that are not there."""
