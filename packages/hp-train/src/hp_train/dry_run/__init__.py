"""The real code of one rank of every class of ranks, on devices that compute nothing: `hp dry-run`."""
