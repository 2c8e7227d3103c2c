"""What an unfinished run has finished so far, on disk, so that a killed run goes on where it stopped.

One JSON object a line, written as it happens: the identity of the run, then finished requests, and blocks that an arm
has served to the end, with the requests that failed in them. In a block that was not, failed requests are tried again:
whatever ended the run may have ended them. A line a kill cut short is dropped when the file is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import ConfigError
from trtspec.evaluate.record import Failure, RequestRecord, pack_request, unpack_request

JOURNAL_FILE = "run.unfinished.jsonl"


@dataclass(frozen=True, slots=True)
class Served:
    """One block on one arm: its turn among the arms, seconds, tokens, and whether it was served in one go and no
    request failed."""

    turn: int
    seconds: float
    tokens: int
    whole: bool


class Journal:
    """The journal of one run in `folder`. requests, failures (each with its arm), prompts, served: what it held.

    identity: what has to be equal for a run to be the same one. `open` raises ConfigError for a journal of another.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._identity = identity
        self._file = None
        self.requests: list[tuple[str, RequestRecord]] = []
        self.failures: list[tuple[str, Failure]] = []
        self.prompts: dict[tuple[str, str, int], tuple[int, ...]] = {}
        self.served: dict[tuple[int, str], Served] = {}

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any]) -> Journal:
        """The journal in a folder with what it holds; an empty one where there is none yet."""
        journal = cls(folder / JOURNAL_FILE, identity)
        if journal._path.is_file():
            journal._read()
        return journal

    def request(self, arm: str, request: RequestRecord, prompt: tuple[int, ...] | None) -> None:
        """A request finished. prompt: its token ids, where the target reveals them."""
        self._write({"arm": arm, "request": pack_request(request), "prompt": prompt})

    def block(self, index: int, arm: str, served: Served, failures: Sequence[Failure]) -> None:
        """An arm has served a block to its end."""
        failed = [asdict(failure) for failure in failures]
        self._write({"arm": arm, "block": index, "served": asdict(served), "failures": failed})

    def close(self) -> None:
        """Close the file; what it holds stays for the next run."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """The run is finished: its record holds all of this."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = not self._path.is_file()
            self._file = self._path.open("a", encoding="utf-8")
            if new:
                self._write({"identity": self._identity})
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._file.flush()  # a killed process has written it; only a power cut loses it

    def _read(self) -> None:
        whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    entry = json.loads(line) if line.endswith(b"\n") else None
                except json.JSONDecodeError:
                    entry = None
                if entry is None:
                    break
                if number == 0:
                    self._check(entry.get("identity"))
                else:
                    self._take(entry)
                whole += len(line)
        if whole:
            os.truncate(self._path, whole)
        else:
            self._path.unlink()

    def _check(self, identity: Mapping[str, Any] | None) -> None:
        mine = json.loads(json.dumps(self._identity))
        if identity == mine:
            return
        names = [name for name in mine if (identity or {}).get(name) != mine[name]]
        raise ConfigError(
            f"an unfinished run with another {', '.join(names) or 'format'} is here",
            where=str(self._path),
            hint="finish it with its own command, delete this file, or name another --out",
        )

    def _take(self, entry: Mapping[str, Any]) -> None:
        arm = entry["arm"]
        if "request" in entry:
            request = unpack_request(entry["request"])
            self.requests.append((arm, request))
            if entry["prompt"] is not None:
                self.prompts[arm, request.question_id, request.turn] = tuple(entry["prompt"])
        else:
            self.served[entry["block"], arm] = Served(**entry["served"])
            self.failures += [(arm, Failure(**failure)) for failure in entry["failures"]]
