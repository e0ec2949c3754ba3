"""The requests of each workload: pure, and the same for the same seed.

No tokenizer is needed: prompts are made of common words, and the server's own usage says how many tokens
they were. As a rule of thumb a word is 1.1 to 1.3 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from chairlift.server.bench.options import BenchOptions, Workload

SHORT_WORDS = (20, 80)
LONG_WORDS = (500, 1150)
"""About 600 to 1,500 tokens."""
LONG_EVERY = 4
"""In `mixed`, each fourth request has a long prompt."""
SYSTEM_WORDS = 150
"""Of the system prompt that all conversations of `turns` share."""

_COMMON_WORDS = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two more write "
    "go see number no way could people my than first water been call who oil its now find long down day did "
    "get come made may part over new sound take only little work know place year live me back give most very "
    "after thing our just name good sentence man think say great where help through much before line right "
    "too mean old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land different home "
    "us move try kind hand picture again change off play spell air away animal house point page letter "
    "mother answer found study still learn should world high every near add food between own below country "
    "plant last school father keep tree never start city earth eye light thought head under story saw left "
    "late run while press close night real life few north open seem together next white children begin got "
    "walk example ease paper group always music those both mark often letter until mile river car feet care "
    "second book carry took science eat room friend began idea fish mountain stop once base hear horse cut "
    "sure watch color face wood main enough plain girl usual young ready above ever red list though feel "
    "talk bird soon body dog family direct pose leave song measure door product black short numeral class "
    "wind question happen complete ship area half rock order fire south problem piece told knew pass since "
    "top whole king space heard best hour better true during hundred five remember step early hold west"
)
_WORDS = tuple(_COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send."""

    kind: str
    """What it is in its workload: `short`, `long`, `turn 2`."""
    prompt: str
    max_tokens: int
    at: float = 0.0
    """Seconds after the workload's start, at the earliest; only `mixed` waits for it."""


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _question(rng: Random, words: int) -> str:
    """A prompt of about `words` words whose answer runs on past any small `max_tokens`."""
    return f"Tell a very long and detailed story that uses all of these words: {_text(rng, words)}."


def _generator(options: BenchOptions, workload: str) -> Random:
    # A generator for each workload: the prompts of one do not depend on which others run, and no two
    # workloads share a prompt that a prefix cache could hold.
    return Random(f"{options.seed}/{workload}")


def warm_up(options: BenchOptions) -> Planned:
    return Planned("warm-up", _question(_generator(options, "warm-up"), SHORT_WORDS[0]), 2)


def solo(options: BenchOptions) -> list[Planned]:
    rng = _generator(options, Workload.SOLO)
    return [
        Planned("short", _question(rng, rng.randint(*SHORT_WORDS)), options.max_tokens)
        for _ in range(options.count(Workload.SOLO))
    ]


def batch(options: BenchOptions) -> list[Planned]:
    """Prompts of one length and answers of one length, so that every client has the same work."""
    rng = _generator(options, Workload.BATCH)
    words = sum(SHORT_WORDS) // 2
    return [
        Planned("short", _question(rng, words), options.max_tokens)
        for _ in range(options.count(Workload.BATCH))
    ]


def mixed(options: BenchOptions) -> list[Planned]:
    """Exponential gaps between arrivals (a Poisson process of `options.rate` a second)."""
    rng = _generator(options, Workload.MIXED)
    answers = (max(1, options.max_tokens // 2), options.max_tokens, 2 * options.max_tokens)
    planned = []
    at = 0.0
    for index in range(options.count(Workload.MIXED)):
        long = index % LONG_EVERY == LONG_EVERY - 1
        words = rng.randint(*(LONG_WORDS if long else SHORT_WORDS))
        kind = "long" if long else "short"
        planned.append(Planned(kind, _question(rng, words), rng.choice(answers), at))
        at += rng.expovariate(options.rate)
    return planned


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's side of one conversation; each turn sends all that was said before it."""

    system: str
    turns: tuple[Planned, ...]


def conversations(options: BenchOptions) -> list[Conversation]:
    rng = _generator(options, Workload.TURNS)
    system = f"You are a patient writer. Keep these words in mind: {_text(rng, SYSTEM_WORDS)}."
    turns = options.count(Workload.TURNS) // options.clients
    return [
        Conversation(
            system,
            tuple(
                Planned(f"turn {turn + 1}", _question(rng, rng.randint(*SHORT_WORDS)), options.max_tokens)
                for turn in range(turns)
            ),
        )
        for _ in range(options.clients)
    ]
