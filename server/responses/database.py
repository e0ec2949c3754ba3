"""Stored responses in SQLite: what was asked, what was answered, and in which conversation.

A response keeps its whole conversation, by reference: items are rows of their own, shared by the responses of
a chain, and go with the last response that holds them. So an early response of a chain may be deleted, or
evicted, and later ones stay whole.

Several processes may use one file: every operation is one transaction, and the file is in WAL mode, so that a
process that dies in the middle leaves it as it was before.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chairlift.server.payload import Payload, dump
from chairlift.server.responses.caller import ANYBODY, Caller

SCHEMA_VERSION = 2
ROW_BYTES = 64
"""What a row costs beside its text, about; an item's place in a conversation is one, too."""
BUSY_S = 10.0
"""Seconds to wait for another process's transaction."""

SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    created REAL NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL,
    owner TEXT,
    body TEXT NOT NULL,
    events BLOB,
    tenant TEXT
) WITHOUT ROWID;
CREATE INDEX responses_by_use ON responses (used);
CREATE TABLE items (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    uses INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX items_by_id ON items (id);
CREATE TABLE conversations (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    position INTEGER NOT NULL,
    item INTEGER NOT NULL,
    output INTEGER NOT NULL,
    PRIMARY KEY (response, position)
) WITHOUT ROWID;
CREATE INDEX conversations_by_item ON conversations (item);
CREATE TABLE owners (id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE total (bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE total SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER item_removed AFTER DELETE ON items BEGIN
    UPDATE total SET bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER place_added AFTER INSERT ON conversations BEGIN
    UPDATE items SET uses = uses + 1 WHERE number = NEW.item;
END;
CREATE TRIGGER place_removed AFTER DELETE ON conversations BEGIN
    UPDATE items SET uses = uses - 1 WHERE number = OLD.item;
    DELETE FROM items WHERE number = OLD.item AND uses <= 0;
END;
"""


FROM_VERSION_1 = """
ALTER TABLE responses ADD COLUMN tenant TEXT;
CREATE INDEX conversations_by_item ON conversations (item);
"""
REACHED = "(? OR responses.tenant IS NULL OR responses.tenant = ?)"
"""As `Caller.reaches`."""


class StoreFault(Exception):
    """The store cannot be opened, read or written. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Bounds:
    count: int
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """One response as it is kept. `body` is without its output, which stands among the items."""

    body: Payload
    conversation: tuple[Payload, ...]
    """Its input, earlier responses' items included."""
    output: tuple[Payload, ...]
    owner: str | None = None
    """The process that is still answering it."""
    events: bytes | None = None
    tenant: str | None = None
    """Whose key has made it (`Caller.tenant`)."""

    @property
    def response(self) -> Payload:
        return {**self.body, "output": list(self.output)}


class ResponseDatabase:
    """For one thread.

    Args:
        path: None keeps everything in memory.
        clock: seconds since 1970.

    Raises:
        StoreFault: the file cannot be opened, or is no store of ours.
    """

    def __init__(self, path: Path | None, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        self._name = "in memory" if path is None else str(path)
        self._bounds = bounds
        self._clock = clock
        try:
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreFault(f"The store of responses {path} cannot be opened: {error}") from error
        try:
            self._prepare(path)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path | None) -> None:
        try:
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.execute("PRAGMA secure_delete = ON")
            # Before anything of the file is changed: it may be somebody else's.
            with self._transaction() as connection:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if version == 0 and not tables:
                    script = SCHEMA
                elif version == 1:
                    script = FROM_VERSION_1
                elif version == SCHEMA_VERSION:
                    script = ""
                else:
                    raise StoreFault(f"{path} is not a store of responses of this version of Chairlift.")
                for statement in _statements(script):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._write_ahead()
        except sqlite3.Error as error:
            raise StoreFault(f"The store of responses {path} cannot be used: {error}") from error

    def _write_ahead(self) -> None:
        """Into WAL mode, for which SQLite does not wait while another process is about to do the same."""
        until = time.monotonic() + BUSY_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute(f"PRAGMA journal_size_limit = {2**24}")

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises: StoreFault."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreFault(f"The store of responses {self._name} failed: {error}") from error

    # -- writing

    def put(self, id: str, stored: Stored, *, anew: bool = True) -> bool:
        """Keep a response, in place of what was kept under its id; then evict what is over the bounds, the
        least recently used first, and what is still being answered last.

        Args:
            anew: False: only in place of what is there.

        Returns: False: it is larger than all that may be kept, or not there, and is not kept.
        """
        now = self._clock()
        body = dump(stored.body).decode()
        places = len(stored.conversation) + len(stored.output)
        size = len(body.encode()) + len(stored.events or b"") + ROW_BYTES * (1 + places)
        with self._transaction() as connection:
            before = connection.execute("SELECT created FROM responses WHERE id = ?", (id,)).fetchone()
            if before is None and not anew:
                return False
            connection.execute("DELETE FROM responses WHERE id = ?", (id,))
            connection.execute(
                "INSERT INTO responses (id, created, used, bytes, owner, body, events, tenant) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(id, before[0] if before else now, now, size),
                    *(stored.owner, body, stored.events, stored.tenant),
                ),
            )
            position = 0
            for items, output in ((stored.conversation, 0), (stored.output, 1)):
                for item in items:
                    connection.execute(
                        "INSERT INTO conversations VALUES (?, ?, ?, ?)",
                        (id, position, _keep(connection, item), output),
                    )
                    position += 1
            self._evict(connection, now, keep=id)
            kept = self._total(connection) <= self._bounds.bytes
            if not kept:
                connection.execute("DELETE FROM responses WHERE id = ?", (id,))
            return kept

    def _evict(self, connection: sqlite3.Connection, now: float, keep: str) -> None:
        connection.execute(
            "DELETE FROM responses WHERE used < ? AND id <> ?", (now - self._bounds.age_s, keep)
        )
        while (
            connection.execute("SELECT count(*) FROM responses").fetchone()[0] > self._bounds.count
            or self._total(connection) > self._bounds.bytes
        ):
            oldest = connection.execute(
                "SELECT id FROM responses WHERE id <> ? ORDER BY owner IS NOT NULL, used LIMIT 1", (keep,)
            ).fetchone()
            if oldest is None:
                return
            connection.execute("DELETE FROM responses WHERE id = ?", oldest)

    def _total(self, connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT bytes FROM total").fetchone()[0])

    def delete(self, id: str, caller: Caller = ANYBODY) -> bool:
        """False: there is none for this caller."""
        with self._transaction() as connection:
            statement = f"DELETE FROM responses WHERE id = ? AND {REACHED}"
            return connection.execute(statement, (id, caller.everything, caller.tenant)).rowcount > 0

    def seen(self, owner: str) -> None:
        """`owner` is still at work."""
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (owner, self._clock()))

    # -- reading

    def get(self, id: str, caller: Caller = ANYBODY, *, use: bool = False) -> Stored | None:
        """None: there is none for this caller. Args: use: it counts as used now, and is evicted later."""
        now = self._clock()
        with self._transaction() as connection:
            row = connection.execute(
                f"SELECT body, owner, events, tenant FROM responses WHERE id = ? AND used >= ? AND {REACHED}",
                (id, now - self._bounds.age_s, caller.everything, caller.tenant),
            ).fetchone()
            if row is None:
                return None
            if use:
                connection.execute("UPDATE responses SET used = ? WHERE id = ?", (now, id))
            items = connection.execute(
                "SELECT body, output FROM conversations JOIN items ON number = item WHERE response = ? "
                "ORDER BY position",
                (id,),
            ).fetchall()
        body, owner, events, tenant = row
        conversation = tuple(json.loads(text) for text, output in items if not output)
        return Stored(
            json.loads(body),
            conversation,
            tuple(json.loads(text) for text, output in items if output),
            owner,
            events,
            tenant,
        )

    def find_items(self, ids: Sequence[str], caller: Caller = ANYBODY) -> dict[str, Payload]:
        """The newest item of each id that is kept of a response which the caller reaches."""
        found: dict[str, Payload] = {}
        with self._transaction() as connection:
            for id in ids:
                row = connection.execute(
                    "SELECT body FROM items WHERE id = ? AND EXISTS (SELECT 1 FROM conversations "
                    "JOIN responses ON responses.id = response WHERE item = number AND "
                    f"{REACHED}) ORDER BY number DESC LIMIT 1",
                    (id, caller.everything, caller.tenant),
                ).fetchone()
                if row is not None:
                    found[id] = json.loads(row[0])
        return found

    def is_alive(self, owner: str, patience_s: float) -> bool:
        with self._transaction() as connection:
            row = connection.execute("SELECT seen FROM owners WHERE id = ?", (owner,)).fetchone()
        return row is not None and self._clock() - float(row[0]) <= patience_s


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    # Conversations are private: nobody but the owner reads the file (its companions take its mode).
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _keep(connection: sqlite3.Connection, item: Payload) -> int:
    """The row of an item; items that are equal share one."""
    body = dump(item).decode()
    row = connection.execute(
        "SELECT number FROM items WHERE id = ? AND body = ?", (item["id"], body)
    ).fetchone()
    if row is not None:
        return int(row[0])
    number = connection.execute(
        "INSERT INTO items (id, uses, bytes, body) VALUES (?, 0, ?, ?)",
        (item["id"], len(body.encode()) + ROW_BYTES, body),
    ).lastrowid
    assert number is not None
    return number
