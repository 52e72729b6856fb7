"""Layouts: ranks of the stages, and placements of activations over them. Needs no torch."""
