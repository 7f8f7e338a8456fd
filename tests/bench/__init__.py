"""Benchmarks: `python -m tests.bench` (make bench), `python -m tests.bench.peers` (make bench-peers).

Rules:
- Clients and servers are separate processes that share the machine; a load runs in a process of its own (`worker`).
- Ratios are taken within one run, interleaved (ABAB), from medians. Absolute figures are for orientation only.
- Latencies count from the moment at which a call was meant to start.

Ladder: `process` < `measure`, `loads/` (run in workers), `limits` (bare loops) < `rows/` (what is measured) < `report` < `__main__`.
"""
