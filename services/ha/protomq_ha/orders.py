"""How an operator's order gets into etcd beside another one that stands there. Values only.

- The same order is left once: left again, it changes nothing.
- An unclean promotion replaces any other order while etcd names no master. Nobody would take a switch then, and the member of an earlier
  promotion may be gone for good. An election by order, a hand-over and a taking back compare with the order's key. So whoever had begun to
  act on the order that was there can no longer succeed, or has succeeded first. Then this transaction fails.
- An order that stands can be withdrawn, also while somebody acts on it: as above, one of the two fails. The id of that request stays
  in etcd. So a request whose answer was lost may come again, to another broker: it takes no later order away, and is answered as at first.
- All other orders wait. While etcd names a master, that one takes the order there within moments, or its lease runs out.
- Of two operators that have seen the same order, one at most replaces it.
"""

from __future__ import annotations

from .cluster_state import (
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    WITHDRAWN,
    ClusterView,
    Compare,
    Put,
    Transaction,
    Withdrawn,
    encode_order,
    encode_withdrawn,
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


def to_withdraw(view: ClusterView, request_id: str = "") -> Transaction | None:
    """Returns what takes the order away that stands; None: there is none, or this request has taken one away before.

    `request_id`: a random text; "": an earlier version asks.
    """
    revision = view.key_revision(ORDER)
    if not revision or withdrawn_by(view, request_id) is not None:
        return None
    puts = (Put(WITHDRAWN, encode_withdrawn(Withdrawn(request_id, standing_order(view)))),) if request_id else ()
    return Transaction((Compare(ORDER, revision),), puts, (ORDER,))


def withdrawn_by(view: ClusterView, request_id: str) -> str | None:
    """The order that this request has taken away; None: it has taken none, or another one has been withdrawn since."""
    withdrawn = view.withdrawn
    return withdrawn.order if withdrawn is not None and request_id and withdrawn.request_id == request_id else None


def standing_order(view: ClusterView) -> str:
    """The order that stands, for an operator; "": there is none."""
    order = view.order
    if order is None:
        return ""
    target = view.named(frozenset({order.target})) if order.target else "whichever is furthest"
    return f"switch to {target}" if order.kind == SWITCH else f"promotion of {target}"


def _waiting(view: ClusterView) -> str:
    """Which order stands, and what it waits for as far as one sees."""
    order, master = view.order, view.master
    assert order is not None
    if order.kind == SWITCH:
        why = f"for {master.named}, which takes it soon or is gone" if master is not None else "until somebody leads"
    else:
        why = f"until etcd names no master: now it names {master.named}" if master is not None else "for that member to take it"
    instead = "" if master is not None else ". The unclean promotion of a member replaces it"
    return f"{standing_order(view)}. It waits {why}{instead}. Try again then, or withdraw it (protomq ha cancel)"
