"""What is kept, shared, evicted and survived."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.server.payload import Payload
from chairlift.server.responses.caller import Caller
from chairlift.server.responses.database import Bounds, ResponseDatabase, Stored, StoreFault

ROOMY = Bounds(count=1000, bytes=10**9, age_s=1e9)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@contextmanager
def database(path: Path | None = None, bounds: Bounds = ROOMY) -> Iterator[tuple[ResponseDatabase, Clock]]:
    clock = Clock()
    with closing(ResponseDatabase(path, bounds, clock)) as opened:
        yield opened, clock


def item(id: str, text: str = "") -> Payload:
    return {"id": id, "type": "message", "text": text}


def stored(name: str, *conversation: Payload, output: tuple[Payload, ...] = ()) -> Stored:
    return Stored({"id": name, "status": "completed"}, conversation, output)


def test_what_was_put_comes_back() -> None:
    with database() as (kept, _):
        first = Stored(
            {"id": "a", "text": "ü\u2028"}, (item("1"), item("2", "é")), (item("3"),), "me", b"\x00\xff"
        )
        assert kept.put("a", first)
        assert kept.get("a") == first
        assert first.response == {"id": "a", "text": "ü\u2028", "output": [item("3")]}
        assert kept.get("b") is None


def test_put_again_replaces() -> None:
    with database() as (kept, _):
        kept.put("a", Stored({"status": "in_progress"}, (item("1"),), (), owner="me"))
        kept.put("a", Stored({"status": "completed"}, (item("1"),), (item("2"),)))
        assert kept.get("a") == Stored({"status": "completed"}, (item("1"),), (item("2"),))


def test_what_was_deleted_meanwhile_stays_so() -> None:
    with database() as (kept, _):
        kept.put("a", Stored({}, (item("1"),), (), owner="me"))
        assert kept.put("a", stored("a", item("1")), anew=False)
        kept.delete("a")
        assert not kept.put("a", stored("a", item("1")), anew=False)
        assert kept.get("a") is None and kept.find_items(["1"]) == {}


def test_what_is_being_answered_goes_last() -> None:
    with database(bounds=Bounds(2, 10**9, 1e9)) as (kept, _):
        kept.put("a", Stored({}, (), (), owner="me"))
        kept.put("b", stored("b"))
        kept.put("c", stored("c"))
        assert kept.get("b") is None and kept.get("a") is not None


def test_a_deleted_response_leaves_those_that_follow_it_whole() -> None:
    with database() as (kept, _):
        kept.put("a", stored("a", item("1"), output=(item("2"),)))
        kept.put("b", stored("b", item("1"), item("2"), item("3"), output=(item("4"),)))
        assert kept.delete("a") and not kept.delete("a")
        assert kept.get("a") is None
        after = kept.get("b")
        assert after is not None and after.conversation == (item("1"), item("2"), item("3"))
        assert set(kept.find_items(["1", "2", "3", "4", "5"])) == {"1", "2", "3", "4"}
        assert kept.delete("b")
        assert kept.find_items(["1", "2", "3", "4"]) == {}


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_equal_items_are_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with database(path) as (kept, _):
        kept.put("a", stored("a", item("1", "x" * 1000)))
        kept.put("b", stored("b", item("1", "x" * 1000), item("2"), item("1", "x" * 1000)))
        kept.put("c", stored("c", item("1", "other")))
        assert rows(path, "items") == 3
        assert kept.find_items(["1"]) == {"1": item("1", "other")}  # the newest
        again = kept.get("b")
        assert again is not None and len(again.conversation) == 3
        for id in "abc":
            kept.delete(id)
    for table in ("items", "conversations", "responses"):
        assert rows(path, table) == 0
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT bytes FROM total").fetchall() == [(0,)]


def test_the_least_recently_used_go_first() -> None:
    with database(bounds=Bounds(3, 10**9, 1e9)) as (kept, _):
        for id in "abc":
            kept.put(id, stored(id))
        kept.get("a", use=True)
        kept.get("b")  # looking is not using
        kept.put("d", stored("d"))
        assert [kept.get(id) is not None for id in "abcd"] == [True, False, True, True]


def test_bytes_are_bounded() -> None:
    with database(bounds=Bounds(1000, 10_000, 1e9)) as (kept, _):
        for number in range(20):
            assert kept.put(str(number), stored(str(number), item(f"i{number}", "ü" * 1000)))
        assert [number for number in range(20) if kept.get(str(number))] == [16, 17, 18, 19]
        assert not kept.put("large", stored("large", item("x", "x" * 10_000)))
        assert kept.get("large") is None


def test_age_counts_from_the_last_use() -> None:
    with database(bounds=Bounds(1000, 10**9, 100)) as (kept, clock):
        kept.put("a", stored("a"))
        kept.put("b", stored("b"))
        clock.now += 60
        assert kept.get("a", use=True)
        clock.now += 60
        assert kept.get("a") and kept.get("b") is None
        kept.put("c", stored("c"))
        clock.now += 1000
        assert kept.get("a") is None


def test_the_file_is_private_and_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with database(path) as (kept, _):
        kept.put("a", stored("a", item("1")))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        assert set(modes.values()) == {0o600}, modes
    with database(path) as (kept, _):
        assert kept.get("a") == stored("a", item("1"))


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with database(path) as (one, _), database(path) as (two, _):
        one.put("a", stored("a", item("1")))
        assert two.get("a") == stored("a", item("1"))
        assert two.delete("a")
        assert one.get("a") is None


def test_many_open_and_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    together = threading.Barrier(4)
    faults: list[BaseException] = []

    def write(name: str) -> None:
        try:
            together.wait()
            with database(path) as (kept, _):
                for number in range(10):
                    assert kept.put(f"{name}{number}", stored(name, item(f"{name}{number}"), item("shared")))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert (rows(path, "responses"), rows(path, "items")) == (40, 41)


DIE = """
import os, sys
from pathlib import Path
from chairlift.server.responses.database import Bounds, ResponseDatabase, Stored
kept = ResponseDatabase(Path(sys.argv[1]), Bounds(1000, 10**9, 1e9))
kept.put("a", Stored({"id": "a"}, ({"id": "1"},), ()))
class Dying(tuple):
    def __iter__(self):
        yield {"id": "2"}
        os._exit(9)
