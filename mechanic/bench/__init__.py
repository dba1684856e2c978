"""`mechanic bench`: the paper's experiments, beside sweeps and learning-rate-free peers.

Start at `task` (what is trained). Then read `methods` (what trains it), `train` (one run), `study`
(all runs, in an Optuna storage), `score` (what the runs say) and `report` (how that is shown). Each
suite of tasks is one file of `suites`.
"""
