"""Ends thoughts early on a real engine, and measures what it saves and costs."""
