"""A batch whose sequences ranks share: layouts, positions, shards, losses."""
