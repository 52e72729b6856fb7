"""What a layout takes on a machine: bytes of a rank, seconds of its stages and of a step."""
