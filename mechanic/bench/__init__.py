"""`mechanic bench`: the paper's experiments, learning-rate sweeps, learning-rate-free peers.

Start at `task` (what is trained), then `methods` (what trains it), `train` (one run), `study` (all
runs, in an Optuna storage), `score` (what they say) and `report` (how it is shown). A suite is one
file of `suites`.
"""
