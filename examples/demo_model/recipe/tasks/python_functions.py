"""Small Python functions that are requested in words.

A family is a request, a body and the names in it; the names of functions, arguments and fields are drawn, so that the
code depends on the request. Every answer is valid Python: the tests compile it, and run the ones that are closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipe.draw import Draw, Item, assistant, user
from recipe.words import NOUNS, split


@dataclass(frozen=True)
class Family:
    """A request with the code that satisfies it; `{n}`, `{x}` and `{k}` stand for a name, an argument and a number."""

    request: str
    name: str
    arguments: str
    doc: str
    body: tuple[str, ...]


def _family(request: str, name: str, arguments: str, *body: str) -> Family:
    doc = request[0].upper() + request[1:]
    return Family(request, name, arguments, doc, body)


FAMILIES = (
    _family("returns the sum of a list of numbers", "sum_list", "{x}s",
            "total = 0", "for {x} in {x}s:", "    total += {x}", "return total"),
    _family("returns the largest item of a list", "largest", "{x}s",
            "best = {x}s[0]", "for {x} in {x}s[1:]:", "    if {x} > best:", "        best = {x}", "return best"),
    _family("returns the smallest item of a list", "smallest", "{x}s",
            "best = {x}s[0]", "for {x} in {x}s[1:]:", "    if {x} < best:", "        best = {x}", "return best"),
    _family("returns the average of a list of numbers", "average", "{x}s",
            "if not {x}s:", "    return 0.0", "return sum({x}s) / len({x}s)"),
    _family("adds {k} to a number", "add_{k}", "{x}", "return {x} + {k}"),
    _family("multiplies a number by {k}", "times_{k}", "{x}", "return {x} * {k}"),
    _family("adds two numbers", "add", "a, b", "return a + b"),
    _family("subtracts b from a", "subtract", "a, b", "return a - b"),
    _family("multiplies two numbers", "multiply", "a, b", "return a * b"),
    _family("returns the square of a number", "square", "{x}", "return {x} * {x}"),
    _family("tells whether a number is even", "is_even", "{x}", "return {x} % 2 == 0"),
    _family("tells whether a number is odd", "is_odd", "{x}", "return {x} % 2 == 1"),
    _family("tells whether a number is divisible by {k}", "is_divisible_by_{k}", "{x}", "return {x} % {k} == 0"),
    _family("tells whether a number is prime", "is_prime", "number",
            "if number < 2:", "    return False", "for divisor in range(2, int(number ** 0.5) + 1):",
            "    if number % divisor == 0:", "        return False", "return True"),
    _family("returns the factorial of a number", "factorial", "number",
            "result = 1", "for i in range(2, number + 1):", "    result *= i", "return result"),
    _family("returns the n-th Fibonacci number", "fibonacci", "n",
            "a, b = 0, 1", "for _ in range(n):", "    a, b = b, a + b", "return a"),
    _family("returns the greatest common divisor of two numbers", "gcd", "a, b",
            "while b:", "    a, b = b, a % b", "return a"),
    _family("reverses a string", "reverse", "text", "return text[::-1]"),
    _family("tells whether a string is a palindrome", "is_palindrome", "text",
            "text = text.lower()", "return text == text[::-1]"),
    _family("counts the vowels of a string", "count_vowels", "text",
            "count = 0", "for letter in text.lower():",
            '    if letter in "aeiou":', "        count += 1", "return count"),
    _family("counts the words of a text", "count_words", "text", "return len(text.split())"),
    _family("counts how often each {x} occurs in a list", "count_{x}s", "{x}s",
            "counts = {{}}", "for {x} in {x}s:", "    counts[{x}] = counts.get({x}, 0) + 1", "return counts"),
    _family("removes duplicates from a list of {x}s", "unique_{x}s", "{x}s",
            "seen = set()", "result = []", "for {x} in {x}s:", "    if {x} not in seen:", "        seen.add({x})",
            "        result.append({x})", "return result"),
    _family("keeps the numbers greater than {k}", "keep_large", "numbers",
            "return [number for number in numbers if number > {k}]"),
    _family("keeps the numbers smaller than {k}", "keep_small", "numbers",
            "return [number for number in numbers if number < {k}]"),
    _family("doubles every number in a list", "double_all", "numbers", "return [2 * number for number in numbers]"),
    _family("squares every number in a list", "square_all", "numbers",
            "return [number ** 2 for number in numbers]"),
    _family("keeps the even numbers of a list", "keep_even", "numbers",
            "return [number for number in numbers if number % 2 == 0]"),
    _family("sorts a list of {x}s by length", "sort_by_length", "{x}s", "return sorted({x}s, key=len)"),
    _family("flattens a list of lists", "flatten", "lists",
            "return [item for items in lists for item in items]"),
    _family("joins a list of {x}s with commas", "join_{x}s", "{x}s", 'return ", ".join({x}s)'),
    _family("returns the first {k} {x}s of a list", "first_{x}s", "{x}s", "return {x}s[:{k}]"),
    _family("returns the last {k} {x}s of a list", "last_{x}s", "{x}s", "return {x}s[-{k}:]"),
    _family("makes a dictionary from a list of keys and a list of values", "make_dict", "keys, values",
            "return dict(zip(keys, values))"),
    _family("swaps the keys and values of a dictionary", "invert", "mapping",
            "return {{value: key for key, value in mapping.items()}}"),
    _family("reads the lines of a file", "read_lines", "path",
            "with open(path) as file:", "    return [line.rstrip() for line in file]"),
    _family("writes a text to a file", "write_text", "path, text",
            'with open(path, "w") as file:', "    file.write(text)"),
    _family("converts Celsius to Fahrenheit", "to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    _family("limits a number to the range from low to high", "clamp", "{x}, low, high",
            "return max(low, min(high, {x}))"),
    _family("returns the position of a {x} in a list, or -1", "find_{x}", "{x}s, wanted",
            "for index, {x} in enumerate({x}s):", "    if {x} == wanted:", "        return index", "return -1"),
    _family("finds a number in a sorted list by binary search", "binary_search", "numbers, wanted",
            "low, high = 0, len(numbers) - 1", "while low <= high:", "    middle = (low + high) // 2",
            "    if numbers[middle] == wanted:", "        return middle", "    if numbers[middle] < wanted:",
            "        low = middle + 1", "    else:", "        high = middle - 1", "return -1"),
    _family("returns the sum of the digits of a number", "digit_sum", "number",
            "return sum(int(digit) for digit in str(number))"),
    _family("prints the numbers from 1 to {k}", "print_numbers", "",
            "for number in range(1, {k} + 1):", "    print(number)"),
    _family("prints hello to a name", "greet", "name", 'print(f"Hello, {{name}}!")'),
)  # fmt: skip

_ARGUMENT_NAMES = ("number", "item", "value", "element", "word", "name", *(n for n in NOUNS if n[-1] not in "sy"))
_VERBS = split("get make find compute do run build check test use")
_FIELDS = ("name", "age", "size", "color", "price", "count", "x", "y", "owner", "city")
_KINDS = {"age": "int", "count": "int", "x": "float", "y": "float", "size": "float", "price": "float"}


def _names(draw: Draw, family: Family) -> dict[str, Any]:
    """Returns the values of the family's placeholders; an argument that the request does not name has a usual name."""
    drawn = "{x}" in family.request
    usual = "number" if "number" in family.request else "item"
    return {"x": draw.pick(_ARGUMENT_NAMES) if drawn else usual, "k": draw.between(2, 20)}


