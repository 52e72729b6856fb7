"""How experts are spread over ranks, as styles for torch's `parallelize_module`."""
