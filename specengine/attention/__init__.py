"""Attention backends: how a batch's rows attend to the KV cache. One file each; `base` says what a backend promises."""
