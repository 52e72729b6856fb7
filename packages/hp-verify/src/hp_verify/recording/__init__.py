"""The recorder of one process of a job: samples, parameters and digests, seen from outside."""
