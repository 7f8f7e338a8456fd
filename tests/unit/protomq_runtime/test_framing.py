"""The frame reader against every way in which a stream can be cut, and against damage."""

import random

import pytest

from protomq.wire.frames import FLAG_ANSWER, FLAG_ONE_WAY, HEADER, encode_answer, encode_request
from protomq_runtime.framing import (
    LARGE_SIZE_BYTES,
    LARGE_STEP_BYTES,
    MARKS_MAX,
    SHARED_BUFFER_SIZE_BYTES,
    Frame,
    FrameError,
    FrameReader,
)

SIZE_MAX_BYTES = 4 << 20


def request(
    request_id: int, payload: bytes, timeout_ms: int = 0, *, one_way: bool = False
) -> bytes:
    return encode_request(request_id, 0x0201, len(payload), timeout_ms, one_way=one_way) + payload


def feed(reader: FrameReader, shared: memoryview, data: bytes, pieces: list[int]) -> list[Frame]:
    """Passes `data` to the reader as a socket would, cut at the positions `pieces`."""
    frames: list[Frame] = []
    start = 0
    for end in [*pieces, len(data)]:
        while start < end:
            target = reader.target(shared)
            count = min(len(target), end - start)
            target[:count] = data[start : start + count]
            del target
            frames += reader.received(shared, count)
            start += count
    return frames


@pytest.fixture(scope="module")
def shared() -> memoryview:
    return memoryview(bytearray(SHARED_BUFFER_SIZE_BYTES))


@pytest.fixture
def reader() -> FrameReader:
    return FrameReader(SIZE_MAX_BYTES)


SMALL = [request(1, b"abc", 3000), request(2, b""), request(3, bytes(range(200)), one_way=True)]
SMALL_FRAMES = [
    (1, 0x0201, 0, 3000, b"abc"),
    (2, 0x0201, 0, 0, b""),
    (3, 0x0201, FLAG_ONE_WAY, 0, bytes(range(200))),
]


def test_frames_that_come_whole_are_taken_at_once(reader, shared):
    assert feed(reader, shared, b"".join(SMALL), []) == SMALL_FRAMES
    assert not reader.in_frame


def test_frames_that_come_byte_by_byte_are_the_same(reader, shared):
    data = b"".join(SMALL)
    assert feed(reader, shared, data, list(range(1, len(data)))) == SMALL_FRAMES
    assert not reader.in_frame


def test_frames_cut_at_each_length_are_the_same(shared):
    data = b"".join(SMALL)
    for cut in range(1, len(data)):
        assert feed(FrameReader(SIZE_MAX_BYTES), shared, data, [cut]) == SMALL_FRAMES


@pytest.mark.parametrize("size", [3, LARGE_SIZE_BYTES + 1, SHARED_BUFFER_SIZE_BYTES])
def test_what_no_request_has_in_its_header_is_told(shared, size):
    known = request(9, bytes(size), 7)
    for at, value, marks in ((10, 0xF0, 0xF0), (10, 0xF2, 0xF2), (11, 5, 5 << 8), (10, 2, 2)):
        frame = bytearray(known)
        frame[at] = value
        (found,) = feed(FrameReader(SIZE_MAX_BYTES), shared, bytes(frame), [])
        assert found[2] == marks
        assert (marks > MARKS_MAX) == (value != 2)


def test_a_frame_begun_is_known_as_such(reader, shared):
    assert feed(reader, shared, SMALL[0][:-1], []) == []
    assert reader.in_frame
    assert feed(reader, shared, SMALL[0][-1:], []) == SMALL_FRAMES[:1]
    assert not reader.in_frame


@pytest.mark.parametrize(
    "size",
    [
        LARGE_SIZE_BYTES - 12,
        LARGE_SIZE_BYTES - 11,
        SHARED_BUFFER_SIZE_BYTES - 16,
        SHARED_BUFFER_SIZE_BYTES,
        LARGE_STEP_BYTES,
        LARGE_STEP_BYTES + 1,
        3 * LARGE_STEP_BYTES + 5,
    ],
)
def test_large_frames_come_through_between_small_ones(shared, size):
    payload = random.Random(size).randbytes(size)
    data = SMALL[0] + request(9, payload, 7) + SMALL[1]
    expected = [SMALL_FRAMES[0], (9, 0x0201, 0, 7, payload), SMALL_FRAMES[1]]
    for cuts in (
        [],
        [5],
        [len(SMALL[0])],
        [len(SMALL[0]) + 16],
        [len(SMALL[0]) + 17, len(data) - 30],
        [len(data) - 1],
    ):
        reader = FrameReader(SIZE_MAX_BYTES)
        assert feed(reader, shared, data, cuts) == expected
        assert not reader.in_frame


def test_payloads_above_the_limit_can_be_written_to(reader, shared):
    frames = feed(reader, shared, request(1, bytes(LARGE_SIZE_BYTES)) + request(2, bytes(100)), [])
    assert [type(frame[4]) for frame in frames] == [bytearray, bytes]


def test_a_claimed_size_costs_no_memory_until_it_is_sent(shared):
    reader = FrameReader(1 << 30)
    feed(reader, shared, HEADER.pack((1 << 30) - 1, 1, 1, 0, 0, 0) + b"x", [])
    assert len(reader.target(shared)) < LARGE_STEP_BYTES


@pytest.mark.parametrize("length", [0, 11, SIZE_MAX_BYTES + 1, 0xFFFFFFFF])
def test_an_impossible_length_is_an_error(reader, shared, length):
    with pytest.raises(FrameError, match=str(length)):
        feed(reader, shared, HEADER.pack(length, 1, 1, 0, 0, 0), [])


def test_the_largest_allowed_frame_is_taken(shared):
    payload = bytes(1000)
    assert len(feed(FrameReader(1012), shared, request(1, payload), [])) == 1
    with pytest.raises(FrameError):
        feed(FrameReader(1011), shared, request(1, payload), [])


def test_an_answer_is_not_a_request(reader, shared):
    assert encode_answer(1, 1, 0)[10] == FLAG_ANSWER
    with pytest.raises(FrameError, match="answer"):
        feed(reader, shared, encode_answer(1, 1, 0), [])


def test_a_flipped_bit_gives_other_frames_or_an_error_and_nothing_else(shared):
    data = b"".join(SMALL)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            try:
                frames = feed(FrameReader(SIZE_MAX_BYTES), shared, bytes(damaged), [])
            except FrameError:
                continue
            assert len(frames) <= len(data) // 16


def test_random_streams_cut_at_random_are_read_as_they_were_written(shared):
    rng = random.Random(7)
    for _ in range(30):
        sizes = [
            rng.choice([0, 1, 15, 16, 17, 300, 40_000, 300_000]) for _ in range(rng.randint(1, 6))
        ]
        payloads = [rng.randbytes(size) for size in sizes]
        data = b"".join(request(index, payload) for index, payload in enumerate(payloads))
        cuts = sorted(rng.sample(range(1, len(data)), min(5, len(data) - 1)))
        frames = feed(FrameReader(SIZE_MAX_BYTES), shared, data, cuts)
        assert [(frame[0], frame[4]) for frame in frames] == list(enumerate(payloads))
