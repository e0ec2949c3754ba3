"""One engine's part of the budget: what it reserves when its model is there, and what it does about what is
measured. On the event loop; nothing here touches the device but through `Device`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from chairlift.engine.config import EngineConfig
from chairlift.engine.disk import copied, queue_bytes
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.budget import Account, Budget, Kind, Reservation
from chairlift.engine.memory.rows import RowMemory
from chairlift.engine.memory.vocabulary import Device, MemoryStats
from chairlift.engine.plan import LoadedModel, ModelInfo, RunnerStats
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.quantities import size

log = logging.getLogger(__name__)

SPARE = 1.25
"""A step's arrays may take so many times what was measured."""
ROW_LOGITS = 16
"""Bytes of a drawing row and token of the vocabulary: logits, what sampling makes of them."""
COPIES = 128 * 2**20
"""Bytes of cohorts that are there twice while they are rebuilt (`chairlift.cache.batch.COPY_BYTES`)."""
LEAST_CACHE = 64 * 2**20
"""Bytes of freed buffers that MLX may keep at least."""
BUFFERS_SHARE = 0.8
"""Of the buffers that the device allows, whatever their bytes; beyond it kept pages go."""
READINGS = 15
"""Of the process's memory, whose median counts."""
STEADY = 16 * 2**20
"""Bytes by which that may change without anything being done about it."""
LEARNED_SHARE = 0.5
"""Of what is left to requests, that the headroom may take on top of what was measured at load."""


def headroom(activation_bytes: int, rows: int, vocab_size: int) -> tuple[int, int]:
    """Bytes to be set apart for steps of a model, and how many of these are for freed buffers that MLX keeps.

    Args:
        activation_bytes: of a step of prompt tokens, measured or projected.
        rows: that draw at once, at most.
    """
    step = int(SPARE * activation_bytes) + ROW_LOGITS * rows * vocab_size
    cache = max(LEAST_CACHE, step)
    return step + cache + COPIES, cache


def count_process(budget: Budget, device: Device, weight_bytes: int) -> Reservation | None:
    """What the process itself takes; None where the device has memory of its own. Counted once a budget.

    Args:
        weight_bytes: of the model that has just been loaded, which is counted as such.
    """
    if not device.shared:
        return None
    for each in budget.reservations:
        if each.kind is Kind.PROCESS:
            return each
    held = budget.hold(Kind.PROCESS)
    held.claim(max(0, device.footprint() - weight_bytes))
    return held


