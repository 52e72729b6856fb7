"""Processes of a run: how they start, where they stand, how they are stopped, and how they end.

`launcher` is where to begin: it makes the run directory (`rundir`), starts ranks (`ranks`) out of a
server that has imported torch (`fork_server`), watches where they stand (`heartbeats`, `supervise`)
and passes on requests to stop (`signals`). `worker` is the other side, one rank; `task` is what
passes between the two; `lifetime` sees to it that no process is left.
`external` takes the place of all that under torchrun and Slurm, with `agent` for what torchrun's
agents leave to their ranks.
"""
