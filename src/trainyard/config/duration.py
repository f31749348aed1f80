"""Lengths of training as people write them."""

import re
from dataclasses import dataclass

from trainyard.errors import UserError

LONGEST = 2**53
"""In any unit. Above it not every whole number is a float."""


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs ("ep"), optimizer steps ("st") or minutes of training ("min")."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Read "10ep", "2000st", "30min", "8h" or "8h30m".

        Raises:
            UserError: `text` is none of these, a number of steps is not whole, or it is longer than `LONGEST`.
        """
        clock = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?", text)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ep|st|min)", text)
        if text and clock:
            length = cls(60 * float(clock[1] or 0) + float(clock[2] or 0), "min")
        elif match and not (match[2] == "st" and "." in match[1]):
            length = cls(float(match[1]), match[2])
        else:
            raise UserError(f"'{text}' is not a duration. Write epochs 10ep, steps 2000st, minutes 30min, or 8h30m.")
        if length.value > LONGEST:
            raise UserError(f"'{text}' is too long: expected at most {LONGEST}{length.unit}.")
        return length

    def to_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps; a duration in minutes has none.

        Raises:
            UserError: the duration is in minutes.
        """
        if self.unit == "min":
            raise UserError(f"'{self}' is a time, but a number of steps is needed here. Write 10ep or 2000st.")
        return round(self.value * steps_per_epoch) if self.unit == "ep" else int(self.value)

    def to_minutes(self) -> float:
        """Return the length in minutes.

        Raises:
            UserError: the duration is in epochs or steps.
        """
        if self.unit != "min":
            raise UserError(f"'{self}' is not a time. Write 30min or 8h30m.")
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"
