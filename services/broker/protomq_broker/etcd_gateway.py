"""A client of etcd's JSON gateway: each request gives one answer, or none within the time-out.

The client tries endpoints in turn, first the one that answered last. It sends a transaction to a second endpoint only if the first cannot
have seen it. Otherwise the outcome is unknown, and leadership.py reads the keys to find it out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

import httpx

from protomq_ha.cluster_state import Transaction
from protomq_ha.etcd_json import path_and_body, refusal_of, result_of
from protomq_ha.leadership_values import Refused, Request, Result

log = logging.getLogger("protomq.broker")
# httpx logs every request at INFO.
logging.getLogger("httpx").setLevel(logging.WARNING)

CONNECT_TIMEOUT_S: Final = 0.3
ANSWER_TIMEOUT_S: Final = 1.0
"""Time-out of one endpoint. An etcd that is electing its own leader answers nothing for about this long."""
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _RefusedError(Exception):
    """Etcd answers that it does not do it."""


class EtcdGateway(Protocol):
    """What leadership needs of etcd."""

    def ask(self, request: Request) -> Result:
        """Returns the answer; None if there is none, or it cannot be read. Any thread. May take one second for each endpoint."""
        ...

    def close(self) -> None:
        """No more is asked."""
        ...


class HttpEtcd:
    """The gateway over HTTP. Any thread. Attribute: problem: why the last request got no answer, "" if it got one."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`endpoints`: URLs. `prefix`: prefix of all keys. `transport`: replaces the network in tests."""
        self._endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        self._prefix = prefix
        self._first = 0
        self.problem = ""
        self._refusals: set[str] = set()
        """Why it has refused something since it took a write last."""
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # Ignores the environment's proxy: etcd stands beside the broker.
        self._client = httpx.Client(timeout=timeout, transport=transport, trust_env=False)

    def ask(self, request: Request) -> Result:
        """See EtcdGateway."""
        path, body = path_and_body(request, self._prefix)
        first, problems, refusal = self._first, [], ""
        for turn in range(len(self._endpoints)):
            index = (first + turn) % len(self._endpoints)
            endpoint = self._endpoints[index]
            try:
                result = result_of(request, self._prefix, self._post(f"{endpoint}{path}", body))
            except _RefusedError as error:
                refusal = str(error)
                if isinstance(request, Transaction):
                    break
                continue
            except (httpx.HTTPError, ValueError) as error:
                problems.append(f"{endpoint}: {str(error) or type(error).__name__}")
                if isinstance(request, Transaction) and not isinstance(error, _NOT_SENT):
                    self._first = (index + 1) % len(self._endpoints)
                    break
                continue
            self._first = index
            self._complain("")
            if isinstance(request, Transaction) and request.puts and self._refusals:
                self._refusals.clear()
                log.warning("etcd takes writes again")
            return result
        if refusal:
            self._complain("")
            self._note_refusal(refusal)
            return Refused(refusal)
        self._complain("; ".join(problems))
        return None

    def close(self) -> None:
        """See EtcdGateway."""
        self._client.close()

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._client.post(url, json=body)
        if refusal := refusal_of(response.content):
            raise _RefusedError(refusal)
        if response.is_error:
            raise ValueError(f"HTTP {response.status_code} {response.text[:200]}")
        answer = response.json()
        if not isinstance(answer, dict):
            raise ValueError(f"etcd answered {response.text[:200]}")
        return answer

    def _complain(self, problem: str) -> None:
        """Logs a problem once when it begins and once when it ends."""
        before, self.problem = self.problem, problem
        if problem and not before:
            log.warning("etcd does not answer: %s", problem)
        elif before and not problem:
            log.warning("etcd answers again")

    def _note_refusal(self, refusal: str) -> None:
        """Logs each reason once, until etcd takes a write. Renewals and looks may be answered all the time."""
        if refusal not in self._refusals:
            self._refusals.add(refusal)
            log.warning("etcd refuses requests: %s. Nobody can take over until it takes a write", refusal)