@dataclass(slots=True)
class MemoryGuard:
    """
    Attributes:
        rows: for the scheduler.
        cache: bytes of freed buffers that MLX may keep.
    """

    rows: RowMemory = field(default_factory=RowMemory)
    budget: Budget | None = None
    device: Device | None = None
    cache: int = LEAST_CACHE
    reactions: int = 0
    _account: Account | None = None
    _weights: Reservation | None = None
    _headroom: Reservation | None = None
    _copies: Reservation | None = None
    """Pages on their way to the disk."""
    _process: Reservation | None = None
    _index: PrefixIndex | None = None
    _seen: RunnerStats | None = None
    _comings: int = 0
    _alone: int = 0
    """Readings in a row since somebody came or went."""
    _learned: int = 0
    _tidied: bool = False
    _footprint: int = 0
    _readings: deque[int] = field(default_factory=lambda: deque(maxlen=READINGS))

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        config: EngineConfig,
        index: PrefixIndex | None,
        *,
        budget: Budget | None,
        weights: Reservation | None,
        wake: Callable[[], None],
    ) -> MemoryGuard:
        """For a model that has been loaded.

        Args:
            budget: shared with other engines; None makes one of the configured limit.
            weights: what was reserved for the load.
            wake: has the engine look whether there is something to plan.

        Raises:
            ModelUnavailable: the model leaves no room for a request.
        """
        sizes, device, info = loaded.states, loaded.device, loaded.info
        if sizes is None or device is None:
            return cls()
        if budget is None:
            limit = config.memory_limit_bytes
            total = device.usable() if limit is None else limit
            if not total:
                return cls(RowMemory(sizes), device=device, _index=index)
            budget = Budget(total)
        guard = cls(budget=budget, device=device, _index=index)
        guard._reserve(info, config.max_num_seqs, weights)
        if copied(loaded):
            guard._copies = budget.hold(Kind.HEADROOM, info.name)
            guard._copies.claim(queue_bytes(loaded, config))
        account = budget.account(info.name, lambda size: guard._shrink(size, wake), wake)
        guard._account = account
        sizes = replace(sizes, chunk=config.max_num_batched_tokens or info.step_tokens)
        guard.rows = RowMemory(sizes, account, index)
        if account.most < sizes.alone(1, 1):  # what others' rows hold comes free
            steps = guard._headroom.size if guard._headroom is not None else 0
            copies = guard._copies.size if guard._copies is not None else 0
            waiting = f"{size(copies)} of pages on their way to the disk may wait, " if copies else ""
            guard.close()
            raise ModelUnavailable(
                f"{info.name} does not fit into {size(budget.total)} of memory (--memory-limit): "
                f"its weights take {size(info.weight_bytes)}, steps {size(steps)}, "
                f"{waiting}and the process {size(budget.used(Kind.PROCESS))}."
            )
        return guard

    def bound(self) -> None:
        """Hold MLX to the budget. On the MLX thread."""
        if self.device is not None and self.budget is not None:
            self.budget.cache = max(self.budget.cache, self.cache)
            self.device.bound(self.budget.total, self.budget.cache)

    def _reserve(self, info: ModelInfo, rows: int, weights: Reservation | None) -> None:
        assert self.budget is not None and self.device is not None
        set_apart, self.cache = headroom(info.activation_bytes, rows, info.vocab_size)
        self._weights = weights if weights is not None else self.budget.hold(Kind.WEIGHTS, info.name)
        self._weights.claim(info.weight_bytes)
        self._headroom = self.budget.hold(Kind.HEADROOM, info.name)
        self._headroom.claim(set_apart)
        self._process = count_process(self.budget, self.device, info.weight_bytes)

    def _shrink(self, size: int, wake: Callable[[], None]) -> int:
        freed = self.rows.shrink(size)
        if freed:
            wake()
        return freed

    def observe(self, stats: RunnerStats) -> None:
        """What is in use, as measured between two steps; each reading counts once. What nobody projected is
        taken from what requests may have, so that pages go and rows give their states up as they always
        would."""
        if stats is self._seen:
            return
        self._seen = stats
        self._bound_buffers(stats)
        if self.device is None or self.budget is None:
            return
        footprint = self.device.footprint()
        if self._process is not None and footprint:
            self._footprint = footprint
            # The two are not read at one moment, and steps go on: what lasts is what counts.
            self._readings.append(max(0, footprint - stats.active_bytes - stats.cache_bytes))
            process = int(median(self._readings))
            if abs(process - self._process.size) > STEADY and len(self._readings) == READINGS:
                if process > self._process.size and not self._tidied:
                    # It may be no more than what the allocator has not given back.
                    self.device.tidy()
                    self._readings.clear()
                    self._tidied = True
                    return
                self._process.claim(process)
                self._tidied = False
        self._learn(stats)

    def _bound_buffers(self, stats: RunnerStats) -> None:
        """Their number is bounded by the device, also where no bytes are."""
        many = stats.buffers_limit and stats.buffers > BUFFERS_SHARE * stats.buffers_limit
        if self._index is not None and many:
            self.reactions += 1
            self._index.bound(self._index.used // 2)

    def _learn(self, stats: RunnerStats) -> None:
        """A step that took more than the headroom is remembered, where it is known whose it was: no other
        model is there, and none was while the most in use was counted."""
        budget, held, height = self.budget, self._headroom, self.rows.height
        assert budget is not None
        self._alone = self._alone + 1 if budget.comings == self._comings else 0
        self._comings = budget.comings
        others = any(each.kind is Kind.WEIGHTS and each is not self._weights for each in budget.reservations)
        # The reading before the last may have been taken before those who are gone gave all back.
        if held is None or others or self._alone < 2:
            return
        projected = budget.used(Kind.WEIGHTS) + height + stats.recent_prefix_bytes
        over = stats.recent_peak_bytes - projected - (held.size - self.cache)
        most = int(LEARNED_SHARE * (budget.for_requests + self._learned)) - self._learned
        more = min(over, most)
        if more > 0:
            self.reactions += 1
            self._learned += more
            held.claim(held.size + more)
            log.info("steps took %d bytes more than was set apart for them", over)

    def stats(self) -> MemoryStats:
        counts, budget = self.rows.counts, self.budget
        return MemoryStats(
            limit=budget.total if budget is not None else 0,
            process=budget.used(Kind.PROCESS) if budget is not None else 0,
            weights=budget.used(Kind.WEIGHTS) if budget is not None else 0,
            headroom=budget.used(Kind.HEADROOM) if budget is not None else 0,
            rows=self.rows.used,
            prefix=self._index.used if self._index is not None else 0,
            footprint=self._footprint,
            preemptions=counts.preemptions,
            waits=counts.waits,
            settled=counts.settled,
            reactions=self.reactions,
        )

    def give_up(self) -> None:
        """The model's thread does not come back: what it holds stays, and none of its pages go."""
        if self._account is not None:
            self._account.shrink = lambda size: 0

    def close(self) -> None:
        """The model is gone. Idempotent."""
        for reservation in (self._weights, self._headroom, self._copies):
            if reservation is not None:
                reservation.release()
        if self._account is not None:
            self._account.close()
