"""Parses a catalogue text into fields, quantity and unit, pack, sizes, brand and claims."""

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

UNITS: dict[str, tuple[str, float]] = {}
"""Spelling of a unit -> its kind and its size in the kind's base unit: g, ml, count (pieces) or mm."""

_SINGULARS = {  # without spaces, points and hyphens
    "g": {
        "g gr gm gram gramm gramme": 1.0,
        "mg milligram": 0.001,
        "kg kilo kilogram kilogramme": 1000.0,
        "oz ounce": 28.3495,
        "lb pound": 453.592,
    },
    "ml": {
        "ml milliliter millilitre": 1.0,
        "cl": 10.0,
        "l liter litre ltr": 1000.0,
        "floz flounce fluidoz fluidounce": 29.5735,
        "pt pint": 473.176,
        "qt quart": 946.353,
        "gal gallon": 3785.41,
    },
    "count": {
        "count ct piece pc each ea unit pack bag bottle can box": 1.0,
        "capsule tablet pod packet sheet roll set pair teabag": 1.0,
    },
    "mm": {
        "mm millimeter millimetre": 1.0,
        "cm centimeter centimetre": 10.0,
        "m meter metre": 1000.0,
        "in inch": 25.4,
        "ft foot feet": 304.8,
        "yd yard": 914.4,
    },
}
for _kind, _sizes in _SINGULARS.items():
    for _words, _size in _sizes.items():
        for _word in _words.split():
            _plural = _word + ("es" if _word.endswith(("x", "ch")) else "s")
            UNITS |= dict.fromkeys([_word, _plural] if len(_word) > 1 else [_word], (_kind, _size))

FLAGS = {
    "organic": r"\borganic\b",
    "premium": r"\b(?:gourmet|premium|luxury|deluxe)\b",
    "gluten_free": r"\bgluten[- ]?free\b",
    "bulk": r"\bbulk\b",
    "sugar_free": r"\bsugar[- ]?free\b|\bunsweetened\b",
    "gift": r"\bgift\b",
}
NUMBER_WORDS = {
    "two": 2, "double": 2, "twin": 2, "three": 3, "triple": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "twelve": 12, "dozen": 12,
}  # fmt: skip

_LABEL = re.compile(
    r"(?i)(item name|bullet points?|product description|description|value|unit|brand|designer|manufacturer|category)"
    r"(?: (\d+))?\s*:\s*(.*)"
)
_VULGAR = "[\u00bc-\u00be\u2150-\u215e]"  # a half, two thirds, ...: one character
# 1/2, 11/2, 1 1/2, 2-3/4; not 24/8 oz, which are 24 pieces, nor 35/42 cm, which are two sizes
_FRACTION = (
    r"(?<![\d/.,])(?:(?<![a-wyz])\d+(?:\s+|-))?(?:1/2|(?:\d*[13579]/(?:2|4|8|16|32|64)|[12]/3|[1-4]/5|[15]/6|[1379]/10|[157]/12)"
    r"(?!\s*[cm]m))(?![\d/])"
)
_NUMBER = rf"({_FRACTION}|\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_UNIT_SPELLINGS = "|".join(sorted(UNITS, key=len, reverse=True))
_QUANTITY = re.compile(
    rf"(?i){_NUMBER}[\s-]*((?:fl|fluid)[\s.-]*(?:oz|ounce)s?|{_UNIT_SPELLINGS})(?!\w)(?:\s?\(e?s\))?\.?"
)
_PACKS = (
    re.compile(r"(?i)\b(?:pack|set|case)\s+of\s+(\d{1,5})\b"),
    re.compile(r"(?i)\b(\d{1,5})[\s-]?(?:pack|count|ct|pcs)\b"),
    re.compile(r"(?i)\bqty\.?\s*:?\s*(\d{1,5})\b"),
)
_SIDE = rf"(?:{_FRACTION}|\d+(?:\.\d+)?)"
_SIZES = re.compile(rf"(?i)({_SIDE}(?:\s*[x/\u00d7]\s*{_SIDE})*)\s*(mm|cm|inch(?:es)?|m|ft|\")(?![a-z])")
_PIECES = re.compile(r"(?i)(?<![\dx/.])(\d{1,2})[\s-]+(?!x\b)([a-z]{3,})")
_NUMBER_WORD = re.compile(rf"(?i)\b({'|'.join(NUMBER_WORDS)})\b")
_FLAG_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in FLAGS.items()}
_TAG = re.compile(r"<[^<>]{1,200}>")
_WORD = re.compile(r"[^\W\d_]+")
_MAX_PACK = 10_000


