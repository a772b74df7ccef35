"""The words of the lab by their role in a clause: the grammar writes with them, the gold reward parses with them."""

from __future__ import annotations

from types import MappingProxyType

TOPICS = MappingProxyType(
    {
        "hotel": ("room", "bed", "lobby", "pool", "bathroom", "reception", "balcony", "garden"),
        "restaurant": ("soup", "dessert", "menu", "waiter", "wine", "bread", "salad", "chef"),
        "film": ("plot", "acting", "ending", "soundtrack", "director", "script", "scenery", "cast"),
        "book": ("chapter", "style", "hero", "author", "prose", "dialogue", "cover", "mystery"),
        "phone": ("screen", "battery", "camera", "charger", "keyboard", "speaker", "signal", "price"),
        "concert": ("band", "singer", "stage", "sound", "crowd", "drummer", "piano", "encore"),
        "museum": ("gallery", "guide", "statue", "painting", "exhibit", "shop", "entrance", "map"),
        "flight": ("seat", "pilot", "cabin", "crew", "takeoff", "landing", "boarding", "luggage"),
    }
)
"""Each topic with its aspects; no noun belongs to two topics."""

GENERAL = MappingProxyType(
    {
        1: (
            "good",
            "great",
            "lovely",
            "excellent",
            "charming",
            "superb",
            "perfect",
        ),
        -1: (
            "bad",
            "awful",
            "poor",
            "terrible",
            "disappointing",
            "horrible",
            "ugly",
        ),
    }
)
"""Adjectives that suit every topic, by polarity."""

HEADLINES = MappingProxyType({1: ("good", "great"), -1: ("bad", "poor")})
"""Adjectives of a review's first sentence, by polarity: few, so that the sentence is a clear signal."""

SPECIAL = MappingProxyType(
    {
        "hotel": {1: ("clean", "quiet"), -1: ("dirty", "noisy")},
        "restaurant": {1: ("tasty", "fresh"), -1: ("bland", "stale")},
        "film": {1: ("gripping", "clever"), -1: ("dull", "confusing")},
        "book": {1: ("witty", "vivid"), -1: ("tedious", "clumsy")},
        "phone": {1: ("fast", "sturdy"), -1: ("slow", "fragile")},
        "concert": {1: ("lively", "powerful"), -1: ("sloppy", "shrill")},
        "museum": {1: ("bright", "fascinating"), -1: ("gloomy", "crowded")},
        "flight": {1: ("smooth", "punctual"), -1: ("bumpy", "late")},
    }
)
"""Adjectives that belong to one topic, by polarity."""

OPINIONS = MappingProxyType(
    {
        1: {"loved": "love", "liked": "like", "enjoyed": "enjoy"},
        -1: {"hated": "hate", "disliked": "dislike", "regretted": "regret"},
    }
)
"""Verbs of people judging a thing, past tense -> base form, by polarity."""

EFFECTS = MappingProxyType(
    {
        1: {"impressed": "impress", "pleased": "please", "delighted": "delight"},
        -1: {"annoyed": "annoy", "bored": "bore", "disappointed": "disappoint"},
    }
)
"""Verbs of a thing affecting people, past tense -> base form, by polarity."""

VERDICTS = MappingProxyType({1: ("recommend", "praise"), -1: ("avoid", "skip")})
"""Verbs of a recommendation for or against a noun, by polarity."""

INTENSIFIERS = MappingProxyType(
    {
        "very": 1.0,
        "truly": 1.0,
        "really": 1.0,
        "extremely": 1.0,
        "quite": 0.6,
        "rather": 0.6,
        "somewhat": 0.6,
        "fairly": 0.6,
    }
)
"""Each intensifier -> the strength of a judgment with it before the adjective."""

PLAIN_STRENGTH = 0.8
"""Strength of a judgment without an intensifier, or under a negator."""

NEGATORS = ("not", "never", "hardly")
PEOPLE = ("i", "we", "everyone")
TARGETS = ("me", "us", "everyone")
OPENERS = ("overall", "honestly", "in the end", "this time")
MOODS = MappingProxyType({1: ("luckily", "happily"), -1: ("sadly", "alas")})
JOINS = MappingProxyType({"same": ("and",), "contrast": ("but", "while", "although")})
TAILS = ("at night", "in the morning", "that day", "all week", "from the start")
FILLERS = (
    "we went there in {season}",
    "my {friend} came along",
    "it was our first visit",
    "a {friend} told us about it",
)
SEASONS = ("spring", "summer", "autumn", "winter")
FRIENDS = ("sister", "brother", "neighbor", "colleague")

CITIES = ("Rome", "Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Vienna", "Dublin", "Lisbon", "Boston", "Sydney")
NAMES = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jonas", "Karim", "Laura")

ASPECT_TOPIC = MappingProxyType({noun: topic for topic, nouns in TOPICS.items() for noun in (topic, *nouns)})
"""Every noun a review may judge -> the topic it belongs to."""

ADJECTIVES = MappingProxyType(
    {
        adjective: polarity
        for table in (GENERAL, *SPECIAL.values())
        for polarity, adjectives in table.items()
        for adjective in adjectives
    }
)
"""Every adjective -> its polarity."""

VERBS = MappingProxyType(
    {
        form: (base, polarity)
        for table in (OPINIONS, EFFECTS)
        for polarity, verbs in table.items()
        for past, base in verbs.items()
        for form in (past, base)
    }
    | {verb: (verb, polarity) for polarity, verbs in VERDICTS.items() for verb in verbs}
)
"""Every form of a judging verb -> its base form and polarity."""
