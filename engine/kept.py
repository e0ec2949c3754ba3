"""What may be asked of the kept prefixes from outside: to keep one for good, to let all go."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chairlift.engine.config import EngineConfig
from chairlift.engine.disk import DiskTraffic
from chairlift.engine.errors import InvalidParameter
from chairlift.engine.events import Failed
from chairlift.engine.handle import RequestHandle
from chairlift.engine.plan import LoadedModel, StepPlan
from chairlift.engine.prefix.chain import Chain, root_digest
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.quantities import size
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.scheduler import Scheduler

PREFIX_SHARE = 0.1
"""Of the device's memory beside the weights, for prefixes, where the operator names no size."""
PINNED_SHARE = 0.5
"""Of the memory for prefixes, that pinned ones may take."""


def with_prefixes(loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
    """The same with what memory this model's prefixes have; where that is none, they have no disk either."""
    kept = _prefix_bytes(loaded, config)
    disk = config.prefix_cache_disk_bytes if kept else 0
    return replace(config, prefix_cache_bytes=kept, prefix_cache_disk_bytes=disk)


def _prefix_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Memory for prefixes of this model: what is configured, or a share of the device's; 0 where nothing of
    it can be kept."""
    if loaded.prefix is None:
        return 0
    if config.prefix_cache_bytes is not None:
        return config.prefix_cache_bytes
    return usual_prefix_bytes(config.memory_limit_bytes or loaded.info.memory_bytes, loaded.info.weight_bytes)


def usual_prefix_bytes(device: int, weights: int) -> int:
    """Of a device whose memory may be used so far, beside a model's weights."""
    return int(PREFIX_SHARE * max(0, device - weights))


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Bytes of kept prefixes that are kept no longer."""

    memory: int
    disk: int


@dataclass(slots=True)
class KeptPrefixes:
    """On the event loop.

    Args:
        scheduler: whose prefixes they are.
        disk: where there is one.
        submit: the engine's.
        wake: has the engine look whether there is something to plan.
    """

    scheduler: Scheduler
    disk: DiskTraffic | None
    submit: Callable[[Request], RequestHandle]
    wake: Callable[[], None]
    _clearing: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    """Number of the last plan that was made before, and who waits for one after it."""

    async def warm(self, tokens: Sequence[int], salt: str) -> int:
        """See `Engine.warm`."""
        index = self.scheduler.prefixes.index
        if index is None:
            raise InvalidParameter("prompt", "This server keeps no prefixes of this model's prompts.")
        chain = Chain(root_digest(self.scheduler.prefixes.identity, salt), index.spec.block_tokens, tokens)
        _require_room(index, chain)
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        asked = Request(f"warm-{secrets.token_hex(8)}", tuple(tokens), sampling, cache_salt=salt)
        async with self.submit(asked) as handle:
            async for event in handle:
                if isinstance(event, Failed):
                    raise event.error
        _require_room(index, chain)  # others may have been pinned meanwhile
        return index.pin(chain)

    async def clear(self, *, disk: bool) -> CacheCleared:
        """See `Engine.clear_cache`."""
        memory = self.scheduler.prefixes.stats.bytes
        self.scheduler.clear_prefixes()
        done = asyncio.get_running_loop().create_future()
        self._clearing.append((self.scheduler.plans, done))
        self.wake()
        await done  # until then steps may offer the disk what was kept
        files = await self.disk.clear() if disk and self.disk is not None else 0
        return CacheCleared(memory, files)

    def carried_out(self, plan: StepPlan | None = None) -> None:
        """A plan, or all there will be."""
        waiting = []
        for before, done in self._clearing:
            if plan is not None and plan.number <= before:
                waiting.append((before, done))
            elif not done.done():
                done.set_result(None)
        self._clearing = waiting


def _require_room(index: PrefixIndex, chain: Chain) -> None:
    """Raises: InvalidParameter: it cannot be pinned beside what is."""
    need, room = index.unpinned_bytes(chain), int(index.limit * PINNED_SHARE) - index.pinned
    if need > room:
        raise InvalidParameter(
            "prompt",
            f"Keeping {len(chain)} tokens takes {size(need, 4)}; {size(max(0, room), 4)} are left to prompts "
            "that are kept for good, which may take half of --prefix-cache-ram.",
        )
