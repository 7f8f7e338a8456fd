"""The command line of protomq.

Rules: data on stdout, progress and errors on stderr. Nothing here imports grpc, protobuf or the SDK before a
command runs, so help and completion answer within 0.2 s (a test checks that).
"""
