"""The OpenAI-compatible HTTP server; a client of the engine, without torch."""
