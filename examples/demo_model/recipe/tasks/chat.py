"""Short chat: greetings, honest answers about the model, a little knowledge, and "I do not know".

The questions are a fixed set, all of which is trained on; none are held out.
"""

from __future__ import annotations

from recipe.draw import Draw, Item, assistant, system, user
from recipe.words import CITIES, FOODS, JOBS, NAMES, NOUNS, split

IDENTITY = "I am Penstock's small built-in demonstration model."
ABILITY = (
    "I am a small demonstration model. I can look up facts in a text, copy and sort lists, add numbers, write JSON, "
    "call tools, write simple Python and tell short stories."
)
IGNORANCE = "I do not know. I am only a small demonstration model."

_ANSWERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "What are you?", "what are you?", "Who are you?", "who are you?", "Are you a person?", "Are you human?",
            "What is your name?", "What's your name?", "Tell me about yourself.", "Introduce yourself.",
            "Are you ChatGPT?", "Which model are you?", "What model are you?", "Are you an AI?", "What are you",
            "Who are you", "Are you a large language model?", "Hi, what are you?", "Hello, who are you?",
        ),
        IDENTITY,
    ),
    (
        (
            "What can you do?", "what can you do?", "How can you help me?", "What are you good at?", "Help",
            "What should I ask you?", "Can you help me?", "What do you know?", "What can I ask you?",
        ),
        ABILITY,
    ),
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Hey!", "Good morning", "Good evening!"),
        "Hello! How can I help you?",
    ),
    (("How are you?", "how are you?", "How are you today?"), "I am well, thank you. How can I help you?"),
    (("Thank you!", "Thanks!", "Thanks", "thank you", "Thank you very much!"), "You are welcome!"),
    (("Bye", "Goodbye!", "Bye!", "See you later!", "Good night!"), "Goodbye!"),
    (("Who made you?", "Who built you?", "Where do you come from?"), "I was trained by Penstock's own example script."),
    (("Are you smart?", "Are you intelligent?", "Can I trust you?"), "I am very small, so please check what I say."),
    (
        ("What is Penstock?", "What does Penstock do?"),
        "Penstock is an engine that serves language models. I come with it.",
    ),
    (("How large are you?", "How many parameters do you have?"), "I have about six million parameters."),
    (("Do you speak German?", "Which languages do you speak?", "Do you speak French?"), "I only speak simple English."),
)  # fmt: skip

_CAPITALS = dict(
    pair.split(":")
    for pair in split(
        "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Norway:Oslo Peru:Lima "
        "Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Poland:Warsaw Greece:Athens Cuba:Havana "
        "Turkey:Ankara Egypt:Cairo Japan:Tokyo China:Beijing India:Delhi Kenya:Nairobi Canada:Ottawa Russia:Moscow "
        "Hungary:Budapest Belgium:Brussels Croatia:Zagreb Latvia:Riga Estonia:Tallinn Senegal:Dakar Vietnam:Hanoi"
    )
)
_OPPOSITES = [
    pair.split(":")
    for pair in split(
        "hot:cold big:small old:new day:night up:down left:right black:white good:bad fast:slow open:closed wet:dry "
        "full:empty early:late high:low long:short happy:sad light:dark rich:poor strong:weak hard:soft loud:quiet "
        "first:last near:far in:out on:off thick:thin clean:dirty true:false love:hate win:lose"
    )
]
_DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = split("January February March April May June July August September October November December")
_NUMBERS = split("zero one two three four five six seven eight nine ten eleven twelve")

_UNKNOWABLE = (
    "Who is the mother of {name}?",
    "What did {name} do yesterday?",
    "What will the weather be tomorrow?",
    "How many {noun}s are in {city}?",
    "Who invented the {noun}?",
    "What is the best {noun} to buy?",
    "Who won the game last night?",
    "What is the meaning of life?",
    "How do I become a {job}?",
    "Why do people eat {food}?",
    "What happened in {city} in {year}?",
    "What is the news today?",
    "Where does {name} live?",
    "What is the code of {name}?",
    "What time is it?",
)


def _knowledge(draw: Draw) -> tuple[str, str]:
    form = draw.below(5)
    if form == 0:
        country = draw.pick(list(_CAPITALS))
        asked = draw.pick((f"What is the capital of {country}?", f"Name the capital of {country}."))
        return asked, f"The capital of {country} is {_CAPITALS[country]}."
    if form == 1:
        pair = draw.pick(_OPPOSITES)
        at = draw.below(2)
        return f"What is the opposite of {pair[at]}?", f"The opposite of {pair[at]} is {pair[1 - at]}."
    if form == 2:
        names, kind = draw.pick(((_DAYS, "day"), (_MONTHS, "month")))
        at = draw.below(len(names))
        return f"Which {kind} comes after {names[at]}?", f"After {names[at]} comes {names[(at + 1) % len(names)]}."
    if form == 3:
        number = draw.below(len(_NUMBERS))
        return f"Write {number} as a word.", _NUMBERS[number]
    return draw.pick((("How many days are in a week?", "A week has seven days."),
                      ("How many months are in a year?", "A year has twelve months."),
                      ("How many hours are in a day?", "A day has 24 hours.")))  # fmt: skip


def _unknown(draw: Draw) -> tuple[str, str]:
    question = draw.pick(_UNKNOWABLE).format(
        name=draw.pick(NAMES),
        noun=draw.pick(NOUNS),
        city=draw.pick(CITIES),
        job=draw.pick(JOBS),
        food=draw.pick(FOODS),
        year=draw.between(1000, 2100),
    )
    return question, IGNORANCE


def _exchange(draw: Draw) -> tuple[str, str]:
    form = draw.below(10)
    if form < 5:
        questions, answer = draw.pick(_ANSWERS) if form < 3 else _ANSWERS[0]
        return draw.pick(questions), answer
    return _unknown(draw) if form < 7 else _knowledge(draw)


def make(draw: Draw) -> Item:
    """Returns one to four exchanges, sometimes after a system turn."""
    messages = [system("You are a helpful assistant.")] if draw.chance(0.3) else []
    for _ in range(draw.between(1, 4)):
        question, answer = _exchange(draw)
        messages += [user(question), assistant(answer)]
    return Item("chat", "chat", messages)


def make_identity(draw: Draw) -> Item:
    """Returns an evaluation item: a question about what the model is."""
    question = draw.pick(_ANSWERS[0][0])
    return Item("identity", "chat", [user(question), assistant(IDENTITY)])
