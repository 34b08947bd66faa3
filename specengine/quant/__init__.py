"""Weight formats: how stored blocks become tensors."""
