"""Scheduling, blocks and budgets in pure Python: counts, never tensors."""
