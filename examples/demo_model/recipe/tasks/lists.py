"""Lists and texts to copy, reverse, sort, rewrite and count."""

from __future__ import annotations

from collections.abc import Callable

from recipe.draw import Draw, Item, assistant, user
from recipe.tasks.stories import draw_cast, story
from recipe.words import CITIES, COLORS, NAMES, NOUNS, digits, label, made_up_word


def draw_items(draw: Draw, count: int) -> list[str]:
    """Returns a list of one kind of thing, or of all kinds mixed."""
    sources: tuple[Callable[[], str], ...] = (
        lambda: draw.pick(NOUNS),
        lambda: draw.pick(NAMES),
        lambda: draw.pick(CITIES),
        lambda: draw.pick(COLORS),
        lambda: digits(draw, draw.between(1, 4)),
        lambda: made_up_word(draw),
        lambda: label(draw),
    )
    if draw.chance(0.35):
        return [draw.pick(sources)() for _ in range(count)]
    source = draw.pick(sources)
    return [source() for _ in range(count)]


def owned_items(draw: Draw, few: int, many: int) -> list[str]:
    """Returns a list of `few` to `many` things that belongs to the draw's split."""
    return draw.owned(lambda: draw_items(draw, draw.between(few, many)), lambda xs: "list " + ", ".join(xs))


def _item(task: str, question: str, answer: str, items: list[str]) -> Item:
    return Item(task, "list " + ", ".join(items), [user(question), assistant(answer)])


def copy(draw: Draw) -> Item:
    """Asks for an exact copy of a list."""
    items = owned_items(draw, 3, 30)
    text = ", ".join(items)
    asked = draw.pick(("Repeat this list", "Copy this list", "Write this list again", "Repeat"))
    return _item("copy", f"{asked}: {text}", text, items)


def copy_text(draw: Draw) -> Item:
    """Asks for an exact copy of a story or of lines of labels."""
    if draw.chance(0.6):
        text = " ".join(draw.owned(lambda: story(draw, draw_cast(draw)), lambda s: "text " + " ".join(s)))
    else:
        made = draw.owned(lambda: draw_items(draw, 4 * draw.between(2, 12)), lambda xs: "text " + " ".join(xs))
        text = "\n".join(" ".join(made[i : i + 4]) for i in range(0, len(made), 4))
    asked = draw.pick(("Repeat this text exactly.", "Copy this text.", "Write this again, word for word."))
    return Item("copy_text", "text " + " ".join(text.split()), [user(f"{asked}\n{text}"), assistant(text)])


def reverse(draw: Draw) -> Item:
    """Asks for a list in reverse order."""
    items = owned_items(draw, 3, 14)
    question = draw.pick(("Reverse this list", "Write this list backwards")) + ": " + ", ".join(items)
    return _item("reverse", question, ", ".join(reversed(items)), items)


def sort(draw: Draw) -> Item:
    """Asks for numbers sorted by size or words sorted alphabetically."""
    count = draw.between(3, 9)
    if draw.chance(0.6):
        largest = draw.pick((99, 99, 999))
        items = draw.owned(
            lambda: [str(draw.between(1, largest)) for _ in range(count)], lambda xs: "list " + ", ".join(xs)
        )
        ordered = sorted(items, key=int)
        question = draw.pick(("Sort these numbers", "Sort by size", "Order these numbers")) + ": " + ", ".join(items)
    else:
        source = draw.pick((NAMES, CITIES, COLORS))
        items = draw.owned(lambda: draw.some(source, count), lambda xs: "list " + ", ".join(xs))
        ordered = sorted(items)
        question = draw.pick(("Sort by alphabet", "Sort these words")) + ": " + ", ".join(items)
    return _item("sort", question, ", ".join(ordered), items)


def shape(draw: Draw) -> Item:
    """Asks for a list in another layout: commas, lines, bullets or numbers."""
    items = owned_items(draw, 3, 14)
    forms: tuple[tuple[str, str], ...] = (
        ("lines", "\n".join(items)),
        ("bullets", "\n".join(f"- {x}" for x in items)),
        ("a numbered list", "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))),
        ("commas", ", ".join(items)),
    )
    source, target = draw.some(forms, 2)
    question = draw.pick((f"Write this as {target[0]}", f"Rewrite this list with {target[0]}")) + f":\n{source[1]}"
    return _item("shape", question, target[1], items)


def pick_out(draw: Draw) -> Item:
    """Asks for one item by its position, or for the number of items."""
    items = owned_items(draw, 3, 10)
    names = ("first", "second", "third", "fourth", "fifth")
    at = draw.below(min(len(items), len(names)))
    asked, answer = draw.pick(
        (
            (f"What is the {names[at]} item of this list?", items[at]),
            ("What is the last item of this list?", items[-1]),
            ("How many items are in this list?", str(len(items))),
        )
    )
    return _item("pick_out", f"{asked} {', '.join(items)}", answer, items)


def change(draw: Draw) -> Item:
    """Asks for a list with an item removed, added or replaced, or in capital letters."""
    items = owned_items(draw, 3, 12)
    target, new = draw.pick(items), draw.pick(NOUNS)
    text = ", ".join(items)
    form = draw.below(4)
    if form == 0:
        return _item(
            "change", f"Remove {target} from this list: {text}", ", ".join(x for x in items if x != target), items
        )
    if form == 1:
        return _item("change", f"Add {new} to the end of this list: {text}", ", ".join([*items, new]), items)
    if form == 2:
        replaced = ", ".join(new if x == target else x for x in items)
        return _item("change", f"Replace {target} with {new} in this list: {text}", replaced, items)
    return _item("change", f"Write this list in capital letters: {text}", text.upper(), items)


FORMS = (copy, copy, copy, copy_text, reverse, sort, sort, shape, pick_out, change)


def make(draw: Draw) -> Item:
    """Returns an item of any of the list tasks."""
    return draw.pick(FORMS)(draw)
