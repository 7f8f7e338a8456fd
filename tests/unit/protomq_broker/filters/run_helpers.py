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
