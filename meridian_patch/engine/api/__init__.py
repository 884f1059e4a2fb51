"""The API server process: checks request fields, and adds how thinking ended to responses."""
