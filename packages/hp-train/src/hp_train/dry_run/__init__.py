"""`hp dry-run`: the real code of every class of ranks, on devices that compute nothing."""
