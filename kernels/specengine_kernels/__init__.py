"""Triton kernels, each with one typed launcher; imports torch and triton only, and is called by `specengine.ops` alone."""
