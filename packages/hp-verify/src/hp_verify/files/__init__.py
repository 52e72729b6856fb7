"""What else `hp-verify` compares: checkpoints, weights in an engine, curves of losses."""
