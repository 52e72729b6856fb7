"""Proofs on traces: order of the streams of a rank, ranks that match, no deadlock."""
