"""Reads prices and other numbers as catalogues write them, and refuses those that could mean two values."""

import math
import re
import unicodedata

from trainyard.errors import UserError

MARKS = ("auto", "point", "comma")
"""What separates the decimals. "auto" reads a point, once nothing in the file speaks for a comma."""

_GROUPED = "[1-9]\\d{0,2}(?:(?P<mark>[,'\u2019 ])\\d{3})(?:(?P=mark)\\d{3})*"  # 1,234 or 1'234'567
_NUMBER = re.compile(rf"[+-]?(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_SEPARATORS = str.maketrans("", "", ",'\u2019 ")
_SWAP = str.maketrans(",.", ".,")
_SIGN = "(?:[A-Z]{0,3}[$\u00a3\u00a5\u20a0-\u20c0])"  # $, US$, pound, yen, euro, ...; no cent: 99 of them are not 99
_PRICE = re.compile(rf"({_SIGN}?)\s*(.*?)\s*({_SIGN}?)")


class AmountReader:
    """Reads the numbers of one file, and remembers what they say about its decimal mark and currency.

    Args:
        file: named in errors.
        decimal_mark: one of `MARKS`.
    """

    def __init__(self, file: str, *, decimal_mark: str) -> None:
        self.file, self.decimal_mark = file, decimal_mark
        self._first_by_reading: dict[str, tuple[int, str]] = {}  # "point", "comma", "either" -> line and cell
        self._first_by_currency: dict[str, tuple[int, str]] = {}

    def read_price(self, cell: str, *, line: int) -> float:
        """Return a price, with or without a currency sign before or after it; nan if it is not a number."""
        match = _PRICE.fullmatch(_normalise(cell))
        if match is None or (match[1] and match[3]):
            return math.nan
        if currency := match[1] or match[3]:
            self._first_by_currency.setdefault(currency, (line, cell.strip()))
        return self.read_number(match[2], line=line)

    def read_number(self, cell: str, *, line: int) -> float:
        """Return a number, with or without thousands separators; nan if it is not one."""
        text = _normalise(cell)
        point, comma = _parse(text), _parse(text.translate(_SWAP))
        if point != comma and not (math.isnan(point) and math.isnan(comma)):
            reading = "comma" if math.isnan(point) else "point" if math.isnan(comma) else "either"
            self._first_by_reading.setdefault(reading, (line, text))
        return comma if self.decimal_mark == "comma" else point

    def refuse_doubt(self) -> None:
        """Check what was read so far.

        Raises:
            UserError: prices have several currencies; or no mark is stated, and a number has a decimal comma, or all
                that could tell thousands from decimals could be either.
        """
        if len(self._first_by_currency) > 1:
            named = ", ".join(f"'{cell}' in line {line}" for line, cell in self._first_by_currency.values())
            raise UserError(f"{self.file}: prices in several currencies: {named}. Convert them to one currency.")
        if self.decimal_mark != "auto":
            return
        if "comma" in self._first_by_reading:
            line, cell = self._first_by_reading["comma"]
            other = self._first_by_reading.get("point")
            contrast = f", but '{other[1]}' in line {other[0]} a decimal point" if other else ""
            remedy = "Write all numbers alike" if other else "State it: packing.decimal_mark=comma"
            raise UserError(f"{self.file}, line {line}: '{cell}' has a decimal comma{contrast}. {remedy}.")
        if "either" in self._first_by_reading and "point" not in self._first_by_reading:
            line, text = self._first_by_reading["either"]
            point, comma = _parse(text), _parse(text.translate(_SWAP))
            raise UserError(
                f"{self.file}, line {line}: '{text}' could be {point:.12g} or {comma:.12g}, and no other number tells. "
                f"State which: packing.decimal_mark=point; comma gives {comma:.12g}."
            )


def _normalise(cell: str) -> str:
    """Return the cell with plain spaces and digits (NFKC), without spaces around it."""
    return unicodedata.normalize("NFKC", cell).strip()


def _parse(text: str) -> float:
    """Read a number whose decimals follow a point; nan if it is not one."""
    return float(text.translate(_SEPARATORS)) if _NUMBER.fullmatch(text) else math.nan
