"""Configuration: schema, sources, model families."""
