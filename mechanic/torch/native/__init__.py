"""The step of a known base on a CPU in one compiled call: a C compiler makes it at first use.

Where there is none, or `MECHANIC_NATIVE=0` is set, the plain path makes every step.
"""
