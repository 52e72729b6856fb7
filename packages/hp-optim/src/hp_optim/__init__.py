"""Optimizers of matrices: Muon in every layout, each matrix orthogonalised once in the world."""

from hp_optim.layout import Layout
from hp_optim.matrices import Split
from hp_optim.muon import Muon, muon_groups
from hp_optim.newton_schulz import NewtonSchulz, orthogonalize

__all__ = [
    "Layout",
    "Muon",
    "NewtonSchulz",
    "Split",
    "__version__",
    "muon_groups",
    "orthogonalize",
]
__version__ = "0.1.0"
