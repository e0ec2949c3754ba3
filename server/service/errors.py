"""What an operator is told when a service cannot be had as asked."""

from __future__ import annotations


class ServiceFault(Exception):
    """One line, fit for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
