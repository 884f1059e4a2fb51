"""An emulated GPU: a real vLLM engine whose steps last as long as a cost model says."""
