"""The price of a layout on a machine: bytes of a rank, seconds of its stages and of a step."""
