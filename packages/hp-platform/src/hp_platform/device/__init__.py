"""The device of a process, its streams, and computing in float64."""
