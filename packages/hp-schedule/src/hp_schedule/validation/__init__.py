"""Proof that a schedule runs: every step once, in a possible order, without a deadlock."""
