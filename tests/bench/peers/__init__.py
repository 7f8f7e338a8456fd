"""RocketMQ on the same machine in the same minutes: ours, theirs, ours, theirs (make bench-peers).

Needs a JDK and Maven, which fetch RocketMQ itself. Everything listens on 127.0.0.1; programs, stores and logs stand outside of the
tree, in `protomq-peers` under $TMPDIR. While one side is measured, the processes of the other are stopped (SIGSTOP).
"""
