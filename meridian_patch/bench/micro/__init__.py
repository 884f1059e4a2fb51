"""What single operations cost on the CPU, without a model."""
