"""`mechanic run`: tune a training script without editing it.

Two processes share the work. The script runs in a Python of its own. There, `inject/sitecustomize`
waits until torch is imported, `adopt` mechanizes every optimizer that the script makes, and
`record` writes each step to files, in the format of `rows`. The supervisor, `supervise`, starts the
script and forwards `signals` to it. It reads the files (`spool`) and turns them into a status line
(`screen`), a log (`log`), a summary (`summary`, from what `advice` finds) and a plot (`plot`). The
supervisor never imports torch. `mechanic doctor` (`doctor`) says what `advice` finds in a log.
"""
