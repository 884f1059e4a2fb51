"""The worker process: measures signals of the logits before sampling."""