def function_source(draw: Draw, family: Family) -> tuple[str, str]:
    """Returns a request for a function that has exactly one answer, and the function's source."""
    names = _names(draw, family)
    name, arguments = family.name.format(**names), family.arguments.format(**names)
    asked = family.request.format(**names)
    called = ""
    if draw.chance(0.4):
        name = f"{draw.pick(_VERBS)}_{draw.pick(NOUNS)}"
        called = f" {name}"
    lines = [f"def {name}({arguments}):"]
    request = draw.pick((f"Write a Python function{called} that {asked}", f"Write a function{called} that {asked}"))
    if draw.chance(0.3):
        request += ", with a docstring"
        lines.append(f'    """{family.doc.format(**names)}."""')
    lines += ["    " + line.format(**names) for line in family.body]
    return request + ".", "\n".join(lines)


def class_source(draw: Draw) -> tuple[str, str]:
    """Returns a request for a class or a dataclass with drawn fields, and its source."""
    name = draw.pick(NOUNS).capitalize()
    fields = draw.some(_FIELDS, draw.between(1, 4))
    listed = " and ".join([", ".join(fields[:-1]), fields[-1]] if len(fields) > 1 else fields)
    if draw.chance(0.4):
        lines = ["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:"]
        lines += [f"    {f}: {_KINDS.get(f, 'str')}" for f in fields]
        return f"Write a dataclass {name} with {listed}.", "\n".join(lines)
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{f} = {f}" for f in fields]
    request = f"Write a Python class {name} with {listed}"
    if draw.chance(0.5):
        request += ", and a repr"
        lines += ["", "    def __repr__(self):", f'        return f"{name}({{self.{fields[0]}}})"']
    return request + ".", "\n".join(lines)


def make(draw: Draw) -> Item:
    """Returns a request for a function or a class, answered with a fenced block of code."""

    def once() -> tuple[str, str]:
        return class_source(draw) if draw.chance(0.15) else function_source(draw, draw.pick(FAMILIES))

    request, source = draw.owned(once, lambda pair: f"python {pair[0]}")
    answer = f"```python\n{source}\n```"
    return Item("python", f"python {request}", [user(request), assistant(answer)], value=source)
