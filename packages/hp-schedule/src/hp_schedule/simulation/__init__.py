"""Simulation of a schedule: its duration, its bubble and its memory."""

from hp_schedule.simulation.channels import ChannelModel
from hp_schedule.simulation.precedence import Path, Precedence, length
from hp_schedule.simulation.simulate import Simulation, simulate

__all__ = ["ChannelModel", "Path", "Precedence", "Simulation", "length", "simulate"]
