"""One model on one device: KV cache, sequence table, batches and the forward pass; used by target and draft alike."""
