"""The engine loop, its process, and the two ways to talk to it: `LLM` (offline) and `AsyncLLM`."""
