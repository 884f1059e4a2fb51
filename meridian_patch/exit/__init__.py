"""When to end thinking early: decides, never acts."""
