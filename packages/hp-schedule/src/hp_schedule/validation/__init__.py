"""Proof that a schedule runs: every step once, in a possible order, without a deadlock."""

from hp_schedule.validation.report import Finding, FindingKind, Lacking, ValidationReport
from hp_schedule.validation.validate import validate, validate_pipeline_execution

__all__ = [
    "Finding",
    "FindingKind",
    "Lacking",
    "ValidationReport",
    "validate",
    "validate_pipeline_execution",
]
