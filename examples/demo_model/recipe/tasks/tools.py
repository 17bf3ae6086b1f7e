"""Tool calls: schemas in the system turn, calls as <tool_call> JSON, results, and answers that use them.

Some tools are familiar ones with natural requests; others have invented names and parameters, so that a call must be
derived from the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipe.draw import Draw, Item, Message, assistant, system, user
from recipe.words import CITIES, COLORS, NAMES, NOUNS, OBJECTS, PLACES, made_up_word, split

Schema = dict[str, Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A user's request, the call for it, the tool's result, and the answer made from the result."""

    question: str
    arguments: Arguments
    result: str
    answer: str


@dataclass(frozen=True)
class Tool:
    """A tool's schema and how to draw a request for it."""

    schema: Schema
    request: Callable[[Draw], Request]

    @property
    def name(self) -> str:
        """Returns the function's name."""
        return self.schema["function"]["name"]


def schema_of(name: str, description: str, **parameters: str) -> Schema:
    """Returns an OpenAI function schema; each keyword is a parameter with its JSON type, all of them required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


def _weather(d: Draw) -> Request:
    city, degrees, sky = d.pick(CITIES), d.between(1, 39), d.pick(("sunny", "rainy", "cloudy", "windy", "foggy"))
    question = d.pick(
        (
            f"What is the weather in {city}?",
            f"How is the weather in {city} today?",
            f"What's the weather like in {city}?",
            f"Tell me the weather in {city}.",
        )
    )
    result = json.dumps({"temperature": degrees, "sky": sky})
    return Request(question, {"city": city}, result, f"It is {sky} in {city}, with {degrees} degrees.")


def _time(d: Draw) -> Request:
    city, time = d.pick(CITIES), f"{d.between(0, 23):02d}:{d.between(0, 59):02d}"
    question = d.pick((f"What time is it in {city}?", f"Tell me the time in {city}."))
    return Request(question, {"city": city}, json.dumps({"time": time}), f"It is {time} in {city}.")


def _add(d: Draw) -> Request:
    a, b = d.between(1, 9999), d.between(1, 9999)
    question = d.pick((f"What is {a} + {b}?", f"Add {a} and {b}."))
    return Request(question, {"a": a, "b": b}, str(a + b), f"{a} + {b} = {a + b}.")


def _message(d: Draw) -> Request:
    name, thing = d.pick(NAMES), d.pick(OBJECTS)
    text = d.pick((f"I found the {thing}.", f"Please bring the {thing}.", f"I will be at the {d.pick(PLACES)}."))
    question = d.pick((f"Send {name} this message: {text}", f"Write to {name}: {text}"))
    return Request(question, {"to": name, "text": text}, '{"sent": true}', f"I have sent the message to {name}.")


def _timer(d: Draw) -> Request:
    minutes = d.between(2, 90)
    question = d.pick((f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes."))
    answer = f"The timer is set for {minutes} minutes."
    return Request(question, {"minutes": minutes}, '{"ok": true}', answer)


def _search(d: Draw) -> Request:
    thing, place = f"{d.pick(COLORS)} {d.pick(OBJECTS)}", d.pick(PLACES)
    question = d.pick((f"Where is the {thing}?", f"Find the {thing}.", f"Search for the {thing}."))
    return Request(question, {"query": thing}, json.dumps({"place": place}), f"The {thing} is in the {place}.")


def _price(d: Draw) -> Request:
    thing, price = d.pick(OBJECTS), d.between(1, 300)
    question = d.pick((f"How much does the {thing} cost?", f"What is the price of the {thing}?"))
    return Request(question, {"item": thing}, json.dumps({"price": price}), f"The {thing} costs {price} coins.")


def _order(d: Draw) -> Request:
    thing, count = d.pick(OBJECTS), d.between(2, 40)
    question = d.pick((f"Order {count} of the {thing}.", f"Buy {count} times the {thing}."))
    arguments = {"item": thing, "count": count}
    return Request(question, arguments, '{"ok": true}', f"I have ordered {count} of the {thing}.")


def _light(d: Draw) -> Request:
    room, on = d.pick(PLACES), d.chance(0.5)
    state = "on" if on else "off"
    question = d.pick((f"Turn the light in the {room} {state}.", f"Switch {state} the light in the {room}."))
    return Request(question, {"room": room, "on": on}, '{"ok": true}', f"The light in the {room} is {state}.")


FAMILIAR = (
    Tool(schema_of("get_weather", "Get the weather in a city.", city="string"), _weather),
    Tool(schema_of("get_time", "Get the time in a city.", city="string"), _time),
    Tool(schema_of("add", "Add two numbers.", a="integer", b="integer"), _add),
    Tool(schema_of("send_message", "Send a message to a person.", to="string", text="string"), _message),
    Tool(schema_of("set_timer", "Set a timer.", minutes="integer"), _timer),
    Tool(schema_of("search", "Search for something.", query="string"), _search),
    Tool(schema_of("get_price", "Get the price of an item.", item="string"), _price),
    Tool(schema_of("order", "Order an item.", item="string", count="integer"), _order),
    Tool(schema_of("set_light", "Turn a light on or off.", room="string", on="boolean"), _light),
)

_VERBS = split("open close start stop move read check paint count lock show delete create update book call")
_VALUES: dict[str, Callable[[Draw], Any]] = {
    "string": lambda d: d.pick((d.pick(NAMES), d.pick(NOUNS), made_up_word(d))),
    "integer": lambda d: d.between(0, 999),
    "boolean": lambda d: d.chance(0.5),
}


def unfamiliar_tool(draw: Draw) -> Tool:
    """Returns a tool with a drawn name and one to three drawn parameters, requested by their names."""
    name = f"{draw.pick(_VERBS)}_{draw.pick(NOUNS)}"
    names = draw.some((*OBJECTS, *COLORS, "size", "level", "place", "mode", "target", "speed"), draw.between(1, 3))
    kinds = {key: draw.pick(("string", "string", "integer", "integer", "boolean")) for key in names}

    def request(d: Draw) -> Request:
        arguments = {key: _VALUES[kind](d) for key, kind in kinds.items()}
        told = [f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments.items()]
        listed = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
        question = d.pick((f"Call {name} with {listed}.", f"Use {name} with {listed}.", f"Run {name}: {listed}."))
        return Request(question, arguments, '{"ok": true}', "It is done.")

    return Tool(schema_of(name, name.replace("_", " ").capitalize() + ".", **kinds), request)


def call(name: str, arguments: Arguments) -> Message:
    """Returns the assistant's message that calls one tool."""
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


