"""The generated stubs of protomq.v1: made by tools/generate_stubs.py, do not edit."""
