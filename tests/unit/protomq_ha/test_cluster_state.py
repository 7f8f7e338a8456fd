from __future__ import annotations

import pytest

from protomq_ha.cluster_state import (
    IN_SYNC,
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    ClusterView,
    Compare,
    LogEnd,
    MemberName,
    Put,
    Row,
    Transaction,
    encode_end,
    encode_in_sync,
    encode_master,
    encode_name,
    encode_order,
)


def test_what_is_written_is_read_again() -> None:
    rows = {
        MASTER: Row(encode_master("m1", 3, "host:1"), 7, 99),
        IN_SYNC: Row(encode_in_sync(3, frozenset({"m2", "m1"}), "m2", unclean_epoch=2), 8),
        ORDER: Row(encode_order(SWITCH, ""), 9),
    }
    view = ClusterView(12, rows)
    assert view.master == ("m1", 3, "host:1", 7, 99)
    assert view.in_sync == (3, frozenset({"m1", "m2"}), "m2", 8, False, 2)
    assert view.order == (SWITCH, "", 9)
    assert [view.key_revision(key) for key in (MASTER, IN_SYNC, ORDER, "other")] == [7, 8, 9, 0]


def test_the_name_of_a_member_is_for_people_so_one_that_nobody_can_read_is_none() -> None:
    rows = {"name/m1": Row(encode_name(MemberName(2, "host:1")), 7), "name/m2": Row(b"{}", 8)}
    assert ClusterView(8, rows).names == {"m1": MemberName(2, "host:1")}


def test_a_member_of_the_set_is_never_named_in_vain() -> None:
    rows = {f"name/m{number}": Row(encode_name(MemberName(2, "host:1")), 7) for number in (1, 2)}
    assert ClusterView(8, rows).named_in_vain(2) == {"m1", "m2"}
    rows[IN_SYNC] = Row(encode_in_sync(3, frozenset({"m2"}), unclean_epoch=0), 8)
    assert ClusterView(8, rows).named_in_vain(2) == {"m1"}
    assert ClusterView(8, rows).named_in_vain(3) == frozenset()


def test_nothing_is_there_at_first() -> None:
    view = ClusterView(1, {})
    assert (view.master, view.in_sync, view.order, view.key_revision(MASTER)) == (None, None, None, 0)


def test_a_view_behind_a_transaction() -> None:
    view = ClusterView(1, {ORDER: Row(encode_order(SWITCH, "m2"), 1)})
    made = Transaction(
        (Compare(MASTER, 0),), (Put(MASTER, encode_master("m1", 1, "a"), 5),), (ORDER,)
    )
    after = view.after(made, 4)
    assert (after.revision, after.order) == (4, None)
    assert after.master == ("m1", 1, "a", 4, 5)
    assert view.order is not None, "a view never changes"


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"3", b"[]", b"{}", b'{"member": "m", "epoch": "1", "address": ""}', b'{"member": "m", "epoch": true, "address": ""}'],
)  # fmt: skip
def test_a_value_that_no_broker_has_written_is_named(value: bytes) -> None:
    for key in (MASTER, IN_SYNC, ORDER):
        with pytest.raises(ValueError, match=f"key '{key}' in etcd has .* which no broker has written"):
            ClusterView(1, {key: Row(value, 1)})


def test_members_must_be_names() -> None:
    row = Row(b'{"epoch": 1, "members": [1], "successor": ""}', 1)
    with pytest.raises(ValueError, match="members that are no names"):
        ClusterView(1, {IN_SYNC: row})


def test_a_set_that_an_earlier_version_has_written_is_read() -> None:
    row = Row(b'{"epoch": 1, "members": ["m"], "successor": ""}', 4)
    assert ClusterView(1, {IN_SYNC: row}).in_sync == (1, frozenset("m"), "", 4, False, 0)
    wrong = Row(b'{"epoch": 1, "members": ["m"], "successor": "", "is_given_back": 1}', 4)
    with pytest.raises(ValueError, match="which no broker has written"):
        ClusterView(1, {IN_SYNC: wrong})


def test_ends_of_logs_are_read_by_member() -> None:
    view = ClusterView(3, {"end/m1": Row(encode_end(LogEnd(2, 700)), 3, 9)})
    assert view.ends == {"m1": LogEnd(2, 700)}
    assert ClusterView(3, {"end/m1": Row(encode_end(LogEnd(2, 7, is_cut=True)), 3, 9)}).ends["m1"].is_cut
    earlier = ClusterView(3, {"end/m1": Row(b'{"epoch": 2, "position": 7}', 3, 9)})
    assert earlier.ends == {"m1": LogEnd(2, 7)}, "as brokers of earlier versions write it"
    assert LogEnd(3, 100) > LogEnd(2, 700) > LogEnd(2, 600)
    rows = {f"end/m{number}": Row(value, 3, 9) for number, value in enumerate([b"{}", b"\xff", b"[]", encode_end(LogEnd(1, 5))])}
    assert ClusterView(3, rows).ends == {"m3": LogEnd(1, 5)}, "an end that nobody can read keeps nobody from leading"


def test_an_order_is_one_that_can_be_carried_out() -> None:
    with pytest.raises(ValueError, match="switch or promote_unclean, not 'dance'"):
        encode_order("dance", "m1")
    with pytest.raises(ValueError, match="names its member"):
        encode_order(PROMOTE_UNCLEAN, "")