@dataclass(frozen=True)
class Setting:
    """The tools of a conversation, the requested one, and the request."""

    tools: list[Tool]
    tool: Tool
    request: Request

    @property
    def key(self) -> str:
        """Returns the text that identifies this setting: the tools offered and the call."""
        return f"tool {[t.name for t in self.tools]} {self.tool.name} {json.dumps(self.request.arguments)}"

    @property
    def value(self) -> dict[str, Any]:
        """Returns the call as a parser should return it."""
        return {"name": self.tool.name, "arguments": self.request.arguments}


def _setting(draw: Draw, familiar_share: float) -> Setting:
    """Returns one to four tools and a request for one of them."""

    def once() -> Setting:
        named: dict[str, Tool] = {}
        for _ in range(draw.between(1, 4)):
            tool = draw.pick(FAMILIAR) if draw.chance(familiar_share) else unfamiliar_tool(draw)
            named.setdefault(tool.name, tool)
        tools = list(named.values())
        tool = draw.pick(tools)
        return Setting(tools, tool, tool.request(draw))

    return draw.owned(once, lambda setting: setting.key)


def make_call(draw: Draw) -> Item:
    """Returns an evaluation item: one request, one call."""
    setting = _setting(draw, 0.5)
    messages = [user(setting.request.question), call(setting.tool.name, setting.request.arguments)]
    return Item("tool_call", setting.key, messages, [t.schema for t in setting.tools], value=setting.value)


def make(draw: Draw) -> Item:
    """Returns a call, usually with its result and an answer that uses the result."""
    setting = _setting(draw, 0.6)
    request = setting.request
    messages: list[Message] = []
    if draw.chance(0.2):
        messages.append(system("You are a helpful assistant."))
    if draw.chance(0.12):
        greeting = draw.pick(("Hello!", "Hi!", "Good morning!"))
        messages += [user(greeting), assistant("Hello! How can I help you?")]
    messages += [user(request.question), call(setting.tool.name, request.arguments)]
    if draw.chance(0.75):
        messages.append({"role": "tool", "content": request.result})
        messages.append(assistant(request.answer))
    return Item("tools", setting.key, messages, [t.schema for t in setting.tools], value=setting.value)
