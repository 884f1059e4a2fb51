"""Decides which requests run first and which are preempted; pure code without side effects."""
