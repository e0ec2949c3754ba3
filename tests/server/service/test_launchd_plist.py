"""The property list against launchd.plist(5)."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

import pytest

from chairlift.server.service.launchd_plist import job, label, plist
from tests.server.service.definitions import definition

STRING, BOOLEAN, INTEGER = str, bool, int
DOCUMENTED: dict[str, Any] = {
    "Label": STRING,
    "UserName": STRING,
    "ProgramArguments": [STRING],
    "EnvironmentVariables": {STRING: STRING},
    "WorkingDirectory": STRING,
    "RunAtLoad": BOOLEAN,
    "KeepAlive": {"SuccessfulExit": BOOLEAN, "Crashed": BOOLEAN},
    "ThrottleInterval": INTEGER,
    "ExitTimeOut": INTEGER,
    "ProcessType": {"Background", "Standard", "Adaptive", "Interactive"},
    "SoftResourceLimits": {"NumberOfFiles": INTEGER},
    "HardResourceLimits": {"NumberOfFiles": INTEGER},
    "Umask": INTEGER,
    "StandardOutPath": STRING,
    "StandardErrorPath": STRING,
}
"""Of the keys we write: their types, from launchd.plist(5) of macOS 14 ("XML PROPERTY LIST KEYS"). A set is
of the words that a key may have."""
PATHS = ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")


def conforms(value: object, documented: Any) -> bool:
    if isinstance(documented, set):
        return value in documented
    if isinstance(documented, list):
        return isinstance(value, list) and all(conforms(each, documented[0]) for each in value)
    if isinstance(documented, dict):
        if not isinstance(value, dict):
            return False
        if STRING in documented:
            return all(type(key) is str and conforms(each, documented[STRING]) for key, each in value.items())
        return all(key in documented and conforms(each, documented[key]) for key, each in value.items())
    return type(value) is documented


def read(**changes: Any) -> dict[str, Any]:
    """As launchd reads it: from the XML."""
    text = plist(definition(**changes))
    assert text.startswith(b'<?xml version="1.0" encoding="UTF-8"?>')
    found = plistlib.loads(text)
    assert isinstance(found, dict) and found == job(definition(**changes))
    return found


@pytest.mark.parametrize("changes", [{}, {"system": True, "user": "ada"}, {"output": None}])
def test_every_key_is_apples_and_of_its_type(changes: dict[str, Any]) -> None:
    for key, value in read(**changes).items():
        assert key in DOCUMENTED, key
        assert conforms(value, DOCUMENTED[key]), (key, value)


def test_the_table_can_say_no() -> None:
    assert not conforms(1, BOOLEAN) and not conforms(True, INTEGER)
    assert not conforms("Quick", DOCUMENTED["ProcessType"])
    assert not conforms({"SuccessfulExit": 0}, DOCUMENTED["KeepAlive"])
    assert not conforms({"Sometimes": True}, DOCUMENTED["KeepAlive"])
    assert not conforms({"A": 1}, DOCUMENTED["EnvironmentVariables"])
    assert not conforms([Path("/")], DOCUMENTED["ProgramArguments"])


def test_what_the_field_has_taught() -> None:
    found = read()
    assert found["ProcessType"] == "Interactive"
    assert found["ExitTimeOut"] == 180
    assert found["KeepAlive"] == {"SuccessfulExit": False, "Crashed": True}
    assert found["ThrottleInterval"] == 30
    assert found["SoftResourceLimits"] == found["HardResourceLimits"] == {"NumberOfFiles": 10240}
    assert found["RunAtLoad"] is True
    assert found["Umask"] == 0o077
    assert {"HOME", "HF_HOME", "PATH"} <= set(found["EnvironmentVariables"])


def test_paths_are_absolute_and_nothing_is_left_to_a_shell() -> None:
    found = read()
    assert all(found[key].startswith("/") for key in PATHS)
    assert found["ProgramArguments"][0].startswith("/")
    assert found["ProgramArguments"][-4:] == ["--model", "/models/a b", "--port", "9000"]
    assert not any(text.startswith("~") for text in (*found["ProgramArguments"], *map(str, found.values())))


def test_an_agent_has_no_user_and_a_daemon_has_one() -> None:
    assert "UserName" not in read()
    assert read(system=True, user="ada")["UserName"] == "ada"


def test_a_longer_drain_gets_more_time() -> None:
    assert read(stop_s=660)["ExitTimeOut"] == 660


def test_text_that_xml_knows_is_kept() -> None:
    words = ("--model", "/a <b> & 'c' \"d\" ü")
    assert tuple(read(serve=words)["ProgramArguments"][-2:]) == words


def test_labels() -> None:
    assert label("chairlift") == "org.chairlift.server"
    assert label("small") == "org.chairlift.server.small"
