"""Tasks, topics and words of the generated prompts."""

from __future__ import annotations

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
