"""Generate prompts with checkable constraints: a task of our own, and one to three constraints with random parameters.

Kinds come in the proportions of IFEval. The wording is our own, several for each kind;
tests/constraints/test_generate.py checks that no run of eight words of IFEval's prompts occurs in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.constraints.checks import AT_LEAST, CONSTRAINED_RESPONSES, LESS

TASKS = (
    "Write a short poem about {topic}.",
    "Write two lines of a song about {topic}.",
    "Describe {topic} in a few sentences.",
    "Explain {topic} to a small child.",
    "Give one good tip about {topic}.",
    "Name some things that people like about {topic}.",
    "Write a brief note to a neighbor about {topic}.",
    "Write a cheerful text message about {topic}.",
    "Tell a tiny story in which {topic} matters.",
    "What should a beginner know about {topic}?",
    "Why do some people care about {topic}?",
    "Write a slogan for a club devoted to {topic}.",
    "Write a short advertisement that mentions {topic}.",
    "Give your view of {topic} in brief.",
    "Write a riddle whose answer is {topic}.",
    "Invent a fun fact about {topic}.",
    "Write a short diary entry about {topic}.",
    "Write a greeting card that mentions {topic}.",
    "Summarize what you know about {topic}.",
    "How would you describe {topic} to a visitor from another planet?",
    "Ask a curious question about {topic} and answer it.",
    "Write a brief review of {topic}.",
    "Write a joke about {topic}.",
    "Compare {topic} with something else of your choice.",
    "Write a short email to a colleague about {topic}.",
    "Write a caption for a photo of {topic}.",
    "Make a short plan for a day around {topic}.",
    "What is the best thing about {topic}?",
    "Write a short speech in praise of {topic}.",
    "Give a small piece of history about {topic}.",
    "Write a limerick about {topic}.",
    "Suggest a present for somebody who loves {topic}.",
)

TOPICS = (
    "apple orchards", "autumn leaves", "old bicycles", "bees", "birthday cakes", "board games", "bread baking",
    "bridges", "butterflies", "camping", "candles", "castles", "cats", "chess", "clouds", "coffee", "comets",
    "coral reefs", "crossword puzzles", "dancing", "deserts", "dogs", "dolphins", "dragons", "drums", "elephants",
    "farm markets", "fireworks", "fishing", "folk music", "fountains", "foxes", "frogs", "gardening", "glaciers",
    "goldfish", "grandparents", "guitars", "handwriting", "harbors", "hats", "hedgehogs", "hiking boots", "honey",
    "horses", "hot soup", "ice skating", "islands", "jigsaw puzzles", "juggling", "kites", "knitting", "lanterns",
    "libraries", "lighthouses", "magnets", "maple syrup", "maps", "marathons", "meadows", "mirrors", "morning fog",
    "mountains", "mushrooms", "night trains", "oak trees", "opera", "origami", "owls", "paintings", "pancakes",
    "paper boats", "parrots", "penguins", "pianos", "picnics", "pirates", "planets", "pottery", "pumpkins",
    "puppets", "quilts", "rain", "rainbows", "recycling", "rivers", "robots", "rocking chairs", "roller skates",
    "sailing", "sandcastles", "school buses", "seashells", "shadows", "sheepdogs", "silver spoons", "sleep",
    "snowmen", "soap bubbles", "spiders", "squirrels", "stamps", "strawberries", "street art", "sundials",
    "sunflowers", "sunsets", "swimming", "tea", "telescopes", "tents", "thunder", "tomatoes", "toy trains",
    "treehouses", "turtles", "umbrellas", "violins", "volcanoes", "walking to work", "waterfalls", "whales",
    "wind turbines", "windmills", "winter mornings", "wool socks", "yoga", "zebras",
)  # fmt: skip

WORDS = (
    "always", "amber", "ancient", "basket", "better", "blue", "bright", "calm", "choice", "circle", "clever",
    "color", "corner", "culture", "dream", "early", "earth", "energy", "evening", "family", "favorite", "field",
    "fresh", "friend", "future", "garden", "gentle", "gift", "golden", "green", "habit", "happy", "health", "heart",
    "hidden", "home", "honest", "idea", "journey", "kind", "laugh", "learn", "light", "little", "lovely", "magic",
    "market", "memory", "moment", "morning", "music", "nature", "never", "ocean", "open", "path", "patient",
    "people", "pocket", "quiet", "reason", "river", "secret", "share", "simple", "small", "smile", "snow", "special",
    "spring", "stone", "story", "strong", "summer", "sweet", "table", "thing", "time", "together", "travel",
    "treasure", "village", "voice", "warm", "water", "window", "wonder", "world", "yellow", "young",
)  # fmt: skip

COMMON_WORDS = (
    "and", "are", "because", "but", "can", "for", "good", "is", "it", "like", "make", "many", "more", "very", "with",
    "you",
)  # fmt: skip

ENDINGS = (
    "That is all for now.", "Thank you for reading.", "And so it goes.", "What do you think?", "See you soon!",
    "Now it is your turn.", "The rest is up to you.", "Stay curious.", "That was my answer.", "Have a wonderful day!",
    "I hope this helps.", "Would you like to hear more?", "Take good care.", "End of message.", "Nothing more to add.",
    "Enjoy every minute of it.",
)  # fmt: skip

QUESTIONS = (
    "Is it wise to plan a trip around {topic}?", "Would most people enjoy {topic}?", "Are {topic} worth the money?",
    "Can one learn to love {topic}?", "Should every town have a festival for {topic}?", "Do you find {topic} relaxing?",
    "Will {topic} still matter in a hundred years?", "Could {topic} be the theme of a museum?",
)  # fmt: skip


COUNTS = (305, 179, 57)  # IFEval's prompts with one, two and three constraints

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Wording:
    """A constraint in words, with the arguments of its check, and how the whole request is spelled.

    A request that is itself in capitals, or has none, is one that a small model sometimes answers alike: it shows what
    is wanted. Without such requests a model that never meets a constraint has nothing to learn from.
    """

    text: str
    arguments: Arguments
    spell: Callable[[str], str] = str


Maker = Callable[[random.Random], Wording]


def generate_instructions(count: int, *, seed: int, start: int = 0) -> Iterator[dict[str, Any]]:
    """Generate `count` rows with `prompt`, `instruction_id_list`, `kwargs` and `key`.

    Row i depends on the seed and i alone.

    Args:
        seed: the seed of all random draws; another seed gives other rows.
        start: the number of the first row.
    """
    for number in range(start, start + count):
        yield {"key": number, **_row(random.Random(f"{seed}/{number}"))}


def _row(rng: random.Random) -> dict[str, Any]:
    how_many = rng.choices((1, 2, 3), COUNTS)[0]
    kinds = _draw_kinds(rng, how_many)
    topic = rng.choice(TOPICS)
    tasks = QUESTIONS if kinds[0] == ANSWER else TASKS
    request = rng.choice(tasks).format(topic=topic)
    wordings = {kind: KINDS[kind].make(rng) for kind in kinds if kind != REPEAT}
    request = " ".join([request, *(wording.text for wording in wordings.values())])
    for wording in wordings.values():
        request = wording.spell(request)
    arguments = {kind: wording.arguments for kind, wording in wordings.items()}
    prompt = request
    if REPEAT in kinds:
        arguments[REPEAT] = {"prompt_to_repeat": request}
        prompt = f"{request}\n{rng.choice(REPEAT_WORDINGS)}"
    return {"prompt": prompt, "instruction_id_list": kinds, "kwargs": [arguments[kind] for kind in kinds]}


def _draw_kinds(rng: random.Random, how_many: int) -> list[str]:
    """Draw kinds that can be met together, by their share in IFEval; fewer if no kind goes with those drawn."""
    kinds: list[str] = []
    while len(kinds) < how_many:
        possible = [kind for kind in KINDS if _fits(kind, kinds)]
        if not possible:
            break
        kinds.append(rng.choices(possible, [KINDS[kind].weight for kind in possible])[0])
    return kinds


def _fits(kind: str, chosen: Sequence[str]) -> bool:
    return not any(_clash(kind, other) for other in chosen)


def _clash(kind: str, other: str) -> bool:
    """Check whether two kinds exclude each other in one prompt."""
    a, b = KINDS[kind], KINDS[other]
    if kind == other or a.alone or b.alone:
        return True
    return (a.group is not None and a.group == b.group) or other in a.excludes or kind in b.excludes


def _pick(rng: random.Random, *texts: str) -> str:
    return rng.choice(texts)


def _one_of(*texts: str) -> Maker:
    """Make the maker of a constraint without arguments, worded in one of these ways."""
    return lambda rng: Wording(rng.choice(texts), {})


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_no_comma = _one_of(
    "Do not use commas.",
    "Write it without a single comma.",
    "Commas are forbidden here.",
    "Leave out every comma.",
    "There must be no comma in your answer.",
)


def _word_count(rng: random.Random) -> Wording:
    if rng.random() < 0.35:  # IFEval asks for fewer words in 18 prompts of 52
        bound = rng.choice((20, 25, 30, 40, 50, 60))
        text = _pick(
            rng,
            f"Stay below {bound} words.",
            f"Use fewer than {bound} words.",
            f"Keep it under {bound} words.",
        )
        return Wording(text, {"relation": LESS, "num_words": bound})
    bound = rng.choice((30, 40, 50, 60, 70))
    text = _pick(
        rng,
        f"Write no fewer than {bound} words.",
        f"Your answer needs {bound} words or more.",
        f"Use at least {bound} words.",
    )
    return Wording(text, {"relation": AT_LEAST, "num_words": bound})


def _sentence_count(rng: random.Random) -> Wording:
    if rng.random() < 0.55:
        bound = rng.choice((2, 3, 3, 4, 4, 5, 6))
        text = _pick(
            rng,
            f"Use fewer than {_plural(bound, 'sentence')}.",
            f"Answer in less than {_plural(bound, 'sentence')}.",
            f"At most {_plural(bound - 1, 'sentence')} may be used.",
        )
        return Wording(text, {"relation": LESS, "num_sentences": bound})
    bound = rng.choice((3, 4, 5, 6))
    text = _pick(
        rng,
        f"Use at least {bound} sentences.",
        f"Your answer needs {bound} sentences or more.",
        f"Write no fewer than {bound} sentences.",
    )
    return Wording(text, {"relation": AT_LEAST, "num_sentences": bound})


def _forbidden(rng: random.Random) -> Wording:
    banned = rng.sample(WORDS, rng.choice((1, 1, 2))) + rng.sample(COMMON_WORDS, rng.choice((0, 1, 1)))
    listed = ", ".join(f'"{word}"' for word in banned)
    text = _pick(
        rng,
        f"Avoid these words: {listed}.",
        f"The following must not occur: {listed}.",
        f"Do not say {listed}.",
    )
    return Wording(text, {"forbidden_words": banned})


def _highlights(rng: random.Random) -> Wording:
    count = rng.choice((1, 2, 2, 3, 3))
    parts = _plural(count, "part")
    text = _pick(
        rng,
        f"Put asterisks around at least {parts} of the text, *like this*.",
        f"Emphasize {parts} or more with markdown, as in *important words*.",
        f"Mark {parts} or more with asterisks, for instance *this phrase*.",
    )
    return Wording(text, {"num_highlights": count})


def _keyword_frequency(rng: random.Random) -> Wording:
    word = rng.choice(WORDS)
    if rng.random() < 0.25:
        count = rng.choice((2, 3))
        text = f'Use the word "{word}" fewer than {count} times.'
        return Wording(text, {"relation": LESS, "keyword": word, "frequency": count})
    count = rng.choice((1, 2, 2, 2, 3))
    text = _pick(
        rng,
        f'Say "{word}" at least {_times(count)}.',
        f'The word "{word}" must occur {_times(count)} or more.',
        f'Use the word "{word}" {_times(count)} or more often.',
    )
    return Wording(text, {"relation": AT_LEAST, "keyword": word, "frequency": count})


def _keywords(rng: random.Random) -> Wording:
    wanted = rng.sample(WORDS, rng.choice((1, 2, 2, 3)))
    listed = ", ".join(f'"{word}"' for word in wanted)
    text = _pick(rng, f"Work in {listed}.", f"Make use of {listed}.", f"These words must occur: {listed}.")
    return Wording(text, {"keywords": wanted})


def _letter(rng: random.Random) -> Wording:
    if rng.random() < 0.35:
        letter, count = rng.choice("bjkqvwxyz"), rng.choice((1, 2, 3))
        text = f'The letter "{letter}" may occur fewer than {_plural(count, "time")}.'
        return Wording(text, {"letter": letter, "let_frequency": count, "let_relation": LESS})
    letter, count = rng.choice("abcdfghiklmnoprstuwy"), rng.choice((2, 3, 5, 6, 8, 10))
    text = _pick(
        rng,
        f'Use the letter "{letter}" no fewer than {count} times.',
        f'There have to be {count} or more of the letter "{letter}".',
    )
    return Wording(text, {"letter": letter, "let_frequency": count, "let_relation": AT_LEAST})


_quotation = _one_of(
    'Put the whole answer between double quotation marks, "like so".',
    "Begin and end the answer with a double quotation mark.",
    "Enclose all you write in double quotes.",
    "Wrap the entire answer in double quotation marks.",
    'Word it as one quotation: "..."',
)


def _lowercase(rng: random.Random) -> Wording:
    text = _pick(
        rng,
        "Use lowercase letters only.",
        "All lowercase letters please, and in English.",
        "Do not use any capital letters.",
        "Your entire answer should be in lowercase English letters, like these.",
    )
    return Wording(text, {}, spell=_pick_spelling(rng, str.lower))


def _capitals(rng: random.Random) -> Wording:
    text = _pick(
        rng,
        "All caps please.",
        "USE CAPITAL LETTERS ONLY.",
        "Your entire answer should be in capital letters, like these.",
        "Write in English and in capitals, with no lowercase letters.",
    )
    return Wording(text, {}, spell=_pick_spelling(rng, str.upper))


def _pick_spelling(rng: random.Random, spelling: Callable[[str], str]) -> Callable[[str], str]:
    """Draw how a request is spelled: in two of three as its answer has to be, else as usual."""
    return spelling if rng.random() < 2 / 3 else str


def _language(rng: random.Random) -> Wording:
    name = rng.choice(tuple(LANGUAGES))
    text = _pick(rng, f"Answer in {name}.", f"Write it in {name} only.", f"Use the {name} language for all of it.")
    return Wording(text, {"language": LANGUAGES[name]})


_title = _one_of(
    "Give it a title inside double angle brackets, like <<My Title>>.",
    "Begin with a title written as <<title>>.",
    "Add a headline that looks like <<this>>.",
    "It needs a title, put between << and >>.",
)


def _bullets(rng: random.Random) -> Wording:
    count = rng.choice((2, 3, 3, 4, 5))
    text = _pick(
        rng,
        f"Answer with exactly {count} bullets, each on a line that starts with an asterisk:\n* first\n* second",
        f"Make it a list of exactly {count} points, every line beginning with *.",
        f"Use precisely {count} markdown bullets, such as:\n* One thing\n* Another thing",
    )
    return Wording(text, {"num_bullets": count})


def _placeholders(rng: random.Random) -> Wording:
    count = rng.choice((1, 2, 2, 3, 3, 4))
    holes = _plural(count, "placeholder")
    text = _pick(
        rng,
        f"Leave {holes} or more in square brackets, such as [date].",
        f"Use no fewer than {holes} like [name] or [place].",
        f"Put at least {holes} in it, for example [city].",
    )
    return Wording(text, {"num_placeholders": count})


def _paragraphs(rng: random.Random) -> Wording:
    count = rng.choice((2, 2, 3, 3, 4))
    text = _pick(
        rng,
        f"Write {count} paragraphs with a line of *** between one and the next.",
        f"Split the answer into exactly {count} paragraphs, using *** as the divider.",
        f"Use {count} paragraphs, divided by three asterisks: ***",
    )
    return Wording(text, {"num_paragraphs": count})


def _first_word(rng: random.Random) -> Wording:
    count = rng.choice((2, 2, 3))
    place = rng.randint(1, count)
    word = rng.choice(WORDS)
    ordinal = ("first", "second", "third")[place - 1]
    text = f'Write {count} paragraphs with blank lines between them; the {ordinal} starts with the word "{word}".'
    return Wording(text, {"num_paragraphs": count, "nth_paragraph": place, "first_word": word})


def _ending(rng: random.Random) -> Wording:
    phrase = rng.choice(ENDINGS)
    text = _pick(
        rng,
        f'Close with exactly these words: "{phrase}"',
        f'Your last sentence has to be "{phrase}"',
        f'End with "{phrase}" and write nothing after it.',
    )
    return Wording(text, {"end_phrase": phrase})


def _postscript(rng: random.Random) -> Wording:
    marker = rng.choice(("P.S.", "P.P.S"))
    text = _pick(
        rng,
        f"Add a postscript that begins with {marker}",
        f"After the end, append a remark that starts with {marker}",
        f"Finish with a postscript marked {marker}",
    )
    return Wording(text, {"postscript_marker": marker})


def _capital_words(rng: random.Random) -> Wording:
    if rng.random() < 0.25:
        count = rng.choice((3, 4, 5))
        text = f"Write fewer than {count} words in all caps."
        return Wording(text, {"capital_frequency": count, "capital_relation": LESS})
    count = rng.choice((1, 2, 3, 4, 5))
    words = _plural(count, "word")
    text = _pick(rng, f"Put at least {words} in all caps.", f"SHOUT {words} or more in ALL CAPS.")
    return Wording(text, {"capital_frequency": count, "capital_relation": AT_LEAST})


_two_responses = _one_of(
    "Give two versions that differ, with a line of ****** between them.",
    "Write 2 different answers and put six asterisks ****** between the two.",
    "Answer twice, in different ways, divided by ******",
)


_json = _one_of(
    "Answer with valid JSON and nothing else.",
    "Output one JSON object only.",
    'Reply in JSON, for example {"answer": "..."}.',
)


def _sections(rng: random.Random) -> Wording:
    word = rng.choice(("SECTION", "Section", "Part", "Chapter"))
    count = rng.choice((2, 2, 3))
    text = _pick(
        rng,
        f"Divide it into {count} sections headed {word} 1, {word} 2 and so on.",
        f"Give it {count} headings: {word} 1 to {word} {count}.",
    )
    return Wording(text, {"section_spliter": word, "num_sections": count})


def _answer(rng: random.Random) -> Wording:
    listed = " or ".join(f'"{response}"' for response in reversed(CONSTRAINED_RESPONSES))
    text = _pick(rng, f"Reply with one of: {listed}", f"Choose your reply from these: {listed}")
    return Wording(text, {})


def _repeat(_: random.Random) -> Wording:
    raise AssertionError("its wording is around the whole request")


REPEAT_WORDINGS = (
    "Before you answer, copy the request above exactly as it stands.",
    "Start your reply with an exact copy of the text above, then answer it.",
    "Your reply must open with the request above, unchanged; the answer follows.",
    "Say the request above again, letter by letter, and only then answer.",
)
LANGUAGES = {
    "Spanish": "es",
    "French": "fr",
    "German": "de",
    "Italian": "it",
    "Portuguese": "pt",
    "Russian": "ru",
    "Hindi": "hi",
}
REPEAT, ANSWER, LANGUAGE, SECTIONS = (
    "combination:repeat_prompt",
    "detectable_format:constrained_response",
    "language:response_language",
    "detectable_format:multiple_sections",
)


@dataclass(frozen=True)
class Kind:
    """How a kind is drawn and worded: its number in IFEval, its maker, the kinds that it excludes.

    Two kinds of one group are never together; a kind that is `alone` is the only one of its prompt.
    """

    weight: int
    make: Maker
    group: str | None = None
    excludes: frozenset[str] = frozenset()
    alone: bool = False


KINDS: dict[str, Kind] = {
    "punctuation:no_comma": Kind(66, _no_comma),
    "length_constraints:number_words": Kind(52, _word_count, "length"),
    "length_constraints:number_sentences": Kind(52, _sentence_count, "length"),
    "keywords:forbidden_words": Kind(49, _forbidden, "words"),
    "detectable_format:number_highlighted_sections": Kind(48, _highlights, "shape"),
    "keywords:frequency": Kind(42, _keyword_frequency, "words"),
    REPEAT: Kind(41, _repeat, excludes=frozenset({"startend:quotation"})),
    "startend:quotation": Kind(41, _quotation),
    "change_case:english_lowercase": Kind(39, _lowercase, "case", frozenset({LANGUAGE, SECTIONS})),
    "keywords:existence": Kind(39, _keywords, "words"),
    "detectable_format:title": Kind(37, _title),
    "keywords:letter_frequency": Kind(33, _letter),
    "detectable_format:number_bullet_lists": Kind(31, _bullets, "shape"),
    "detectable_content:number_placeholders": Kind(27, _placeholders),
    "length_constraints:number_paragraphs": Kind(27, _paragraphs, "shape"),
    "startend:end_checker": Kind(26, _ending, "end"),
    "detectable_content:postscript": Kind(26, _postscript, "end"),
    "change_case:english_capital": Kind(25, _capitals, "case", frozenset({LANGUAGE, SECTIONS})),
    LANGUAGE: Kind(31, _language),
    "change_case:capital_word_frequency": Kind(25, _capital_words, "case"),
    "combination:two_responses": Kind(24, _two_responses, "shape"),
    "detectable_format:json_format": Kind(17, _json, alone=True),
    SECTIONS: Kind(14, _sections, "shape"),
    "length_constraints:nth_paragraph_first_word": Kind(12, _first_word, "shape", frozenset({REPEAT})),
    ANSWER: Kind(10, _answer, alone=True),
}
