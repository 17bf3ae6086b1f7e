"""Short stories whose people, objects and places stay the same from the first sentence to the last."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.draw import Draw, Item, assistant, user
from recipe.words import ANIMALS, COLORS, FOODS, LOOKS, MOODS, NAMES, OBJECTS, PLACES, article


@dataclass(frozen=True)
class Cast:
    """The people, objects and places of a story."""

    hero: str
    friend: str
    animal: str
    color: str
    thing: str
    home: str
    place: str
    food: str
    mood: str

    @property
    def object(self) -> str:
        """Returns the object with its color."""
        return f"{self.color} {self.thing}"


def draw_cast(draw: Draw) -> Cast:
    """Returns a cast of two different people in two different places."""
    hero, friend = draw.some(NAMES, 2)
    home, place = draw.some(PLACES, 2)
    return Cast(
        hero=hero,
        friend=friend,
        animal=draw.pick(ANIMALS),
        color=draw.pick(COLORS),
        thing=draw.pick(OBJECTS),
        home=home,
        place=place,
        food=draw.pick(FOODS),
        mood=draw.pick(MOODS),
    )


def _opening(draw: Draw, c: Cast) -> str:
    return draw.pick(
        (
            f"Once upon a time, there was {article(c.mood)} {c.animal} who lived near the {c.home} of {c.hero}.",
            f"{c.hero} and {c.friend} were friends, and they often met at the {c.home}.",
            f"Early in the morning, {c.hero} walked to the {c.home} to see {c.friend}.",
            f"One day, {c.hero} went to the {c.home} with {article(c.animal)}.",
            f"It was {article(draw.pick(LOOKS))} day, and {c.hero} was at the {c.home} with {c.friend}.",
        )
    )


def _ending(draw: Draw, c: Cast) -> str:
    return draw.pick(
        (
            f"{c.hero} and {c.friend} were friends from that day on.",
            f"In the end, {c.hero} was happy and took the {c.thing} home.",
            f"That night, the {c.animal} slept at the {c.home}, and {c.hero} slept well too.",
            f'"Thank you, {c.friend}," said {c.hero}. "You are welcome," said {c.friend}.',
            f"From then on, {c.hero} always kept the {c.object} in the {c.home}.",
        )
    )


def _lost_and_found(draw: Draw, c: Cast) -> list[str]:
    first, second = draw.some([p for p in PLACES if p not in (c.home, c.place)], 2)
    return [
        f"{c.hero} could not find the {c.object}.",
        f'"Where is my {c.thing}?" asked {c.hero}.',
        f"They looked in the {first}, but the {c.thing} was not there.",
        draw.pick(
            (f"They looked in the {second}, but it was empty.", f"They asked the {c.animal}, but it only ran away.")
        ),
        f"Then {c.friend} went to the {c.place} and saw something {c.color}.",
        f'"Look!" said {c.friend}. "Your {c.thing} is in the {c.place}!"',
    ]


def _gift(draw: Draw, c: Cast) -> list[str]:
    return [
        f"It was the birthday of {c.friend}, and {c.hero} wanted to give {c.friend} {article(c.object)}.",
        f"So {c.hero} went to the {c.place} and bought the {c.thing}.",
        draw.pick((f"It cost {draw.between(3, 90)} coins.", f"On the way home, {c.hero} ate some {c.food}.")),
        f'"This {c.thing} is for you," said {c.hero}.',
        f"{c.friend} felt very {draw.pick(('happy', 'proud', 'calm'))}.",
        f'"I have always wanted {article(c.object)}!" said {c.friend}.',
    ]


def _hungry_animal(draw: Draw, c: Cast) -> list[str]:
    return [
        f"The {c.animal} was hungry and looked for {c.food}.",
        f"It looked behind the {draw.pick(OBJECTS)} and under the {draw.pick(OBJECTS)}, but found nothing.",
        f"{c.hero} saw the {c.animal} and felt {c.mood}.",
        f"{c.hero} took the {c.object} and carried some {c.food} from the {c.place} in it.",
        f"The {c.animal} ate all of the {c.food} and was not hungry any more.",
    ]


def _repair(draw: Draw, c: Cast) -> list[str]:
    tool = draw.pick([o for o in OBJECTS if o != c.thing])
    return [
        f"The {c.object} of {c.friend} was broken, and {c.friend} was sad.",
        f'"I can help you," said {c.hero}. "I only need {article(tool)}."',
        f"They found {article(tool)} in the {c.place}.",
        f"{c.hero} worked until the evening, and the {c.animal} watched.",
        f"At last the {c.thing} was as good as new, and {c.friend} was happy.",
    ]


def _trip(draw: Draw, c: Cast) -> list[str]:
    return [
        f"{c.hero} wanted to see the {c.place}, because a friend had told {c.hero} about it.",
        f"{c.hero} packed {article(c.object)} and some {c.food}, and {c.friend} came along.",
        f"On the way they met {article(c.animal)} that was very {c.mood}.",
        draw.pick(
            (f"The {c.animal} followed them to the {c.place}.", f"They gave some of the {c.food} to the {c.animal}.")
        ),
        f"The {c.place} was {draw.pick(LOOKS)} and {draw.pick(LOOKS)}, and {c.hero} liked it there.",
        f'"Do you still have the {c.thing}?" asked {c.friend}. "Yes, the {c.object} is here," said {c.hero}.',
    ]


PLOTS = (_lost_and_found, _gift, _hungry_animal, _repair, _trip)


def story(draw: Draw, cast: Cast) -> list[str]:
    """Returns the sentences of one story."""
    return [_opening(draw, cast), *draw.pick(PLOTS)(draw, cast), _ending(draw, cast)]


def filler(draw: Draw, num_stories: int) -> list[str]:
    """Returns sentences of whole stories, for the space between the facts of a longer text."""
    return [sentence for _ in range(num_stories) for sentence in story(draw, draw_cast(draw))]


def make(draw: Draw) -> Item:
    """Returns a story, alone or as the answer to a request that names its hero, animal or object."""
    cast = draw.owned(lambda: draw_cast(draw), lambda c: f"story {c}")
    text = " ".join(story(draw, cast))
    if draw.chance(0.5):
        return Item("story", f"story {cast}", text=text)
    wish = draw.pick(
        (
            f"Tell me a story about {cast.hero} and {cast.friend}.",
            f"Tell me a story about {cast.hero} and {article(cast.object)}.",
            f"Write a short story about {article(cast.animal)} and {cast.hero}.",
            f"Tell me a story about {cast.hero}.",
            f"Write a story about {article(cast.object)} and the {cast.place}.",
            "Tell me a story.",
        )
    )
    return Item("story", f"story {cast}", [user(wish), assistant(text)])
