"""What a catalogue text says: its fields, quantity and unit, pack, sizes, brand and claims. Same text, same answer."""

import html
import re
import unicodedata
from dataclasses import dataclass

UNITS: dict[str, tuple[str, float]] = {}
"""Spelling of a unit -> its kind and how many of the kind's base unit it holds: g, ml, count (pieces) or mm."""

for _kind, _spellings in {
    "g": {
        "g gr gram grams gramm": 1.0,
        "mg milligram milligrams": 0.001,
        "kg kilo kilos kilogram kilograms": 1000.0,
        "oz ounce ounces": 28.3495,
        "lb lbs pound pounds": 453.592,
    },
    "ml": {
        "ml milliliter milliliters millilitre millilitres": 1.0,
        "cl": 10.0,
        "l liter liters litre litres ltr": 1000.0,
        "floz fluidounce fluidounces flounce": 29.5735,
        "pt pint pints": 473.176,
        "qt quart quarts": 946.353,
        "gal gallon gallons": 3785.41,
    },
    "count": {
        "count ct piece pieces pc pcs each ea unit units pack packs bag bags bottle bottles can cans box boxes": 1.0,
        "capsule capsules tablet tablets pod pods packet packets sheet sheets roll rolls set pair teabag teabags": 1.0,
    },
    "mm": {
        "mm millimeter millimeters": 1.0,
        "cm centimeter centimeters": 10.0,
        "m meter meters metre metres": 1000.0,
        "in inch inches": 25.4,
        "ft foot feet": 304.8,
        "yd yard yards": 914.4,
    },
}.items():
    for _words, _factor in _spellings.items():
        UNITS |= dict.fromkeys(_words.split(), (_kind, _factor))

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
_NUMBER = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_WRITTEN_UNITS = "|".join(sorted(UNITS, key=len, reverse=True))
_QUANTITY = re.compile(rf"(?i){_NUMBER}[\s-]*(fl\.?\s*oz|fluid\s+ounces?|{_WRITTEN_UNITS})\b\.?")
_PACKS = (
    re.compile(r"(?i)\b(?:pack|set|case)\s+of\s+(\d{1,5})\b"),
    re.compile(r"(?i)\b(\d{1,5})[\s-]?(?:pack|count|ct|pcs)\b"),
    re.compile(r"(?i)\bqty\.?\s*:?\s*(\d{1,5})\b"),
)
_SIZES = re.compile(r"(?i)(\d+(?:\.\d+)?(?:\s*[x/\u00d7]\s*\d+(?:\.\d+)?)*)\s*(mm|cm|inch(?:es)?|m|ft|\")(?![a-z])")
_PIECES = re.compile(r"(?i)(?<![\dx/.])(\d{1,2})[\s-]+(?!x\b)([a-z]{3,})")
_NUMBER_WORD = re.compile(rf"(?i)\b({'|'.join(NUMBER_WORDS)})\b")
_FLAG_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in FLAGS.items()}
_TAG = re.compile(r"<[^<>]{1,200}>")
_WORD = re.compile(r"[^\W\d_]+")
_MAX_PACK = 10_000


@dataclass(frozen=True)
class Item:
    """One catalogue text, read. What it does not say is "" or None; `pack` and `pieces` are then 1 and 0."""

    title: str
    bullets: tuple[str, ...]
    description: str
    maker: str  # from a line Brand, Manufacturer or Designer
    brand: tuple[str, ...]  # what may be the brand, the longest guess first, lower case
    value: float | None  # as written
    unit: str  # as written, lower case
    kind: str  # of the unit: g, ml, count or mm; "other": a unit we do not know
    amount: float | None  # value in g, ml, pieces or mm; the value itself for a unit we do not know
    pack: int  # item pack quantity
    sizes_mm: tuple[float, ...]  # the sides of the first size such as 130x70/105 cm
    pieces: int  # what the text counts: "table and 4 chairs", "three-seat sofa"
    flags: tuple[str, ...]


