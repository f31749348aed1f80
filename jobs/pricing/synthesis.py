"""A synthetic catalogue: prices follow from text and numbers, plus noise that bounds the best possible score."""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.files import create_folder

FILE = "catalogue.csv"
NOISE = 0.12  # standard deviation of the unpredictable part of ln(price)
FLOOR = 100 * NOISE * math.sqrt(2 / math.pi)
"""The best possible SMAPE, 9.6 %: 2 tanh(d / 2) is about d, and E|d| = NOISE sqrt(2 / pi)."""

_KINDS = (  # name, unit as written, base units of one, sizes, price of the middle size
    ("Ground Coffee", "Ounce", 28.35, (8, 12, 16, 32), 11.0),
    ("Olive Oil", "Fl Oz", 29.57, (8.5, 17, 25.4, 34), 15.0),
    ("Green Tea Bags", "Count", 1.0, (20, 50, 100), 8.0),
    ("Dark Chocolate", "Ounce", 28.35, (3.5, 7, 14), 6.5),
    ("Basmati Rice", "Pound", 453.6, (2, 5, 10, 20), 14.0),
    ("Hot Sauce", "Fl Oz", 29.57, (5, 8, 12), 5.5),
    ("Protein Powder", "Pound", 453.6, (1, 2, 5), 32.0),
    ("Vitamin C Tablets", "Count", 1.0, (60, 120, 250), 16.0),
    ("Almond Butter", "Gram", 1.0, (250, 340, 500), 10.0),
    ("Maple Syrup", "Milliliter", 1.0, (250, 500, 1000), 18.0),
    ("Saffron Threads", "Gram", 1.0, (1, 2, 5), 24.0),
    ("Sea Salt", "Gram", 1.0, (125, 500, 1000), 4.5),
)
_CLAIMS = {"Organic": 1.3, "Premium": 1.45, "Gluten-Free": 1.1, "Sugar-Free": 1.05, "Bulk": 0.8, "Gift": 1.25}
_TASTES = (
    "Classic",
    "Smoked",
    "Crème Brûlée",
    "Jalapeño",
    "Vanilla",
    "Añejo",
    "Lemon & Ginger",
    "Original",
    "Spicy",
    "Mild",
)
_PRAISE = (
    "Rich, smooth taste", "No artificial colors", "Made in small batches", 'Our "house" recipe', "Resealable bag",
    "Family owned since 1954", "Great for baking, cooking and snacking", "Kosher certified", "Non-GMO", "Ships fresh",
)  # fmt: skip
_SYLLABLES = (
    "bel",
    "cor",
    "dal",
    "fen",
    "gri",
    "hol",
    "jun",
    "kel",
    "lor",
    "mar",
    "nor",
    "pas",
    "qui",
    "ros",
    "sel",
    "tor",
    "ü",
    "é",
)


@dataclass(frozen=True)
class _Product:
    kind: int
    brand: str
    taste: str
    claims: tuple[str, ...]
    log_price: float  # of the middle size in a pack of one


def synthesize(raw: Path, *, count: int, seed: int) -> None:
    """Write `count` rows to `raw/catalogue.csv`: ids, texts in the format of the Amazon ML Challenge 2025, prices.

    Each product has one to four variants of size and pack. Texts contain line breaks, quotes, tags, entities and
    letters beyond ASCII; some fields are missing, as in real data. Equal arguments give equal files.
    """
    with create_folder(raw) as folder:
        (folder / FILE).write_text(_generate_csv(count, np.random.default_rng(seed)), encoding="utf-8", newline="")


def _generate_csv(count: int, rng: np.random.Generator) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["sample_id", "catalog_content", "price"])
    brands = [_draw_brand(rng) for _ in range(max(6, count // 60))]
    factors = rng.normal(0, 0.35, len(brands))
    rows = 0
    while rows < count:
        product = _draw_product(brands, factors, rng)
        for _ in range(min(count - rows, int(rng.integers(1, 5)))):
            text, log_price = _draw_variant(product, rng)
            price = math.exp(log_price + rng.normal(0, NOISE))
            writer.writerow([100_000 + rows, text, f"{max(price, 0.05):.2f}"])
            rows += 1
    return out.getvalue()


def _draw_brand(rng: np.random.Generator) -> str:
    return "".join(rng.choice(_SYLLABLES, int(rng.integers(2, 4)))).capitalize()


def _draw_product(brands: list[str], factors: np.ndarray, rng: np.random.Generator) -> _Product:
    kind, brand = int(rng.integers(len(_KINDS))), int(rng.integers(len(brands)))
    claims = tuple(name for name in _CLAIMS if rng.random() < 0.15)
    worth = sum(math.log(_CLAIMS[name]) for name in claims)
    taste = str(rng.choice(_TASTES))
    return _Product(kind, brands[brand], taste, claims, math.log(_KINDS[kind][4]) + worth + float(factors[brand]))


def _draw_variant(product: _Product, rng: np.random.Generator) -> tuple[str, float]:
    """Return the text of one variant and ln of its price without noise."""
    name, unit, _, sizes, _ = _KINDS[product.kind]
    size, pack = float(rng.choice(sizes)), int(rng.choice((1, 1, 1, 2, 3, 6, 12)))
    middle = sizes[len(sizes) // 2]
    log_price = product.log_price + 0.8 * math.log(size / middle) + 0.9 * math.log(pack)
    in_title = rng.random() < 0.8
    title = " ".join([product.brand, *product.claims, product.taste, name])
    if in_title:
        title += f", {size:g} {unit}" + (f" (Pack of {pack})" if pack > 1 else "")
    lines = [f"Item Name: {title}"]
    for number in range(int(rng.integers(0, 6))):
        lines.append(f"Bullet Point {number + 1}: {rng.choice(_PRAISE)}")
    if rng.random() < 0.7:
        praise = " ".join(rng.choice(_PRAISE, 3))
        lines.append(f"Product Description: <p>{praise}</p>\n{product.brand}&#39;s <b>{name}</b> &amp; more.")
    if not in_title or rng.random() < 0.85:
        lines += [f"Value: {size * pack}", f"Unit: {unit}"]
    return "\n".join(lines) + "\n", log_price
