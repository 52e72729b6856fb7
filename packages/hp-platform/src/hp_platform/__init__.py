"""Devices, process groups and differentiable collectives over torch.distributed, fully typed."""

__all__ = ["__version__"]
__version__ = "0.1.0"
