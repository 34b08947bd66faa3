"""Speculation: drafters propose trees, rules of acceptance decide them. Knows nothing of requests or HTTP."""
