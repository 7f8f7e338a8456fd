"""Runs of stored records for tests of filters."""

import numpy as np

from protomq.wire.record import RecordTemplate, encode_front, encode_record_field


def run_of(*messages):
    """(data, starts, sizes) of records, each given by `body`, `keys`, `tag`, `properties`, all optional."""
    template = RecordTemplate("flights", 7, 1)
    data, starts, sizes = b"", [], []
    for sequence, message in enumerate(messages):
        front = encode_front(
            message.get("keys", ()), message.get("tag", ""), message.get("properties")
        )
        record = template.encode(
            message.get("body", b""), sequence, 1_700_000_000_000 + sequence, front=front
        )
        field = encode_record_field(record)
        starts.append(len(data))
        sizes.append(len(field))
        data += field
    return data, np.array(starts), np.array(sizes)


def all_matching(filter_, data, starts, sizes):
    """The indexes of all matches of a run, however few records a filter examines at once."""
    found, first = [], 0
    while first < len(starts):
        matches = filter_.matching(data, starts[first:], sizes[first:])
        assert 0 < matches.examined <= len(starts) - first
        assert all(index < matches.examined for index in matches.indexes)
        found += [first + index for index in matches.indexes]
        first += matches.examined
    return found
