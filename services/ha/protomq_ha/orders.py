"""How an operator's order gets into etcd beside another one that stands there. Values only.

- The same order is left once: left again, it changes nothing.
- An unclean promotion replaces any other order while etcd names no master. Nobody would take a switch then, and the member of an earlier
  promotion may be gone for good. An election by order, a hand-over and a taking back compare with the order's key. So whoever had begun to
  act on the order that was there can no longer succeed, or has succeeded first. Then this transaction fails.
- All other orders wait. While etcd names a master, that one takes the order there within moments, or its lease runs out.
- Of two operators that have seen the same order, one at most replaces it.
"""

from __future__ import annotations

from .cluster_state import (
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    ClusterView,
    Compare,
    Put,
    Transaction,
    encode_order,
)


class OrderStandsError(Exception):
    """Another order is there, and this one does not replace it."""


def to_leave(view: ClusterView, kind: str, target: str) -> Transaction | None:
    """Returns what leaves an order; None: it stands already. Raises OrderStandsError."""
    standing = view.order
    compares = [Compare(ORDER, view.key_revision(ORDER))]
    if standing is not None:
        if (standing.kind, standing.target) == (kind, target):
            return None
        if kind != PROMOTE_UNCLEAN or view.master is not None:
            raise OrderStandsError(_waiting(view))
        compares.append(Compare(MASTER, 0))
    return Transaction(tuple(compares), (Put(ORDER, encode_order(kind, target)),))


def _waiting(view: ClusterView) -> str:
    """Which order stands, and what it waits for as far as one sees."""
    order, master = view.order, view.master
    assert order is not None
    target = view.named(frozenset({order.target})) if order.target else "whichever is furthest"
    if order.kind == SWITCH:
        what = f"switch to {target}"
        why = f"for {master.named}, which takes it soon or is gone" if master is not None else "until somebody leads"
    else:
        what = f"promotion of {target}"
        why = f"until etcd names no master: now it names {master.named}" if master is not None else "for that member to take it"
    instead = "" if master is not None else ", or order the unclean promotion of a member: it replaces this order"
    return f"{what}. It waits {why}. Try again then{instead}"
