"""The KV cache manager whose free blocks stand in tiers."""