def parse(text: str) -> Item:
    """Read one text: lines "Item Name: ...", "Bullet Point 1: ...", "Value: ...", ... in any order, any of them absent.

    A line without a known label goes on with the field before it; a text without any label has its first line as title.
    HTML tags go, entities become characters, characters are normalised (NFKC).
    """
    fields, bullets = _fields(clean(text))
    title, description = fields.get("item name", ""), fields.get("description", "")
    told = " ".join([title, *bullets, description])
    value, unit = _written_quantity(fields)
    if value is None:
        value, unit = _quantity_in(title)
    kind, factor = UNITS.get(_spelling(unit), ("other" if unit else "", 1.0))
    maker = fields.get("brand") or fields.get("manufacturer") or fields.get("designer") or ""
    return Item(
        title=title,
        bullets=tuple(bullets),
        description=description,
        maker=maker,
        brand=_brands(fields.get("brand", ""), title),
        value=value,
        unit=unit,
        kind=kind,
        amount=None if value is None else value * factor,
        pack=pack_quantity(title) if title else pack_quantity(told),
        sizes_mm=_sizes(told),
        pieces=_pieces(told),
        flags=tuple(name for name, pattern in _FLAG_PATTERNS.items() if pattern.search(told)),
    )


def clean(text: str) -> str:
    """Return the text without tags and entities, normalised, its line breaks kept."""
    plain = unicodedata.normalize("NFKC", html.unescape(_TAG.sub(" ", text)))
    return "\n".join(" ".join(line.split()) for line in plain.splitlines())


def pack_quantity(text: str) -> int:
    """Return the item pack quantity: the largest of "pack of N", "N-count", "qty N", ..., else 1."""
    found = [int(match) for pattern in _PACKS for match in pattern.findall(text)]
    return max(1, *(n for n in [1, *found] if n <= _MAX_PACK))


def group_key(item: Item, *, by: str) -> str:
    """Return what near-duplicates share: a text without its quantities, packs, numbers and punctuation.

    Args:
        by: "title", or "text": title and description.
    """
    text = item.title if by == "title" else f"{item.title} {item.description}"
    for pattern in (*_PACKS, _SIZES, _QUANTITY):
        text = pattern.sub(" ", text)
    return " ".join(_WORD.findall(text.lower()))


def document(item: Item) -> str:
    """Return the text that the encoder reads: what decides first and the description last, for it may be cut off."""
    quantity = "" if item.value is None else f"{item.value:g} {item.unit}".strip()
    pack = f"pack {item.pack}" if item.pack > 1 else ""
    parts = [item.title, quantity, pack, item.maker, *item.bullets, item.description]
    return " ; ".join(part for part in parts if part)


def _fields(text: str) -> tuple[dict[str, str], list[str]]:
    fields: dict[str, str] = {}
    bullets: list[str] = []
    current = "item name"
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            name, content = label[1].lower(), label[3]
            current = "description" if name == "product description" else name.removesuffix("s")
            if current == "bullet point":
                bullets.append(content)
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


def _written_quantity(fields: dict[str, str]) -> tuple[float | None, str]:
    match = re.match(_NUMBER, fields.get("value", ""))
    unit = fields.get("unit", "").strip().lower()
    return (_number(match[1]) if match else None), ("" if unit in ("none", "nan", "null", "n/a") else unit)


def _quantity_in(title: str) -> tuple[float | None, str]:
    match = _QUANTITY.search(title)
    return (_number(match[1]), match[2].lower()) if match else (None, "")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _spelling(unit: str) -> str:
    return re.sub(r"[\s.\-]", "", unit)


def _brands(stated: str, title: str) -> tuple[str, ...]:
    if stated:
        return (stated.lower(),)
    words = [word.strip(",.;:()").lower() for word in title.split()[:2]]
    words = [word for word in words if word]
    return tuple(" ".join(words[:count]) for count in range(len(words), 0, -1))


def _sizes(text: str) -> tuple[float, ...]:
    match = _SIZES.search(text)
    if not match:
        return ()
    unit = "in" if match[2] == '"' else match[2].lower()
    return tuple(float(side) * UNITS[unit][1] for side in re.findall(r"\d+(?:\.\d+)?", match[1]))


def _pieces(text: str) -> int:
    counted = [int(n) for n, word in _PIECES.findall(text) if word.lower() not in UNITS]
    spelt = [NUMBER_WORDS[word.lower()] for word in _NUMBER_WORD.findall(text)]
    return max([0, *counted, *spelt])
