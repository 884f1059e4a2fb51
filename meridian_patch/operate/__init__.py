"""Commands for operators: what is live, and what is wrong."""
