"""Passes: from one schedule to another."""
