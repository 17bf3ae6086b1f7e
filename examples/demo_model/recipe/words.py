"""The words of the generated data: few enough for a small model to learn, enough to distinguish items."""

from __future__ import annotations

from recipe.draw import Draw


def split(words: str) -> tuple[str, ...]:
    """Splits a text into its words."""
    return tuple(words.split())


NAMES = split(
    "Ada Adam Alan Alice Alma Amir Amy Anna Anton Ben Bella Boris Bruno Carl Carla Carol Cecil Chen Clara Cora "
    "Dan Dana David Diana Dora Edgar Elena Ella Emil Emma Eric Erik Eva Felix Fiona Flora Frank Frida Gina Goran "
    "Grace Greta Hana Hans Hassan Heidi Hugo Ida Igor Ines Irene Iris Ivan Jack Jana Jane Jonas Jorge Julia Kai "
    "Karim Kate Kim Kira Lara Laura Lena Leo Lily Lisa Lola Lucas Lucy Luis Luna Maria Mark Marta Max Maya Mila "
    "Milo Mina Mira Mona Nadia Nadir Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Paula Pedro Petra Pia "
    "Quentin Rafael Rita Robin Rosa Ruby Ruth Sam Sara Selma Simon Sofia Stella Sven Tara Tessa Theo Tim Tina Toby "
    "Tom Uma Ursula Vera Victor Viola Walter Wanda Wendy Will Xena Yara Yuri Yusuf Zack Zara Zoe"
)

ANIMALS = split(
    "bear bee bird cat cow crow deer dog donkey duck eagle fish fox frog goat goose hamster hedgehog hen horse lion "
    "lizard mole monkey mouse otter owl parrot pig pony rabbit sheep snail spider squirrel swan tiger turtle whale wolf"
)

OBJECTS = split(
    "bag ball basket bell bicycle blanket boat book bottle bowl box brush bucket button cake camera candle cap card "
    "chair clock coat coin comb cup doll drum fan flag flute fork glove guitar hammer hat jacket jar kettle key kite "
    "ladder lamp map mask mirror mug needle pen pencil piano pillow pin plate quilt ribbon ring robot rope ruler "
    "saddle scarf shell shoe spoon stamp stone sword table ticket towel toy train trumpet umbrella vase violin wagon"
)

COLORS = split("black blue brown gold gray green orange pink purple red silver white yellow")

PLACES = split(
    "attic bakery barn beach bridge castle cave cellar church farm field forest garden garage harbor hill island "
    "kitchen lake library market meadow mill mountain museum office park pond river school shop stable station street "
    "theater tower tunnel valley village workshop"
)

CITIES = split(
    "Amman Athens Bergen Berlin Bern Bogota Boston Bristol Cairo Chicago Dakar Delhi Denver Dublin Florence Geneva "
    "Ghent Hamburg Hanoi Helsinki Houston Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmo "
    "Manila Miami Milan Montreal Moscow Munich Nairobi Naples Osaka Oslo Oxford Paris Prague Quito Riga Rome Seattle "
    "Seoul Sofia Sydney Tallinn Tokyo Toronto Tunis Turin Vienna Warsaw Zagreb Zurich"
)

FOODS = split(
    "apples bananas beans bread butter cake carrots cheese cherries chips chocolate corn eggs figs fish grapes honey "
    "jam lemons mango melon milk mushrooms noodles nuts olives onions oranges pancakes pasta peaches pears peas pie "
    "pizza plums potatoes pumpkin rice salad soup spinach tomatoes yogurt"
)

JOBS = split(
    "actor baker barber builder butcher carpenter chemist clerk cook dancer dentist doctor driver engineer farmer "
    "fisher gardener guard hunter judge lawyer mechanic miner nurse painter pilot plumber poet sailor singer soldier "
    "tailor teacher waiter weaver writer"
)

MOODS = split("angry brave calm careful cheerful clever curious gentle happy kind lonely proud quiet sad shy tired")

LOOKS = split("big bright broken clean cold dark dusty heavy little long loud new old round small soft strange warm")

SPORTS = split("chess football golf hockey judo rugby tennis volleyball badminton basketball")

SYLLABLES = split(
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go gu ha he hi ka ke ki ko la le li lo lu ma me mi mo mu na ne ni "
    "no pa pe pi po ra re ri ro ru sa se si so ta te ti to tu va ve vi vo wa we wi za ze zo"
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

NOUNS = tuple(dict.fromkeys([*ANIMALS, *OBJECTS, *PLACES, *FOODS]))


def article(word: str) -> str:
    """Returns the word with its indefinite article."""
    return ("an " if word[0] in "aeiouAEIOU" else "a ") + word


def made_up_word(draw: Draw) -> str:
    """Returns a word of two to four syllables that is in no list: it can be copied but not guessed."""
    return "".join([draw.pick(SYLLABLES) for _ in range(draw.between(2, 4))])


def digits(draw: Draw, count: int) -> str:
    """Returns a number of exactly `count` digits, as text."""
    return str(draw.between(10 ** (count - 1), 10**count - 1))


def label(draw: Draw) -> str:
    """Returns a short label such as KX47."""
    return draw.pick(LETTERS) + draw.pick(LETTERS) + digits(draw, 2)
