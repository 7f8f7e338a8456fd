"""A subscription's filter, as members tell it each other."""

from protomq._filters import NO_FILTER, MessageFilter, filter_text

MEMBER_TEXT_MAX_BYTES = 8_192
"""protomq_broker.memberships.FILTER_MAX_BYTES"""


def test_a_long_filter_keeps_nobody_out_of_its_group() -> None:
    tags = tuple(f"tag-{number:0>120}" for number in range(256))
    others = (*tags[1:], "another")
    sql = MessageFilter(2, f"a = '{'ü' * 8_000}'")
    texts = [filter_text(tags, NO_FILTER), filter_text(others, NO_FILTER), filter_text((), sql)]
    assert all(len(text.encode()) <= MEMBER_TEXT_MAX_BYTES for text in texts)
    assert len(set(texts)) == 3
    assert filter_text(tags[::-1], NO_FILTER) == texts[0]
    assert texts[0].startswith(f"tags {tags[0]}, {tags[1]}, ")


def test_a_filter_that_brokers_take_is_told_whole() -> None:
    text = f"a = '{'x' * (MEMBER_TEXT_MAX_BYTES - 10)}'"
    assert filter_text((), MessageFilter(2, text)) == f"sql {text}"
    assert filter_text((), NO_FILTER) == ""
