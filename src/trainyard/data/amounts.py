"""Reads prices and other numbers as people's tables write them, and refuses those that could mean two values."""

import math
import re
import unicodedata

from trainyard.errors import UserError

MARKS = ("auto", "point", "comma")
"""The decimal separator. "auto" reads a point, once nothing in the file speaks for a comma."""

_GROUPED = "[1-9]\\d{0,2}(?:(?P<mark>[,'\u2019 ])\\d{3})(?:(?P=mark)\\d{3})*"  # 1,234 or 1'234'567
_NUMBER = re.compile(rf"[+-]?(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_INDIAN = re.compile(r"[+-]?[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d*)?", re.ASCII)  # 1,29,999: 129999
_SEPARATORS = str.maketrans("", "", ",'\u2019 ")
_SWAP = str.maketrans(",.", ".,")
_NO_CENTS = re.compile("(.*\\d) ?([.,:/])[-\u2013\u2014]{1,2}")  # 10.- or 10,- or 10:- or 10/-

_ISO_4217 = (  # the codes of countries, compared with pycountry 26.2.16; ANG and BGN have ended
    "AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF CHF "
    "CLP CNY COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GNF GTQ GYD HKD HNL HTG "
    "HUF IDR ILS INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT LAK LBP LKR LRD LSL LYD MAD MDL MGA "
    "MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD OMR PAB PEN PGK PHP PKR PLN PYG QAR RON RSD "
    "RUB RWF SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TND TOP TRY TTD TWD TZS UAH UGX "
    "USD UYU UZS VES VND VUV WST XAF XCD XCG XOF XPF YER ZAR ZMW ZWG"
)
_CODES = frozenset(_ISO_4217.split())
_NAMES = {  # signs and abbreviations, without spaces and points -> their currencies; alone they mean the first
    "$": "USD AUD BBD BMD BND BSD BZD CAD FJD GYD HKD JMD KYD LRD MXN NAD NZD SBD SGD SRD TTD TWD ARS CLP COP UYU XCD",
    "us$": "USD", "a$ au$": "AUD", "c$ ca$": "CAD", "hk$": "HKD", "mx$": "MXN", "nt$": "TWD", "nz$": "NZD",
    "r$": "BRL", "s$": "SGD", "\u00a3": "GBP EGP FKP GIP SHP", "\u00a5": "\u00a5 JPY CNY", "\u20ac euro euros": "EUR",
    "\u20b9": "INR", "rs re": "INR PKR LKR NPR MUR SCR", "kr": "kr SEK NOK DKK ISK", "fr sfr": "CHF", "rmb": "CNY",
    "z\u0142": "PLN", "k\u010d": "CZK", "ft": "HUF", "lei": "RON", "tl \u20ba": "TRY", "\u20bd": "RUB", "\u20b4": "UAH",
    "\u20a9": "KRW", "\u20ab": "VND", "\u20aa": "ILS", "\u20b1": "PHP", "\u20a6": "NGN", "\u0e3f": "THB", "rm": "MYR",
    "rp": "IDR", "dh dhs": "AED MAD", "r": "ZAR",
}  # fmt: skip
_CURRENCIES = {name: tuple(codes.split()) for names, codes in _NAMES.items() for name in names.split()}
_SIGNS = "$\u00a3\u00a5\u0e3f\u20a0-\u20c0"  # no cent: 99 of them are not 99
_ABBREVIATIONS = "|".join(sorted((name for name in _CURRENCIES if name.isalpha()), key=len, reverse=True))
_CURRENCY = rf"(?:[a-z]{{0,3}} ?[{_SIGNS}]|(?:{_ABBREVIATIONS})\.?|[a-z]{{3}})"
_PRICE = re.compile(rf"({_CURRENCY})?\s*([-+.\d].*?)\s*({_CURRENCY})?", re.IGNORECASE)


class AmountReader:
    """Reads the numbers of one file, and infers its decimal mark and currency.

    Args:
        file: named in errors.
        decimal_mark: one of `MARKS`.
    """

    def __init__(self, file: str, *, decimal_mark: str) -> None:
        self.file, self.decimal_mark = file, decimal_mark
        self._first_by_reading: dict[str, tuple[int, str]] = {}  # "point", "comma", "either" -> line and cell
        self._first_by_currency: dict[str, tuple[int, str]] = {}

    def read_price(self, cell: str, *, line: int) -> float:
        """Return a price, with or without a currency before and after it; nan if it is not a number."""
        match = _PRICE.fullmatch(_normalise(cell))
        if match is None:
            return math.nan
        possible = [_find_currencies(name) for name in (match[1], match[3]) if name]
        common = [code for code in possible[0] if code in possible[-1]] if possible else []
        price = math.nan if possible and not common else self.read_number(_drop_dash(match[2]), line=line)
        if common and not math.isnan(price):
            self._first_by_currency.setdefault(common[0], (line, cell.strip()))
        return price

    def read_number(self, cell: str, *, line: int) -> float:
        """Return a number, with or without thousands separators; nan if it is not one."""
        text = _normalise(cell)
        plain = text.replace(",", "") if _INDIAN.fullmatch(text) else text
        point, comma = _parse(plain), _parse(text.translate(_SWAP))
        if point != comma and not (math.isnan(point) and math.isnan(comma)):
            reading = "comma" if math.isnan(point) else "point" if math.isnan(comma) else "either"
            self._first_by_reading.setdefault(reading, (line, text))
        return comma if self.decimal_mark == "comma" else point

    def refuse_doubt(self, *, points: bool = False) -> None:
        """Check the numbers read so far.

        Args:
            points: a point that could separate thousands separates decimals, since commas separate the columns.

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
            with_point = self._first_by_reading.get("point")
            contrast = f", but '{with_point[1]}' in line {with_point[0]} a decimal point" if with_point else ""
            usual = "packing.decimal_mark=comma. It is usual where semicolons separate the columns"
            remedy = "Write all numbers alike" if with_point else f"State it: {usual}"
            raise UserError(f"{self.file}, line {line}: '{cell}' has a decimal comma{contrast}. {remedy}.")
        if not points and "either" in self._first_by_reading and "point" not in self._first_by_reading:
            line, text = self._first_by_reading["either"]
            point, comma = _parse(text), _parse(text.translate(_SWAP))
            raise UserError(
                f"{self.file}, line {line}: '{text}' could be {point:.12g} or {comma:.12g}, and no other number tells. "
                f"State which: packing.decimal_mark=point; comma gives {comma:.12g}."
            )


def parse_number(cell: str, decimal_mark: str) -> float:
    """Return a number as `AmountReader.read_number` does, and remember nothing."""
    return AmountReader("", decimal_mark=decimal_mark).read_number(cell, line=0)


def _normalise(cell: str) -> str:
    """Return the cell with plain spaces and digits (NFKC), without spaces around it."""
    return unicodedata.normalize("NFKC", cell).strip()


def _find_currencies(name: str) -> tuple[str, ...]:
    """Return the codes that a sign, code or abbreviation may mean, the likeliest first; none if it names none."""
    short = re.sub(r"[\s.]", "", name).casefold()
    code = short.removesuffix("$").upper()
    if code in _CODES:
        return (code,)
    return _CURRENCIES.get(short, () if short.isalpha() else (short,))


def _drop_dash(text: str) -> str:
    """Return the number without a dash for no cents; a mark stays before it where it decides about the others."""
    match = _NO_CENTS.fullmatch(text)
    if match is None:
        return text
    return match[1] + (match[2] if match[2] in ".," and re.search("[.,]", match[1]) else "")


def _parse(text: str) -> float:
    """Read a number whose decimals follow a point; nan if it is not one."""
    return float(text.translate(_SEPARATORS)) if _NUMBER.fullmatch(text) else math.nan
