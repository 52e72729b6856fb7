"""Random numbers that depend on the seed and on global names and indices, never on the layout.

There is no generator state to save or to keep in step between ranks: a draw is a pure function of
the run's seed and of what it is for (a parameter's name, an expert's index, a step, a layer, a
sequence's global index, a position). Any layout therefore starts from the same weights, drops
the same activations and reads the data in the same order.

Shape symbols: B sequences, S positions, D channels.
"""

import torch
from torch import Tensor

from hp_base.seeds import derive_seed

_MASK = 0xFFFFFFFF


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """Return a CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *parts))


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit values held in int64.

    Source: the "lowbias32" finaliser found by Chris Wellons' hash prospector (public domain).
    Products wrap modulo 2**64, and the mask keeps the low 32 bits, which wrapping leaves exact.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(key: int, sequence_index: Tensor, positions: Tensor, num_channels: int) -> Tensor:
    """Return uniform numbers in [0, 1), one per activation, the same on every device and layout.

    Args:
        key: Seed of the numbers' purpose; see :func:`derive_seed`.
        sequence_index: Global index of each sequence of the batch, int64 [B]; or of the sequence
            that each activation is of, int64 [B, S].
        positions: Positions of the activations in their sequence, int64 [S].
        num_channels: Size of the last dimension, D.

    Returns:
        float32 [B, S, D] on the device of ``sequence_index``.
    """
    device = sequence_index.device
    high, low = (key >> 32) & _MASK, key & _MASK
    sequence_B = _mix(_mix((sequence_index & _MASK) ^ low) ^ high ^ (sequence_index >> 32))
    channel_D = torch.arange(num_channels, device=device)
    sequence_BS = sequence_B if sequence_B.ndim == 2 else sequence_B[:, None]
    row_BS = _mix(sequence_BS ^ _mix(positions + 1))
    bits_BSD = _mix(row_BS[:, :, None] ^ _mix(channel_D + 0x9E3779B9 & _MASK))
    return (bits_BSD >> 8).to(torch.float32) * 2.0**-24
