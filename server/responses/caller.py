"""Who asks for a stored response, and which ones there are for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """
    Attributes:
        tenant: `Key.tenant` of the key that the request has brought; None where the server has no keys.
            What the caller makes is theirs.
        everything: they reach what others have made, too: an admin, or anybody where there are no keys.
    """

    tenant: str | None = None
    everything: bool = True

    def reaches(self, tenant: str | None) -> bool:
        """Whether what `tenant` has made is there for them. What nobody's key has made is there for all."""
        return self.everything or tenant is None or tenant == self.tenant


ANYBODY = Caller()
