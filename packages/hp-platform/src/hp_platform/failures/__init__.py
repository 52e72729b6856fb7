"""Failures that end a step on every rank and name the failed rank, and messages between ranks.

Every module of this package loads `liveness`, which finds the rank to blame for a failure.
"""

from hp_platform.failures import liveness

__all__ = ["liveness"]
