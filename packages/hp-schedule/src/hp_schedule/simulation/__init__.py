"""Simulation of a schedule: its duration, its bubble and its memory."""
