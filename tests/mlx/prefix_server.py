"""A scheduler with kept prefixes over a runner, stepped as the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.engine.media import PreparedMedia
from chairlift.engine.plan import Sample
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.request import Request
from chairlift.engine.row import Row
from chairlift.engine.runner import MlxRunner
from chairlift.engine.scheduler import Scheduler
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import GREEDY, Ride, differences
from tests.mlx.parity import solo

TOKENS = 6
BLOCK = 8


@dataclass
class Server:
    """
    Attributes:
        answers: what each row has drawn.
    """

    runner: MlxRunner
    scheduler: Scheduler
    answers: dict[Row, list[Sample]] = field(default_factory=dict)
    disk: PrefixDisk | None = None

    @classmethod
    def of(
        cls,
        runner: MlxRunner,
        room: int = 10**9,
        budget: int = 64,
        disk: PrefixDisk | None = None,
        *,
        keeps: bool = True,
    ) -> Server:
        """Args: keeps: prefixes; without, every row is computed."""
        assert runner.prefix is not None
        small = replace(runner.prefix, block_tokens=BLOCK, checkpoint_tokens=64)
        index = PrefixIndex(small, room) if keeps else None
        scheduler = Scheduler(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_waiting=64,
            context_length=4096,
            clock=lambda: 0.0,
            prefixes=Prefixes(index, lambda: 0.0, catalogue=disk),
        )
        if disk is not None:
            runner.spill(disk)
        return cls(runner, scheduler, disk=disk)

    def add(
        self,
        prompt: Sequence[int],
        tokens: int = TOKENS,
        media: PreparedMedia | None = None,
        allowed: tuple[int, ...] | None = None,
    ) -> Row:
        sampling = replace(GREEDY, max_tokens=tokens, allowed_token_ids=allowed)
        row = self.scheduler.add(Request("r", tuple(prompt), sampling, media=media), seed=0)
        self.answers[row] = []
        return row

    def step(self) -> None:
        plan = self.scheduler.schedule()
        for fetch in self.scheduler.prefixes.take_fetches():
            assert self.disk is not None
            found = {page.digest: self.disk.read(page) for page in fetch.pages}
            self.scheduler.prefixes.fetched(
                fetch.number, {name: data for name, data in found.items() if data}
            )
        committed = self.scheduler.commit(self.runner.step(plan))
        assert not committed.failed
        for row, sample in committed.drawn:
            self.answers[row].append(sample)
            if row.drawn >= row.limit:
                self.scheduler.finish(row)

    def finish(self) -> None:
        while self.scheduler.busy:
            self.step()

    def forget(self) -> None:
        """Have what is kept on the disk, and memory emptied."""
        assert self.disk is not None and self.disk.settle(20)
        assert self.scheduler.prefixes.index is not None
        self.scheduler.prefixes.index.clear()

    def drawn(self, row: Row) -> list[int]:
        return [sample.token for sample in self.answers[row]]

    def wrong(self, name: str) -> list[object]:
        rows = list(self.answers)
        rides = [Ride(tuple(row.request.prompt_token_ids), tokens=row.limit) for row in rows]
        return list(differences(solo(name), rides, [self.answers[row] for row in rows], error=1e-4, tie=1e-4))


def words(start: int, length: int) -> list[int]:
    return [(start + 7 * place + place // 5) % VOCABULARY for place in range(length)]
