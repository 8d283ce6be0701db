"""The Open Inference Protocol (KServe v2), as Triton's LLM backends use it."""
