"""Benchmarks: configurations, their data, and the results. See README.md."""
