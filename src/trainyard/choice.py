"""What was chosen automatically, and why: each is shown to the user and recorded in the run's env.json."""

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """What was chosen automatically, and why."""

    value: T
    reason: str
