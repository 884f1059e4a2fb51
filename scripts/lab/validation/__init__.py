"""The validation of replay: the same traces, token for token, on a real engine and replayed."""
