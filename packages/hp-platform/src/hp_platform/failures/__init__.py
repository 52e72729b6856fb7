"""Failures that end a step on every rank and name the culprit, and messages between ranks.

Whoever loads a module of this package has failures ask the other ranks whom to blame.
"""

from hp_platform.failures import liveness

__all__ = ["liveness"]
