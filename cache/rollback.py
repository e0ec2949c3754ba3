"""Going back to a recurrent row's state before drafted tokens that were rejected.

Attention forgets rejected tokens by trimming; a recurrence cannot be run backwards, so the row's page is
kept after every drafted token until it is known which are right.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.cache.state_spec import MambaStateSpec, states_of


class RowRollback:
    """The newest states of one row in one layer: at most `spec.pages_per_row` pages, of which the oldest
    is after the last token known to be right.

    Args:
        spec: of the layer.
    """

    def __init__(self, spec: MambaStateSpec) -> None:
        self.spec = spec
        self._pages: dict[int, mx.array] = {}

    @property
    def tokens(self) -> tuple[int, ...]:
        """The numbers of tokens after which a state is kept, ascending."""
        return tuple(self._pages)

    @property
    def nbytes(self) -> int:
        return len(self._pages) * self.spec.page_size_bytes

    def snapshot(self, layer_cache: Any, row: int, tokens: int) -> None:
        """Keep the state of row `row` of the batch, which is the one after `tokens` tokens.

        Raises:
            ValueError: not after more tokens than the last one kept, or no page left: the spec reserves
                `num_speculative_blocks` for drafted tokens, and none is given up before `rollback`
                says which token was right.
        """
        if self._pages and tokens <= self.tokens[-1]:
            raise ValueError(f"a state after {self.tokens[-1]} tokens is kept, {tokens} is not after it")
        if len(self._pages) == self.spec.pages_per_row:
            blocks = self.spec.num_speculative_blocks
            raise ValueError(f"no page left: {blocks} speculative blocks are reserved")
        page = self.spec.pack([_row(state, row) for state in _states(layer_cache)])
        mx.async_eval(page)  # type: ignore[no-untyped-call]
        self._pages[tokens] = page

    def rollback(self, layer_cache: Any, row: int, tokens: int) -> None:
        """Give row `row` the state that it had after `tokens` tokens, bit for bit, and free the pages of
        all others. The other rows are left alone. Rolling back to the newest state accepts every draft.

        Raises:
            ValueError: no state is kept for that number of tokens.
            IndexError: a row that is not there.
        """
        if tokens not in self._pages:
            raise ValueError(f"no state is kept after {tokens} tokens, only after {self.tokens}")
        states = _states(layer_cache)
        page = self._pages[tokens]
        for which, state in enumerate(self.spec.unpack(page)):
            held = states[which]
            _row(held, row)
            states[which] = mx.concatenate([held[:row], state, held[row + 1 :]], axis=0)
        self._pages = {tokens: page}


def _states(layer_cache: Any) -> list[mx.array]:
    states = states_of(layer_cache)
    if states is None or any(state is None for state in states):
        raise ValueError(f"{type(layer_cache).__name__} has no written recurrent states")
    return states  # type: ignore[return-value]


def _row(state: mx.array, row: int) -> mx.array:
    if not 0 <= row < state.shape[0]:
        raise IndexError(f"row {row} of a batch of {state.shape[0]} rows")
    return state[row : row + 1]
