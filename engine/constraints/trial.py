"""Grammars are tried in a process of their own before they are compiled in this one.

llguidance bounds most of what a grammar may cost, not all: references many deep overflow its stack, and
intersections of patterns can take it hours. Here such a grammar costs the trial its process, and the client
is told so; the next trial starts another.

`python -m chairlift.engine.constraints.trial` is that process: a JSON object a line on standard input, what
is wrong with its grammar (or null) a line on standard output.
"""

from __future__ import annotations

import json
import random
import resource
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

PATIENCE = 10.0
"""Seconds for a trial; an ordinary grammar takes milliseconds."""
MEMORY = 4 * 2**30
"""Bytes of address space that a trial may take."""
STACK = 4 * 2**20
"""Bytes of the trial's stack: less than a thread has that compiles afterwards."""
STEPS = 16
"""Tokens that are drawn at random, so that a grammar that compiles and cannot be followed is found."""
TOO_LARGE = "cannot be followed: it takes too much time or memory"


class Trial:
    """Tries grammars, one at a time; from any thread. The process starts with the first one, and ends with
    this object.

    Args:
        patience: seconds.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._end = weakref.finalize(self, _end, self._processes)

    def complaint(self, grammar: str, vocab: int) -> str | None:
        """What is wrong with it, as llguidance says it or as `TOO_LARGE`; None if nothing is.

        Args:
            vocab: tokens of the vocabulary, which the grammar may name by number.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError), selectors.DefaultSelector() as selector:
                process.stdin.write(json.dumps({"grammar": grammar, "vocab": vocab}) + "\n")
                process.stdin.flush()
                selector.register(process.stdout, selectors.EVENT_READ)
                if selector.select(self._patience) and (line := process.stdout.readline()):
                    said: str | None = json.loads(line)
                    return said
            _end(self._processes)
            return TOO_LARGE

    def _running(self) -> subprocess.Popen[str]:
        if not self._processes or self._processes[0].poll() is not None:
            _end(self._processes)
            command = [sys.executable, "-m", "chairlift.engine.constraints.trial"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # not for the terminal's interrupt
            )
            self._processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()  # it is ready: starting does not count
        return self._processes[0]


def _end(processes: list[subprocess.Popen[str]]) -> None:
    while processes:
        process = processes.pop()
        process.kill()
        with suppress(OSError):
            process.communicate()


class _Bytes:
    """A vocabulary of single bytes, filled up to a size."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * max(0, size - 256) + [b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=2)
def _vocabulary(size: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(size)))


def attempt(grammar: str, vocab: int) -> str | None:
    """Compile it and draw a few tokens under it; see `Trial.complaint`."""
    from chairlift.engine.constraints.compiler import Compiled
    from chairlift.engine.constraints.lark import GrammarError
    from chairlift.engine.constraints.matcher import MaskFiller

    try:
        matcher = Compiled.of(grammar, _vocabulary(vocab)).matcher()
    except GrammarError as error:
        return str(error)
    draw, filler = random.Random(0), MaskFiller()
    for _ in range(STEPS):
        bits = filler.fill([matcher, matcher.fresh()])[0].view("uint8")
        if matcher.fault is not None:
            return f"cannot be followed: {matcher.reason}"
        allowed = [token for token in range(256) if bits[token // 8] >> (token % 8) & 1]
        if matcher.complete or not allowed:
            break
        matcher.advance(draw.choice(allowed))
    return None


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(2 * int(PATIENCE))  # the end of an attempt that nobody waits for any more
        print(json.dumps(attempt(asked["grammar"], asked["vocab"])), flush=True)
        signal.alarm(0)


def main() -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
