"""Costs of a model, module by module, and rates of machines."""
