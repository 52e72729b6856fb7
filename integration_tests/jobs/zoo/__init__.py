"""Bugs of training systems as public threads tell them, each in a job that is otherwise sound."""
