"""Server-sent events over HTTP, as the clients of OpenAI-compatible servers and of Triton's generate_stream read them.

One connection a request, kept for the next one. Every event carries the moment it was read.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from trtspec.errors import ConfigError
from trtspec.serve.client import RequestFailed

_TIMEOUT_S = 600.0


class EventClient:
    """A server at `url`, for any number of threads. path: of the URL, `default_path` where it has none.

    Sends TRTSPEC_API_KEY as a bearer token where that is set. Raises ConfigError for another kind of URL.
    """

    def __init__(self, url: str, default_path: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "not an http:// or https:// URL",
                where=url,
                hint=f"such as http://127.0.0.1:8000{default_path}",
            )
        https = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        self._address = parts.hostname, parts.port or (443 if https else 80)
        self.path = parts.path.rstrip("/") or default_path
        self._idle: list[http.client.HTTPConnection] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def events(
        self, path: str, fields: Mapping[str, Any], request_id: str
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """Post `fields` as JSON; (`time.perf_counter()` at receipt, event) of the answer, up to its end or `[DONE]`.

        Raises RequestFailed when the server refuses the request, is not there, or breaks off.
        """
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        connection, response = self._send("POST", path, json.dumps(fields).encode(), headers)
        whole = False
        try:
            if response.status != 200:
                words = response.read(2000).decode("utf-8", "replace")
                raise RequestFailed(words or response.reason, code=str(response.status), where=request_id)
            while line := response.readline():
                at = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    response.read()
                    break
                yield at, json.loads(data)
            whole = response.isclosed()
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise RequestFailed(
                f"the stream broke: {error!r}", code="INCOMPLETE", where=request_id
            ) from error
        finally:
            self._give_back(connection, reusable=whole)

    def get(self, path: str) -> str:
        """The body of an answer, whatever its status. Raises RequestFailed when there is none."""
        connection, response = self._send("GET", path, None, {})
        try:
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            self._give_back(connection, reusable=False)
            raise RequestFailed(f"the answer broke: {error!r}", code="INCOMPLETE", where=path) from error
        self._give_back(connection, reusable=True)
        return text

    def close(self) -> None:
        """Ends what runs; calling it twice is harmless."""
        with self._lock:
            connections = [*self._idle, *self._open]
            self._idle.clear()
        for connection in connections:
            if connection.sock is not None:
                # Whoever still reads from it sees its end; that the server was faster is no error.
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        key = os.environ.get("TRTSPEC_API_KEY")
        headers = {**headers, "Authorization": f"Bearer {key}"} if key else headers
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
                connection = kept or self._kind(*self._address, timeout=_TIMEOUT_S)
                self._open.add(connection)
            try:
                connection.request(method, path, body, headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._give_back(connection, reusable=False)
                if kept is None:
                    where = f"{self._address[0]}:{self._address[1]}"
                    raise RequestFailed(f"no answer: {error!r}", code="UNAVAILABLE", where=where) from error
                # A connection kept from an earlier request may have been closed since; a new one tells.

    def _give_back(self, connection: http.client.HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            self._open.discard(connection)
            if reusable:
                self._idle.append(connection)
        if not reusable:
            connection.close()
