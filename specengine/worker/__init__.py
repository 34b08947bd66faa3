"""The worker: carries out one plan after another (propose, build, forward, verify, compact, observe)."""
