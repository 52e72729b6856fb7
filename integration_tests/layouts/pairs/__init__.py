"""Every pair of a feature of a model and a setting of a run, beside one process."""
