"""Known faults of what is installed: `make audit`.

pip-audit asks for the advisories of every installed package. It ends with 1 if there are any; that nobody
could be asked, as offline, is told, and is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PATIENCE = 600
"""Seconds."""


def verdict(report: Mapping[str, Any]) -> tuple[list[str], int]:
    """What is to be told of pip-audit's report (its JSON format), and the exit code."""
    lines: list[str] = []
    asked = 0
    for dependency in report["dependencies"]:
        if "skip_reason" in dependency:
            continue
        asked += 1
        for fault in dependency["vulns"]:
            fixed = ", ".join(fault["fix_versions"]) or "nothing yet"
            lines.append(f"{dependency['name']} {dependency['version']}: {fault['id']}, mended by {fixed}")
    if not asked:
        return ["The advisories could not be asked; nothing is known."], 0
    skipped = len(report["dependencies"]) - asked
    lines.append(f"{asked} packages were asked about, {skipped} are not known there.")
    return lines, int(len(lines) > 1)


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pip_audit", "--local", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=PATIENCE)
        report = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        print("The advisories could not be asked; nothing is known.")
        return 0
    lines, code = verdict(report)
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
