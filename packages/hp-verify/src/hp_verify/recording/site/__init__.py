"""The folder that `hp-verify` puts on a job's ``PYTHONPATH``."""
