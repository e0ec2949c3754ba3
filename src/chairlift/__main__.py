"""`chairlift` and `python -m chairlift`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from chairlift.server.cli.app import run
    except KeyboardInterrupt:  # within the second that the imports take
        sys.exit(130)
    sys.exit(run())


if __name__ == "__main__":
    main()
