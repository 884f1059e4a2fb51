"""Decides when to end thinking early; pure code without side effects."""
