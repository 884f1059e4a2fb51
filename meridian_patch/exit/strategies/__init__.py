"""The strategies that may close a thought, one file each."""
