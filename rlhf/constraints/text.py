"""Count what the length constraints count (words, sentences, words in capitals), and detect a text's language."""

from __future__ import annotations

import importlib
import importlib.util
import re

from rlhf.errors import ConfigError, install_hint

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"""(?P<mark>[.!?]+)["'”’)\]*]*(?=\s)""")
_ABBREVIATIONS = frozenset(
    """
    a.m adm al approx apt ave blvd capt cf co col corp dept dr e.g ed esp est etc fig gen gov i.e inc jr lt ltd maj
    messrs mr mrs ms mt no p.m pp prof rep rev sen sgt sr st u.k u.s vol vs
    """.split()  # noqa: SIM905
)
_CONTRACTION = re.compile(r"(?i)(n['’]t|['’](?:s|m|d|ll|re|ve))$")
_EDGE = "\"'“”‘’`.,;:!?()[]{}<>*_~…—–-"


def words(text: str) -> list[str]:
    """Split a text into runs of letters, digits and underscores."""
    return _WORD.findall(text)


def count_sentences(text: str) -> int:
    """Count sentences.

    A sentence ends at `.`, `!` or `?`, closing quotes and brackets included, where space follows. A full stop does not
    end one after a known abbreviation or a single capital letter, nor where a lower-case word follows. The benchmark's
    own program uses NLTK's Punkt model, which has to be downloaded; docs/decisions/013 reports how far the two agree.
    """
    stripped = text.strip()
    if not stripped:
        return 0
    ends = [match for match in _SENTENCE_END.finditer(stripped) if _ends_sentence(stripped, match)]
    return len(ends) + 1  # strip() leaves no space after the last mark, so the last sentence is never among the ends


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match["mark"] != ".":
        return True
    before = text[: match.start()].rsplit(maxsplit=1)
    word = before[-1].lstrip("\"'“‘([*") if before else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    if is_initial or word.lower() in _ABBREVIATIONS:
        return False
    following = text[match.end() :].lstrip()
    return not following[:1].islower()


def count_capital_words(text: str) -> int:
    """Count words without a lower-case letter and with at least one capital; a hyphenated word counts once."""
    return sum(part.isupper() for token in text.split() for part in _parts(token))


def _parts(token: str) -> list[str]:
    """Split a token as treebanks do: DON'T into DO and N'T."""
    word = token.strip(_EDGE)
    match = _CONTRACTION.search(word)
    return [word[: match.start()], match[0]] if match and match.start() else [word]


def require_langdetect() -> None:
    """Check that langdetect, the package that detects languages, is installed.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("langdetect") is None:
        raise ConfigError(f"checking the language of a text needs the package langdetect: {install_hint('ifeval')}")


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's language, the same at every call; None if it cannot be detected."""
    require_langdetect()
    factory = importlib.import_module("langdetect.detector_factory")
    factory.DetectorFactory.seed = 0  # langdetect samples: without a seed two calls may differ
    try:
        return str(factory.detect(text))
    except factory.LangDetectException:
        return None
