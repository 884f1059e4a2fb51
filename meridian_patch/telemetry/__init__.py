"""Counts the scheduler's events and exports them as metrics."""
