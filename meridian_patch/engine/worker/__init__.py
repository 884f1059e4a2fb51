"""The worker process: signals of the logits that are sampled from."""
