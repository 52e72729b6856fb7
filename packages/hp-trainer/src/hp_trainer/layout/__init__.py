"""The layout of a run over ranks: axes of the mesh, stages, schedules, groups, sequences."""