@dataclass(frozen=True)
class Item:
    """One parsed catalogue text. Missing values are "" or None; a missing `pack` is 1, missing `pieces` are 0."""

    title: str
    bullets: tuple[str, ...]
    description: str
    category: str  # from a line Category
    maker: str  # from a line Brand, Manufacturer or Designer
    brand: tuple[str, ...]  # possible brands in lower case, the longest guess first
    value: float | None  # as written
    unit: str  # as written, lower case
    kind: str  # of the unit: g, ml, count or mm; "other": an unknown unit
    amount: float | None  # value in g, ml, pieces or mm; the value itself for an unknown unit
    pack: int  # item pack quantity
    sizes_mm: tuple[float, ...]  # the sides of the first size in the text, such as 130x70/105 cm
    pieces: int  # largest count in the text: "table and 4 chairs", "three-seat sofa"
    flags: tuple[str, ...]


def parse(*texts: str) -> Item:
    """Parse one item: lines "Item Name: ...", "Bullet Point 1: ...", "Value: ...", ..., all optional, in any order.

    A line without a known label continues the previous field; without any label, the first line is the title. HTML
    tags are removed, entities decoded, characters normalised (NFKC).

    Args:
        texts: one, or one from each of several columns; all but the first begin in the description.
    """
    fields, bullets = _split_fields([clean(text) for text in texts])
    title, description = fields.get("item name", ""), fields.get("description", "")
    whole_text = " ".join([title, *bullets, description])
    value, unit = _read_stated_quantity(fields)
    if value is None:
        value, unit = _find_quantity(title)
    kind, factor = read_unit(unit) or ("other" if unit else "", 1.0)
    maker = fields.get("brand") or fields.get("manufacturer") or fields.get("designer") or ""
    return Item(
        title=title,
        bullets=tuple(bullets),
        description=description,
        category=fields.get("category", ""),
        maker=maker,
        brand=_guess_brands(fields.get("brand", ""), title),
        value=value,
        unit=unit,
        kind=kind,
        amount=None if value is None else value * factor,
        pack=find_pack_quantity(title) if title else find_pack_quantity(whole_text),
        sizes_mm=_find_sizes(whole_text),
        pieces=_count_pieces(whole_text),
        flags=tuple(name for name, pattern in _FLAG_PATTERNS.items() if pattern.search(whole_text)),
    )


def clean(text: str) -> str:
    """Return the text without tags and entities, normalised, with its line breaks; "1\u00bd" is "1 1/2"."""
    decoded = re.sub(rf"(?<=\d)(?={_VULGAR})", " ", html.unescape(_TAG.sub(" ", text)))  # NFKC would make it 11/2
    plain = unicodedata.normalize("NFKC", decoded).replace("\u2044", "/")
    return "\n".join(" ".join(line.split()) for line in plain.splitlines())


def read_unit(text: str) -> tuple[str, float] | None:
    """Return the kind and size of a unit such as "Fl. Oz", "Ounce(s)" or "Grams(gm)"; None if it is unknown.

    Brackets must contain the same unit: "Ounce (box)" is unknown.
    """
    words = re.split(r"[()]", re.sub(r"\(e?s\)", "", text.lower()))
    units = {UNITS.get(word) for word in (re.sub(r"[\s.\-]", "", word) for word in words) if word}
    return units.pop() if len(units) == 1 else None


