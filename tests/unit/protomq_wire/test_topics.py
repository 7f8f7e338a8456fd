"""Names and classes of topics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.topics import (
    GROUP_NAME_LENGTH_MAX,
    OFFSETS_TOPIC,
    RULES,
    TopicClass,
    class_of,
    dead_letter_topic,
    group_of,
    is_stored_name,
    is_user_name,
    retry_topic,
    rules_of,
    why_no_group,
)

GROUPS = st.text("abzAZ09_-", min_size=1, max_size=GROUP_NAME_LENGTH_MAX)


@pytest.mark.parametrize(
    ("name", "stored", "user"),
    [
        ("flights", True, True),
        ("A-z_09", True, True),
        ("%RETRY%group", True, False),
        ("x" * 127, True, True),
        ("x" * 128, False, False),
        ("", False, False),
        ("a/b", False, False),
        ("a.b", False, False),
        ("ä", False, False),
        ("a\n", False, False),
    ],
)
def test_names_that_topics_can_have(name: str, stored: bool, user: bool) -> None:
    assert (is_stored_name(name), is_user_name(name)) == (stored, user)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orders", TopicClass.USER),
        ("RETRY", TopicClass.USER),
        (OFFSETS_TOPIC, TopicClass.SYSTEM),
        ("%RETRY%", TopicClass.SYSTEM),
        ("%RETRY%a%b", TopicClass.SYSTEM),
        ("%OTHER%group", TopicClass.SYSTEM),
        ("%RETRY%" + "g" * 121, TopicClass.SYSTEM),
        ("%RETRY%group", TopicClass.RETRY),
        ("%DLQ%group", TopicClass.DEAD_LETTER),
    ],
)
def test_the_class_of_a_topic(name: str, expected: TopicClass) -> None:
    assert class_of(name) is expected


@given(GROUPS)
def test_a_group_has_its_topics_and_they_lead_back_to_it(group: str) -> None:
    for topic in (retry_topic(group), dead_letter_topic(group)):
        assert is_stored_name(topic)
        assert not is_user_name(topic)
        assert group_of(topic) == group
    assert group_of(group) is None
    assert not why_no_group(group)


def test_clients_write_only_their_own_topics_and_read_none_of_the_system() -> None:
    assert set(RULES) == set(TopicClass)
    assert [each for each in TopicClass if RULES[each].send] == [TopicClass.USER]
    assert [each for each in TopicClass if RULES[each].create] == [TopicClass.USER]
    assert [each for each in TopicClass if not RULES[each].pull] == [TopicClass.SYSTEM]
    assert rules_of("%DLQ%group").pull
