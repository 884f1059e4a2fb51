"""Moves a request from one engine to another at its think boundary: what both sides exchange."""
