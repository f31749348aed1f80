"""The type of all automatic choices. Each is shown to the user and recorded in the run's env.json."""

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """A value and the reason for it."""

    value: T
    reason: str
