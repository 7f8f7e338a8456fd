"""The Spark package against the SDK, and against Spark's own Kafka source and sink with a real Kafka.

Kafka's connector runs in the Spark that it was released for (4.0.0, the newest for which all of its jars are to be had), ours in the
one that we support, each in a session of its own that stays warm; while one is measured, the other's processes are stopped.
"""
