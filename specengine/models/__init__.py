"""Models: one configurable decoder, the families it serves, and loading from safetensors and GGUF."""
