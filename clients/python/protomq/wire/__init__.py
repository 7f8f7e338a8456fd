"""The bytes that both sides agree on: record layout, hashes, remoting frames, error status.

Pure functions and constants; no sockets, no clocks. Servers, the SDK and the Spark package share them.
"""
