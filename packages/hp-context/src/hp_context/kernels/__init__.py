"""Kernels that compute one block of attention, by device."""
