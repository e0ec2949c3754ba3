"""An embedding model's part of the budget: room for its batches, and more for a text longer than a batch.

Room for batches is reserved for good when the model is there, less of it where the budget is short: batches
are smaller then. A longer text takes what it needs beyond that from what requests of all models share, once
they leave it. Pure; on the event loop, but for `longest`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from chairlift.engine.embedding.types import BatchCost, EmbeddingModelInfo
from chairlift.engine.errors import ContextLengthExceeded, ModelUnavailable
from chairlift.engine.memory.budget import Account, Budget, Kind, Reservation, Shortage
from chairlift.engine.memory.guard import LEAST_CACHE, SPARE, count_process
from chairlift.engine.memory.vocabulary import Device
from chairlift.engine.quantities import size

LEAST_TOKENS = 32
"""Of a batch; a model that has no room for it is not served."""


class BatchMemory:
    """Without a budget, or for a model of which it is not known what batches take, there is no bound."""

    def __init__(self, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        """Most of a batch; one longer text is a batch, too."""
        self._cost: BatchCost | None = None
        self._account: Account | None = None
        self._own = 0
        self._held: list[Reservation] = []

    @classmethod
    def of(
        cls,
        info: EmbeddingModelInfo,
        device: Device | None,
        batch_tokens: int,
        budget: Budget | None,
        weights: Reservation | None,
        wake: Callable[[], None],
    ) -> BatchMemory:
        """For a model that has been loaded.

        Args:
            batch_tokens: of the largest batch that is wanted.
            weights: what was reserved for the load.
            wake: bytes have come free that a text may be waiting for.

        Raises:
            ModelUnavailable: the budget leaves no room for a batch.
        """
        memory = cls(batch_tokens)
        if budget is None:
            return memory
        if weights is None:
            weights = budget.hold(Kind.WEIGHTS, info.name)
            memory._held.append(weights)
        weights.claim(info.weight_bytes)
        if device is not None:
            count_process(budget, device, info.weight_bytes)
        if info.batch_cost is None:
            return memory
        memory._cost = info.batch_cost
        try:
            memory._reserve(budget, info)
        except ModelUnavailable:
            memory.close()
            raise
        memory._account = budget.account(info.name, lambda size: 0, wake)
        if device is not None:
            budget.cache = max(budget.cache, LEAST_CACHE)
        return memory

    def _reserve(self, budget: Budget, info: EmbeddingModelInfo) -> None:
        while True:
            self._own = self._largest(self.batch_tokens, info.context_length)
            reserved = budget.reserve(self._own + LEAST_CACHE, Kind.HEADROOM, info.name)
            if not isinstance(reserved, Shortage):
                self._held.append(reserved)
                return
            if self.batch_tokens <= LEAST_TOKENS:
                raise ModelUnavailable(
                    f"{info.name} does not fit into {size(budget.total)} of memory (--memory-limit): "
                    f"beside its weights, {size(info.weight_bytes)}, a batch of {self.batch_tokens} "
                    f"tokens takes {size(reserved.needed)}, and {size(reserved.available)} are free."
                )
            self.batch_tokens = max(LEAST_TOKENS, self.batch_tokens // 2)

    def _largest(self, tokens: int, context: int) -> int:
        """Bytes of the largest batch of so many tokens: texts are as long as they may be."""
        assert self._cost is not None
        return int(SPARE * tokens / min(tokens, context) * self._cost.of(min(tokens, context)))

    def extra(self, longest: int) -> int:
        """Bytes that a text of so many tokens takes beyond what is reserved: 0 within a batch's tokens."""
        if self._account is None or self._cost is None or longest <= self.batch_tokens:
            return 0
        return max(0, int(SPARE * self._cost.of(longest)) - self._own)

    def longest(self, context: int) -> int:
        """Tokens of the longest text that could be computed, if requests of other models held nothing."""
        if self._account is None or self.extra(context) <= self._account.most:
            return context
        low, high = min(self.batch_tokens, context), context
        while low < high:
            middle = (low + high + 1) // 2
            if self.extra(middle) <= self._account.most:
                low = middle
            else:
                high = middle - 1
        return low

    def expect(self, longest: int) -> None:
        """Texts of so many tokens have been accepted and are not yet computed: they are to stay possible."""
        if self._account is not None:
            self._account.least = self.extra(longest)

    def check(self, longest: int) -> None:
        """Raises: ContextLengthExceeded: there will never be room for a text of so many tokens."""
        account, extra = self._account, self.extra(longest)
        if account is not None and extra > account.most:
            raise ContextLengthExceeded(
                "input",
                f"A text has {longest} tokens: this server would need {size(extra, 4)} of memory more "
                f"for it and has {size(account.most, 4)}.",
            )

    def begin(self, longest: int) -> bool:
        """Whether such a text may be computed now; it then has its room until `end`. If not, `wake` is called
        when that may have changed."""
        account, extra = self._account, self.extra(longest)
        if account is None or not extra:
            return True
        since = time.monotonic() if account.waiting_since is None else account.waiting_since
        older = account.yields
        if extra > account.room or (older is not None and older < since):
            account.wait(since)
            return False
        account.wait(None)
        account.use(extra)
        return True

    def end(self) -> None:
        """The batch is computed. Idempotent."""
        if self._account is not None and self._account.rows:
            self._account.use(0)

    def give_up(self) -> None:
        """Nobody waits for memory any more. Idempotent."""
        if self._account is not None:
            self._account.wait(None)

    def close(self) -> None:
        """The model is gone. Idempotent."""
        for reservation in self._held:
            reservation.release()
        if self._account is not None:
            self._account.close()
