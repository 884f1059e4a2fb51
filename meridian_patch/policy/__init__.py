"""What to run first and whom to preempt: decides, never acts."""
