"""Batches whose sequences are shared by ranks: layouts, positions, shards, losses."""
