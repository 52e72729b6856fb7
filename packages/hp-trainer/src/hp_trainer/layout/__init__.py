"""Which rank does what: axes of the mesh, stages, schedules, groups, sequence shares."""
