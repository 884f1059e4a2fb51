"""The API server process: request fields in, how thinking ended out."""
