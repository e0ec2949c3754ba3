"""What `make audit` makes of pip-audit's report."""

from __future__ import annotations

from tests.packaging.audit import verdict

SKIPPED = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited: a (1)"}
SOUND = {"name": "b", "version": "1", "vulns": []}
FAULT = {"id": "PYSEC-1", "fix_versions": ["2.1", "3.0"], "aliases": [], "description": ""}
BAD = {"name": "c", "version": "2", "vulns": [FAULT, {**FAULT, "id": "PYSEC-2", "fix_versions": []}]}


def test_faults_fail() -> None:
    assert verdict({"dependencies": [SKIPPED, SOUND, BAD], "fixes": []}) == (
        [
            "c 2: PYSEC-1, mended by 2.1, 3.0",
            "c 2: PYSEC-2, mended by nothing yet",
            "2 packages were asked about, 1 are not known there.",
        ],
        1,
    )


def test_none_is_well() -> None:
    assert verdict({"dependencies": [SOUND]}) == (["1 packages were asked about, 0 are not known there."], 0)


def test_that_nobody_could_be_asked_is_told_and_no_failure() -> None:
    for nothing in ([], [SKIPPED, SKIPPED]):
        lines, code = verdict({"dependencies": nothing})
        assert code == 0 and "could not be asked" in lines[0]
