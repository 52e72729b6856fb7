"""`DryDevice`: its storages, its streams in backward, and which line asked for what."""
