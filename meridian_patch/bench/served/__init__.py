"""Real servers, stock and patched, on the same requests."""