kept.put("b", Stored({"id": "b"}, Dying(), ()))
"""


def test_a_process_that_dies_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "store"
    died = subprocess.run([sys.executable, "-P", "-c", DIE, str(path)], env=os.environ)
    assert died.returncode == 9
    with database(path, Bounds(1000, 10**9, 1e12)) as (kept, _):
        assert kept.get("a") is not None and kept.get("b") is None
        assert kept.find_items(["1", "2"]) == {"1": {"id": "1"}}
        assert kept.put("c", stored("c"))


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Dear diary, " * 100)
    other = tmp_path / "other"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.commit()
    later = tmp_path / "later"
    with database(later), closing(sqlite3.connect(later)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for path in (text, other, later, tmp_path, tmp_path / "no" / "folder"):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(StoreFault) as fault:
            ResponseDatabase(path, ROOMY)
        assert str(path) in str(fault.value) and "\n" not in str(fault.value)
        if before:
            assert path.read_bytes()[:100] == before[:100]
    assert not (tmp_path / "no").exists()


VERSION_1 = Path(__file__).with_name("version_1.sql").read_text()
OLD_ROWS = """
INSERT INTO responses VALUES ('a', 1, 1, 100, NULL, '{"id": "a"}', x'00ff');
INSERT INTO responses VALUES ('b', 2, 2, 100, 'me', '{}', NULL);
INSERT INTO items VALUES (1, '1', 0, 70, '{"id": "1", "text": "one"}'), (2, '2', 0, 80, '{"id": "2"}');
INSERT INTO conversations VALUES ('a', 0, 1, 0), ('a', 1, 2, 1), ('b', 0, 1, 0), ('b', 1, 2, 0);
"""
ALICE, BOB, ROOT = Caller("alice", False), Caller("bob", False), Caller("root", True)


def columns(path: Path) -> list[object]:
    with closing(sqlite3.connect(path)) as connection:
        tables = ("responses", "items", "conversations", "owners", "total")
        return [connection.execute(f"PRAGMA table_info({table})").fetchall() for table in tables]


def test_an_older_file_is_taken_over_whole(tmp_path: Path) -> None:
    path = tmp_path / "old"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1 + OLD_ROWS)
    one, two = {"id": "1", "text": "one"}, {"id": "2"}
    for _ in range(2):  # the second time there is nothing left to do
        with database(path) as (kept, _):
            assert kept.get("a", ALICE) == Stored({"id": "a"}, (one,), (two,), None, b"\x00\xff")
            assert kept.get("b", BOB) == Stored({}, (one, two), (), "me")
            assert kept.find_items(["1", "2"], BOB) == {"1": one, "2": two}
    with database(tmp_path / "new"):
        assert columns(path) == columns(tmp_path / "new")
    with database(path) as (kept, _):
        kept.put("c", Stored({}, (), (), tenant="alice"))
        assert kept.get("c", ALICE) is not None and kept.get("c", BOB) is None
        assert kept.delete("a") and kept.find_items(["1", "2"]) == {"1": one, "2": two}
        assert kept.delete("b") and kept.find_items(["1", "2"]) == {}
        assert kept.delete("c")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT bytes FROM total").fetchone() == (0,)


def test_a_file_of_anothers_with_the_same_number_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE mine (x); PRAGMA user_version = 1;")
    before = path.read_bytes()
    with pytest.raises(StoreFault):
        ResponseDatabase(path, ROOMY)
    assert path.read_bytes() == before


def test_responses_are_there_for_whoever_has_made_them() -> None:
    with database() as (kept, _):
        kept.put("a", Stored({}, (item("1"),), (item("2"),), tenant="alice"))
        kept.put("b", Stored({}, (item("1"), item("3", "bob's")), (), tenant="bob"))
        kept.put("n", Stored({}, (item("4"),), ()))
        for caller, ids, items in (
            (ALICE, "an", "124"),
            (BOB, "bn", "134"),
            (ROOT, "abn", "1234"),
            (Caller(), "abn", "1234"),
        ):
            assert [id for id in "abn" if kept.get(id, caller) is not None] == list(ids)
            assert sorted(kept.find_items(list("1234"), caller)) == list(items)
        assert not kept.delete("a", BOB) and kept.get("a") is not None
        assert kept.delete("a", ALICE) and kept.delete("b", ROOT) and kept.delete("n", BOB)


def test_an_item_of_anothers_never_stands_for_ones_own() -> None:
    with database() as (kept, _):
        kept.put("a", Stored({}, (item("1", "alice's"),), (), tenant="alice"))
        kept.put("b", Stored({}, (item("1", "bob's"),), (), tenant="bob"))
        assert kept.find_items(["1"], ALICE) == {"1": item("1", "alice's")}
        assert kept.find_items(["1"]) == {"1": item("1", "bob's")}


def test_looking_for_anothers_response_does_not_keep_it() -> None:
    with database(bounds=Bounds(2, 10**9, 1e9)) as (kept, _):
        kept.put("a", Stored({}, (), (), tenant="alice"))
        kept.put("b", Stored({}, (), (), tenant="alice"))
        assert kept.get("a", BOB, use=True) is None
        kept.put("c", Stored({}, (), (), tenant="alice"))
        assert kept.get("a") is None


def test_owners() -> None:
    with database() as (kept, clock):
        assert not kept.is_alive("me", 60)
        kept.seen("me")
        clock.now += 50
        assert kept.is_alive("me", 60)
        clock.now += 50
        assert not kept.is_alive("me", 60)


class Machine(RuleBasedStateMachine):
    """Against a dictionary, with a bound on the count; responses continue others or start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.kept = ResponseDatabase(None, Bounds(4, 10**9, 1e9), self.clock)
        self.model: dict[str, Stored] = {}
        self.count = 0

    def teardown(self) -> None:
        self.kept.close()

    @rule(data=st.data(), outputs=st.integers(0, 2))
    def put(self, data: st.DataObject, outputs: int) -> None:
        self.count += 1
        name = str(self.count)
        before: tuple[Payload, ...] = ()
        if self.model and data.draw(st.booleans()):
            previous = data.draw(st.sampled_from(list(self.model)))
            found = self.kept.get(previous, use=True)
            assert found is not None
            before = (*found.conversation, *found.output)
            self.model[previous] = self.model.pop(previous)
        output = tuple(item(f"{name}-{index}") for index in range(outputs))
        self.model[name] = stored(name, *before, item(name), output=output)
        assert self.kept.put(name, self.model[name])
        while len(self.model) > 4:
            self.model.pop(next(iter(self.model)))

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.model)))
        del self.model[name]
        assert self.kept.delete(name)

    @invariant()
    def what_is_kept_is_whole(self) -> None:
        for number in range(1, self.count + 1):
            assert self.kept.get(str(number)) == self.model.get(str(number))
        held = {str(each["id"]) for one in self.model.values() for each in (*one.conversation, *one.output)}
        every = [f"{number}{tail}" for number in range(1, self.count + 1) for tail in ("", "-0", "-1")]
        assert set(self.kept.find_items(every)) == held


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
