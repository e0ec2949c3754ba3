"""From pieces to a `Constraint`: everything that can be wrong with it is found here."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from chairlift.engine.constraints import lark, regex, schema
from chairlift.engine.constraints.constraint import Constraint
from chairlift.engine.constraints.matcher import Matcher, first_line
from chairlift.engine.constraints.pieces import Either, Json, Piece, Repeat, Sequence
from chairlift.engine.constraints.render import render
from chairlift.engine.constraints.trial import Trial
from chairlift.engine.errors import InvalidParameter

log = logging.getLogger(__name__)

MOST_KEPT = 64
"""Compiled grammars that are kept for the next request that has the same."""
MOST_KEPT_BYTES = 4 * 2**20
"""Of their texts together."""
_UNSUPPORTED = re.compile(
    r"^error: (?:look-around|backreferences)|: lookarounds not supported|\\k<", re.MULTILINE
)
"""In llguidance's words, which hold the pattern: what of JSON Schema's expressions it does not have."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar compiled for a vocabulary."""

    start: LLMatcher
    words: int

    @classmethod
    def of(cls, grammar: str, tokenizer: LLTokenizer) -> Compiled:
        """Raises: lark.GrammarError: it cannot be followed."""
        limits = LLParserLimits(max_grammar_size=200_000, verbose_errors=False)
        start = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if start.is_error():
            raise lark.GrammarError(f"cannot be followed: {first_line(start.get_error())}")
        trial = start.deep_copy()
        mask = trial.compute_bitmask()
        if trial.is_error() and "NoExtension" not in trial.get_error():
            raise lark.GrammarError(f"cannot be followed: {first_line(trial.get_error())}")
        if trial.is_error() or not any(mask):
            raise lark.GrammarError("allows no answer at all")
        return cls(start, (tokenizer.vocab_size + 31) // 32)

    def matcher(self) -> Matcher:
        return Matcher(self.start.deep_copy(), self.words)


def check(piece: Piece, param: str) -> None:
    """What `Compiler.compile` would refuse whatever the vocabulary, as far as it takes none to see it.

    Raises: InvalidParameter.
    """
    try:
        render(piece, {})
    except (schema.SchemaError, lark.GrammarError) as error:
        raise InvalidParameter(param, f"{param} {error}.") from None


class Compiler:
    """Compiles constraints for one model's vocabulary. Safe to call from any thread; takes up to seconds.

    Args:
        tokenizer: makes llguidance's tokenizer, which takes a second: called when first needed. What it
            raises says that the vocabulary cannot be constrained.
        trial: what grammars have to pass first.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], trial: Trial | None = None) -> None:
        self._trial = trial or Trial()
        self._make_tokenizer = tokenizer
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._specials: dict[str, int] = {}
        self._kept: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._kept_bytes = 0

    def compile(self, piece: Piece, param: str) -> Constraint:
        """The constraint of a whole answer. Compiled once for each distinct grammar, while it is kept.

        Args:
            param: what to blame, as the client spelled it.

        Raises:
            InvalidParameter: it cannot be followed: malformed, impossible, without an end, or too large.
        """
        try:
            return self._constraint(piece)
        except (schema.SchemaError, lark.GrammarError) as error:
            raise InvalidParameter(param, f"{param} {error}.") from None

    def _constraint(self, piece: Piece) -> Constraint:
        tokenizer, specials = self._vocabulary()
        grammar = render(piece, specials)
        try:
            return Constraint(grammar, self._shared(grammar, tokenizer))
        except lark.GrammarError:
            simpler = _without_unsupported_patterns(piece)
            if simpler == piece:
                raise
            grammar = render(simpler, specials)
            return Constraint(grammar, self._shared(grammar, tokenizer))

    def _vocabulary(self) -> tuple[LLTokenizer, dict[str, int]]:
        with self._making:
            if self._tokenizer is None:
                try:
                    tokenizer = self._make_tokenizer()
                except Exception as error:  # llguidance reads the forms of tokenizers that it knows
                    log.warning("The tokenizer cannot be constrained: %s", error)
                    raise lark.GrammarError(
                        "cannot be followed: this model's tokenizer is of an unknown form"
                    ) from None
                self._specials = _specials(tokenizer)
                self._tokenizer = tokenizer
            return self._tokenizer, self._specials

    def _shared(self, grammar: str, tokenizer: LLTokenizer) -> Compiled:
        """What is compiled already, or is being compiled by another thread, is not compiled again."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is None:
                future: Future[Compiled] = Future()
                self._kept[grammar] = future
                self._kept_bytes += len(grammar)
            else:
                self._kept.move_to_end(grammar)
        if known is not None:
            return known.result()
        try:
            if (complaint := self._trial.complaint(grammar, tokenizer.vocab_size)) is not None:
                raise lark.GrammarError(complaint)
            compiled = Compiled.of(grammar, tokenizer)
        except BaseException as error:
            future.set_exception(error)
            with self._lock:
                self._forget(grammar)
            raise
        future.set_result(compiled)
        with self._lock:
            while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
                self._forget(next(iter(self._kept)))
        return compiled

    def _forget(self, grammar: str) -> None:
        if self._kept.pop(grammar, None) is not None:
            self._kept_bytes -= len(grammar)


def _specials(tokenizer: LLTokenizer) -> dict[str, int]:
    """The texts of special tokens. A token of a byte that no UTF-8 holds passes for one, and has none."""
    texts = {
        tokenizer.decode_str([token]): token
        for token in range(tokenizer.vocab_size)
        if tokenizer.is_special_token(token)
    }
    return {text: token for text, token in texts.items() if text and "\ufffd" not in text}


def _without_unsupported_patterns(piece: Piece) -> Piece:
    """The same with JSON schemas that are not strict free of look-around and back-references."""
    match piece:
        case Json(strict=False):
            content = json.loads(piece.schema)
            for part, _ in schema.parts(content):
                if not isinstance(part, dict):
                    continue
                if isinstance(part.get("pattern"), str) and _unsupported(part["pattern"]):
                    del part["pattern"]
                if isinstance(named := part.get("patternProperties"), dict):
                    for pattern in [name for name in named if _unsupported(name)]:
                        del named[pattern]
            return Json(json.dumps(content), piece.strict, piece.compact)
        case Sequence():
            return Sequence(tuple(map(_without_unsupported_patterns, piece.pieces)))
        case Either():
            return Either(tuple(map(_without_unsupported_patterns, piece.pieces)))
        case Repeat():
            inner = _without_unsupported_patterns(piece.piece)
            return Repeat(inner, piece.least, piece.most, piece.between)
        case _:
            return piece


def _unsupported(pattern: str) -> bool:
    """Whether it would be read but for look-around or back-references. What is malformed stays, to be
    refused."""
    if regex.complaint(pattern) is not None:
        return False
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    return _UNSUPPORTED.search(error) is not None
