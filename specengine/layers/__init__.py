"""Parts of a decoder that are not operations: rotary tables and weight containers."""