def find_pack_quantity(text: str) -> int:
    """Return the item pack quantity: the largest of "pack of N", "N-count", "qty N", ..., else 1."""
    quantities = [int(match) for pattern in _PACKS for match in pattern.findall(text)]
    return max(1, *(n for n in [1, *quantities] if n <= _MAX_PACK))


def compute_group_key(item: Item, *, by: str) -> str:
    """Return the text without quantities, packs, numbers and punctuation, which near-duplicates have in common.

    Args:
        by: "title", or "text" for title and description.
    """
    text = item.title if by == "title" else f"{item.title} {item.description}"
    for pattern in (*_PACKS, _SIZES, _QUANTITY):
        text = pattern.sub(" ", text)
    return " ".join(_WORD.findall(text.lower()))


DOCUMENT = ("title", "quantity", "pack", "maker", "category", "bullets", "description")
"""The fields that the encoder reads, the most important first, the description last, as it may be cut."""


def build_document(item: Item, fields: Sequence[str] = DOCUMENT) -> str:
    """Return the text for the encoder: these fields, in this order."""
    quantity = "" if item.value is None else f"{item.value:g} {item.unit}".strip()
    pack = f"pack {item.pack}" if item.pack > 1 else ""
    parts = {
        "title": [item.title], "quantity": [quantity], "pack": [pack], "maker": [item.maker],
        "category": [item.category], "bullets": item.bullets, "description": [item.description],
    }  # fmt: skip
    return " ; ".join(part for field in fields for part in parts[field] if part)


def _split_fields(texts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    fields: dict[str, str] = {}
    bullets: list[str] = []
    for number, text in enumerate(texts):
        current = "description" if number else "item name"
        for line in text.splitlines():
            label = _LABEL.match(line)
            if label:
                name, content = label[1].lower(), label[3]
                current = "description" if name == "product description" else name.removesuffix("s")
                if current == "bullet point":
                    bullets.append(content)
                elif current == "description" and number:  # an earlier column may have one too
                    fields[current] = f"{fields.get(current, '')} {content}".strip()
                else:
                    fields[current] = content
            elif current == "bullet point":
                bullets[-1] = f"{bullets[-1]} {line}".strip()
            elif current == "item name" and fields.get(current):  # a title is one line
                current = "description"
                fields[current] = line
            else:
                fields[current] = f"{fields.get(current, '')} {line}".strip()
    return fields, [bullet for bullet in bullets if bullet]


def _read_stated_quantity(fields: dict[str, str]) -> tuple[float | None, str]:
    match = re.match(_NUMBER, fields.get("value", ""))
    unit = fields.get("unit", "").strip().lower()
    return (_parse_number(match[1]) if match else None), ("" if unit in ("none", "nan", "null", "n/a") else unit)


def _find_quantity(title: str) -> tuple[float | None, str]:
    match = _QUANTITY.search(title)
    return (_parse_number(match[1]), match[2].lower()) if match else (None, "")


def _parse_number(text: str) -> float:
    """Read what `_NUMBER` matches; "1 1/2" and "1-1/2" are 1.5."""
    parts = (part.partition("/") for part in re.split(r"[\s-]+", text.replace(",", "")))
    return sum(float(top) / float(bottom or 1) for top, _, bottom in parts)


def _guess_brands(stated: str, title: str) -> tuple[str, ...]:
    if stated:
        return (stated.lower(),)
    words = [word.strip(",.;:()").lower() for word in title.split()[:2]]
    words = [word for word in words if word]
    return tuple(" ".join(words[:count]) for count in range(len(words), 0, -1))


def _find_sizes(text: str) -> tuple[float, ...]:
    match = _SIZES.search(text)
    if not match:
        return ()
    unit = "in" if match[2] == '"' else match[2].lower()
    return tuple(_parse_number(side) * UNITS[unit][1] for side in re.findall(_SIDE, match[0]))


def _count_pieces(text: str) -> int:
    counted = [int(n) for n, word in _PIECES.findall(text) if word.lower() not in UNITS]
    spelled_out = [NUMBER_WORDS[word.lower()] for word in _NUMBER_WORD.findall(text)]
    return max([0, *counted, *spelled_out])
