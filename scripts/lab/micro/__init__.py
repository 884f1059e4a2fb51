"""Times single operations on the CPU, without a model."""
