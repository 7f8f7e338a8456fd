"""Replication: who has what, who is in sync, what is confirmed. Values in, values out: the broker has the sockets and the disk.

    roles      what a broker is, and the numbers of replication
    replicas   a master's table of its slaves
    intake     what a slave was sent, in any order, as one run of bytes
"""
