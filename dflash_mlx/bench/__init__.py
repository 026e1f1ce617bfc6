"""Benchmarks: what was run, what was measured, and the definition beside each number."""
