"""Counters of the phases and where they are exported."""
