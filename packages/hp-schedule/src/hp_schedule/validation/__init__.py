"""Proof that a schedule runs: every step once, in a possible order, without a deadlock."""

from hp_schedule.validation.report import Finding, FindingKind, ValidationReport
from hp_schedule.validation.validate import validate

__all__ = ["Finding", "FindingKind", "ValidationReport", "validate"]
