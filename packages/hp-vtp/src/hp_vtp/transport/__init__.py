"""Move tensors between the stages of a layout, asynchronously, each edge on groups of its own."""

from hp_vtp.messages.packing import TensorMeta
from hp_vtp.transport.failure import TransferError, TransferTimeoutError
from hp_vtp.transport.handles import Handle
from hp_vtp.transport.transport import Transport

__all__ = ["Handle", "TensorMeta", "TransferError", "TransferTimeoutError", "Transport"]
