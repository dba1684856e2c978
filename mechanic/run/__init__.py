"""`mechanic run`: tune a training script that nobody edits.

Two processes share the work. The script runs in a Python of its own, where `inject/sitecustomize`
waits for torch, `adopt` mechanizes the optimizers that are made, and `record` notes every step in
files (`rows`). The supervisor, `supervise`, starts it, passes `signals` on, and makes of the files
(`spool`) a status line (`screen`), a log (`log`), a summary (`summary`, from what `advice` finds)
and a plot (`plot`). It never imports torch.
"""
