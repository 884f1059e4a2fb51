"""The strategies that may close a thought; each is one file."""
