"""`check_streams` and `prove`: streams of one rank in order, ranks that match, no deadlock."""
