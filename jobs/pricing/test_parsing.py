"""Parsing catalogue texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import parsing


@pytest.mark.parametrize(
    ("text", "value", "kind", "amount", "pack"),
    [
        ("Item Name: Beans, 12 Ounce (Pack of 6)", 12, "g", 12 * 28.3495, 6),
        ("Item Name: Flour 5-Pound Bags (Pack of 2)", 5, "g", 5 * 453.592, 2),
        ("Item Name: Tea, 100 Count", 100, "count", 100, 100),
        ("Item Name: Syrup\nValue: 72.0\nUnit: Fl Oz\n", 72, "ml", 72 * 29.5735, 1),
        ("Item Name: Syrup 12 fl oz (Pack of 6)\nValue: 72.0\nUnit: Fl Oz", 72, "ml", 72 * 29.5735, 6),
        ("Item Name: Rope 3 m", 3, "mm", 3000, 1),
        ("Item Name: Set of 4 mugs, qty 2", None, "", None, 4),
        ("Item Name: Sugar, 1,000 g", 1000, "g", 1000, 1),
        ("Item Name: Oats\nValue: 18\nUnit: Bushel", 18, "other", 18, 1),
        ("Item Name: Oats\nValue: None\nUnit: None", None, "", None, 1),
        ("plain words and no label", None, "", None, 1),
        ("", None, "", None, 1),
    ],
)
def test_the_parser_reads_quantities(
    text: str, value: float | None, kind: str, amount: float | None, pack: int
) -> None:
    item = parsing.parse(text)
    assert (item.value, item.kind, item.pack) == (value, kind, pack)
    assert item.amount == (None if amount is None else pytest.approx(amount))


@pytest.mark.parametrize(
    ("unit", "kind", "size"),
    [
        *(
            (unit, "g", 1)
            for unit in ("Grams(gm)", "gms", "Gram(s)", "Gram (s)", "GRAMS", "Gms.", "g (gram)", "Grammes")
        ),
        *((unit, "g", 1000) for unit in ("kgs", "Kilogram(s)", "KGS.", "Kilograms (kg)")),
        *((unit, "g", 453.592) for unit in ("Pound(s)", "lbs.", "LBS", "lb(s)", "Pounds(lb)")),
        *((unit, "g", 28.3495) for unit in ("Oz.", "ozs", "Ounce(s)")),
        *((unit, "ml", 1) for unit in ("Millilitre(s)", "mls", "Milliliter(ml)")),
        *((unit, "ml", 1000) for unit in ("Litre(s)", "ltrs", "Litre (L)")),
        *(
            (u, "ml", 29.5735)
            for u in ("Fluid Ounce(s)", "fluid ounce(s)", "fl. oz", "fl oz.", "FL.OZ.", "Fluid Oz(s)")
        ),
        *((unit, "count", 1) for unit in ("Count(s)", "Box(es)", "Pairs", "cts.", "Piece(s)")),
        *((unit, "mm", 25.4) for unit in ("Inch(es)", "ins")),
    ],
)
def test_a_unit_is_read_in_any_spelling_in_its_field_and_in_a_title(unit: str, kind: str, size: float) -> None:
    for text in (f"Item Name: x\nValue: 3\nUnit: {unit}", f"Item Name: x, 3 {unit}, y", f"x 3 {unit}"):
        item = parsing.parse(text)
        assert (item.value, item.kind) == (3, kind) and item.amount == pytest.approx(3 * size)


@pytest.mark.parametrize("unit", ["Grams(oz)", "Ounce (box)", "(s)", "()", "ms"])
def test_a_unit_that_is_unknown_or_two_units_has_no_known_kind(unit: str) -> None:
    item = parsing.parse(f"Item Name: x\nValue: 3\nUnit: {unit}")
    assert (item.value, item.kind, item.amount) == (3, "other", 3)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("1/2", 0.5), ("1 1/2", 1.5), ("1\u00bd", 1.5), ("1 \u00bd", 1.5), ("\u00bd", 0.5), ("1-1/2", 1.5),
        ("2 3/4", 2.75), ("11/2", 5.5), ("11\u20442", 5.5), ("12&frac34;", 12.75), ("1\u2153", 4 / 3),
        ("2/3", 2 / 3), ("7/8", 0.875), ("1-\u00bc", 1.25), ("5/16", 0.3125), ("3/10", 0.3),
        ("2.5", 2.5), ("1,250", 1250), (".5", 0.5),
    ],
)  # fmt: skip
def test_a_fraction_is_read_in_its_field_and_in_a_title(number: str, value: float) -> None:
    for text in (f"Item Name: x\nValue: {number}\nUnit: oz", f"Item Name: Bar, {number} oz", f"x {number}-Ounce y"):
        item = parsing.parse(text)
        assert item.value == pytest.approx(value) and item.amount == pytest.approx(value * 28.3495)


@pytest.mark.parametrize(
    ("text", "sides_mm"),
    [
        ("Table, 130x70/105 cm", (1300, 700, 1050)),
        ("Frame, 35/42x40 cm", (350, 420, 400)),
        ("Shelf, 51/64 cm", (510, 640)),
        ("Pipe, 1/2 inch", (12.7,)),
        ("Paper 8-1/2 x 11 inches", (215.9, 279.4)),
        ("Tile, 4x8 1/4 inch", (101.6, 209.55)),
        ("Bowl, 12\u00bd cm", (125,)),
    ],
)
def test_a_size_may_have_fractions_and_several_values_of_a_side(text: str, sides_mm: tuple[float, ...]) -> None:
    assert parsing.parse(text).sizes_mm == pytest.approx(sides_mm)


def test_a_slash_between_a_number_of_pieces_and_their_size_is_no_fraction() -> None:
    assert parsing.parse("Item Name: Beans, 24/8 oz").value == 8
    assert parsing.parse("Item Name: Cheese, 6/5 lb").value == 5
    assert parsing.parse("Item Name: Vitamin B12 1/2 oz").value == 0.5


def test_the_parser_handles_html_line_breaks_and_non_ascii_letters() -> None:
    item = parsing.parse(
        "Item Name: Cr\u00e8me &amp; Caf\u00e9 \u2013 <b>Organic</b>\nBullet Point 1: Gluten-free,\nreally\n"
        "Bullet Point 2:\nProduct Description: <p>First.</p>\nSecond: line\n"
        "Brand: Caf\u00e9 Uno\nValue: 2\nUnit: Count\n"
    )
    assert item.title == "Cr\u00e8me & Caf\u00e9 \u2013 Organic"
    assert item.bullets == ("Gluten-free, really",)
    assert item.description == "First. Second: line"
    assert item.brand == ("caf\u00e9 uno",) and item.maker == "Caf\u00e9 Uno"
    assert item.flags == ("organic", "gluten_free")
    assert parsing.build_document(item).startswith(
        "Cr\u00e8me & Caf\u00e9 \u2013 Organic ; 2 count ; Caf\u00e9 Uno ; Gluten-free"
    )
    assert parsing.parse("Product Description: Table, 130x70/105 cm and 4 chairs").sizes_mm == (1300, 700, 1050)
    assert parsing.parse("Product Description: Table, 130x70/105 cm and 4 chairs").pieces == 4


def test_a_further_text_begins_in_the_description_and_no_description_is_lost() -> None:
    item = parsing.parse("Olive Oil\nCategory: Pantry", "one\nCategory: Food", "Product Description: two", "three")
    assert (item.title, item.category) == ("Olive Oil", "Food")
    assert item.description == "one two three"
    assert parsing.parse("Item Name: x\nUnit: Oz", "Value: 3", "y").unit == "oz"
    assert "Pantry" in parsing.build_document(parsing.parse("Olive Oil\nCategory: Pantry"))


@given(st.text(max_size=200), st.text(max_size=50))
def test_the_parser_accepts_any_text(text: str, further: str) -> None:
    item = parsing.parse(text, further)
    assert item.pack >= 1 and (item.amount is None or item.amount >= 0)
    parsing.compute_group_key(item, by="title")


def test_variants_of_size_and_pack_form_one_group_apart_from_other_products() -> None:
    variants = ("Olive Oil, 17 Fl Oz (Pack of 2)", "olive oil 34 fl oz", "Olive Oil - 500 ml", "Olive  Oil, 6 Pack")
    keys = {parsing.compute_group_key(parsing.parse(f"Item Name: {title}"), by="title") for title in variants}
    assert keys == {"olive oil"}
    assert parsing.compute_group_key(parsing.parse("Item Name: Olives, 17 oz"), by="title") not in keys
