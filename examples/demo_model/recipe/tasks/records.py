"""Records as text, JSON and tables, and requests about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from recipe.draw import Draw, Item, assistant, user
from recipe.words import CITIES, COLORS, FOODS, JOBS, NAMES, OBJECTS, digits, label, made_up_word

Record = dict[str, Any]

FIELDS: dict[str, Callable[[Draw], Any]] = {
    "name": lambda d: d.pick(NAMES),
    "age": lambda d: d.between(5, 99),
    "city": lambda d: d.pick(CITIES),
    "job": lambda d: d.pick(JOBS),
    "color": lambda d: d.pick(COLORS),
    "item": lambda d: d.pick(OBJECTS),
    "count": lambda d: d.between(1, 500),
    "price": lambda d: d.between(1, 999),
    "id": lambda d: label(d),
    "code": lambda d: int(digits(d, 4)),
    "food": lambda d: d.pick(FOODS),
    "user": lambda d: made_up_word(d),
    "active": lambda d: d.chance(0.5),
}


def draw_record(draw: Draw, few: int = 2, many: int = 6) -> Record:
    """Returns a record of `few` to `many` fields in random order."""
    return {name: FIELDS[name](draw) for name in draw.some(list(FIELDS), draw.between(few, many))}


def _owned(draw: Draw, make: Callable[[], Any]) -> Any:
    return draw.owned(make, lambda made: "record " + json.dumps(made))


def plain(value: Any) -> str:
    """Returns a value as it is written in text: JSON's spelling of truth values, no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def as_text(draw: Draw, record: Record) -> str:
    """Returns the record as text, in one of four forms."""
    pairs = [(name, plain(value)) for name, value in record.items()]
    return draw.pick(
        (
            ", ".join(f"{name} {value}" for name, value in pairs),
            ", ".join(f"{name}: {value}" for name, value in pairs),
            "; ".join(f"{name} = {value}" for name, value in pairs),
            "\n".join(f"{name}: {value}" for name, value in pairs),
        )
    )


def _item(task: str, question: str, answer: str, source: Any, value: Any) -> Item:
    return Item(task, "record " + json.dumps(source), [user(question), assistant(answer)], value=value)


def to_json(draw: Draw) -> Item:
    """Asks to convert a record from text to JSON; also an evaluation item."""
    record = _owned(draw, lambda: draw_record(draw))
    asked = draw.pick(("Write this as JSON", "Convert this record to JSON", "Give me JSON for this record"))
    return _item("json", f"{asked}: {as_text(draw, record)}", json.dumps(record), record, record)


def table_to_json(draw: Draw) -> Item:
    """Asks to convert lines of comma-separated values to a JSON list."""
    names = draw.some(list(FIELDS), draw.between(2, 4))
    records = _owned(draw, lambda: [{n: FIELDS[n](draw) for n in names} for _ in range(draw.between(2, 6))])
    lines = [",".join(names)] + [",".join(plain(r[n]) for n in names) for r in records]
    asked = draw.pick(("Write this table as JSON:\n", "Convert this CSV to JSON:\n"))
    return _item("json", asked + "\n".join(lines), json.dumps(records), records, records)


def indented(draw: Draw) -> Item:
    """Asks to convert JSON on one line to JSON with two spaces of indentation, or back."""
    record = _owned(draw, lambda: draw_record(draw, 2, 5))
    line, block = json.dumps(record), json.dumps(record, indent=2)
    if draw.chance(0.5):
        return _item("json", f"Indent this JSON: {line}", block, record, record)
    return _item("json", f"Write this JSON on one line:\n{block}", line, record, record)


def from_json(draw: Draw) -> Item:
    """Asks to convert JSON to lines of text."""
    record = _owned(draw, lambda: draw_record(draw))
    answer = "\n".join(f"{name}: {plain(value)}" for name, value in record.items())
    return _item("from_json", f"Write this JSON as text: {json.dumps(record)}", answer, record, None)


def field_of(draw: Draw) -> Item:
    """Asks for one field of one of several records."""
    records = _owned(
        draw,
        lambda: [
            {"name": name, **{f: FIELDS[f](draw) for f in draw.some([f for f in FIELDS if f != "name"], 2)}}
            for name in draw.some(NAMES, draw.between(1, 5))
        ],
    )
    record = draw.pick(records)
    name = draw.pick([f for f in record if f != "name"])
    question = f"{json.dumps(records)}\nWhat is the {name} of {record['name']}?"
    answer = f"The {name} of {record['name']} is {plain(record[name])}."
    return _item("field", question, answer, records, plain(record[name]))


def update(draw: Draw) -> Item:
    """Asks for JSON with one field set to a new value."""
    record = _owned(draw, lambda: draw_record(draw))
    name = draw.pick(list(record))
    value = FIELDS[name](draw)
    question = f"Set {name} to {plain(value)} in this JSON: {json.dumps(record)}"
    updated = {**record, name: value}
    return _item("json", question, json.dumps(updated), record, updated)


FORMS = (to_json, to_json, to_json, table_to_json, indented, from_json, field_of, update)


def make(draw: Draw) -> Item:
    """Returns an item of any of the record tasks."""
    return draw.pick(FORMS)(draw)


def make_json(draw: Draw) -> Item:
    """Returns an evaluation item: a task whose answer is JSON."""
    return draw.pick((to_json, to_json, table_to_json, update))(draw)
