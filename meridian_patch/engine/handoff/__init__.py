"""Hand-off at the think boundary, in the scheduler of the engine that thinks or answers."""
