"""Replication: who has what, who is in sync, what is confirmed. Values in, values out: the broker has the sockets and the disk.

    roles      what a broker is, and the numbers of replication
    replicas   a master's table of its slaves
    intake     what a slave was sent, in any order, as one run of bytes

Who leads, decided in etcd. The broker drives it in `leadership_driver.py`.

    cluster_state        keys and values in etcd
    in_sync_set          who has all that was acknowledged, as the master has to take it
    etcd_json            requests and answers as etcd's JSON gateway has them
    leadership           one broker's part: follow, run, lead, hand over (leadership_values: what it is told and says)
"""
