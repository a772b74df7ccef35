"""The checks of the 25 kinds of instruction of IFEval (Zhou et al. 2023, table 1), one function for each kind.

They follow the paper and the behavior of its published program, oddities included (a keyword counts inside a longer
word, a line of dashes is a bullet, the line after a lone asterisk is part of it), so that results are comparable;
tests compare them with an independent port of it.
Three differ on purpose: sentences and words in capitals are counted without NLTK's downloaded models, and
`letter_frequency` counts the given character even if it is not a letter, instead of a random one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence

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

    A sentence ends at `.`, `!` or `?`, closing quotes and brackets included, if space follows. A full stop does not
    end one after a known abbreviation or a single capital letter, nor before a lower-case word. The benchmark's
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


Check = Callable[..., bool]

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
LESS, AT_LEAST = "less than", "at least"
_FENCES = ("```json", "```Json", "```JSON", "```")
_BULLETS = (re.compile(r"^\s*\*[^\*].*$", re.MULTILINE), re.compile(r"^\s*-.*$", re.MULTILINE))  # as published
_PARAGRAPHS, _RESPONSES = "***", "******"


def _compare(count: int, relation: str, bound: int) -> bool:
    if relation not in (LESS, AT_LEAST):
        raise ValueError(f"the relation is {relation!r}; it can be {LESS!r} or {AT_LEAST!r}")
    return count < bound if relation == LESS else count >= bound


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """Check that every keyword is in the text, also within a word."""
    lowered = text.lower()
    return all(keyword.lower() in lowered for keyword in keywords)


def has_keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Check the number of occurrences of a keyword, within words too, against a bound."""
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def avoids_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Check that none of the words occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def has_letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Check the number of occurrences of a letter, in either case, against a bound."""
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def is_in_language(text: str, *, language: str) -> bool:
    """Check that the text is in the given language; a text whose language cannot be detected passes."""
    return detect_language(text) in (language, None)


def has_sentence_count(text: str, *, num_sentences: int, relation: str) -> bool:
    """Check the number of sentences against a bound."""
    return _compare(count_sentences(text), relation, num_sentences)


def has_paragraph_count(text: str, *, num_paragraphs: int) -> bool:
    """Check the number of paragraphs between dividers of three asterisks; only the first and last may be empty."""
    parts = [part.strip() for part in text.split(_PARAGRAPHS)]
    if not all(parts[1:-1]):
        return False
    return sum(map(bool, parts)) == num_paragraphs


def has_word_count(text: str, *, num_words: int, relation: str) -> bool:
    """Check the number of words against a bound."""
    return _compare(len(words(text)), relation, num_words)


def has_nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the number of paragraphs between blank lines, and the first word of one of them."""
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or nth_paragraph > count:
        return False
    tokens = paragraphs[nth_paragraph - 1].split()
    if not tokens:
        return False
    word = re.split(r"[.,?!'\"]", tokens[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return word.lower() == first_word.lower()


def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Check that there are at least `num_placeholders` placeholders in square brackets."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """Check that the marker of a postscript is somewhere in the text."""
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def has_bullets(text: str, *, num_bullets: int) -> bool:
    """Check that exactly `num_bullets` lines begin with an asterisk or a dash; a lone asterisk takes the next line."""
    return sum(len(expression.findall(text)) for expression in _BULLETS) == num_bullets


def is_constrained_response(text: str) -> bool:
    """Check that one of the three allowed answers is in the text."""
    return any(response in text for response in CONSTRAINED_RESPONSES)


def has_highlights(text: str, *, num_highlights: int) -> bool:
    """Check that there are at least `num_highlights` parts between asterisks, single or double."""
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check that there are at least `num_sections` section headings: the given word, followed by a number.

    The argument `section_spliter` is spelt as in the data.
    """
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections


def is_json(text: str) -> bool:
    """Check that the whole text is JSON, with or without a code fence around it."""
    stripped = text.strip()
    for fence in _FENCES:
        stripped = stripped.removeprefix(fence)
    try:
        json.loads(stripped.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """Check that there is a title in double angle brackets."""
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def is_two_responses(text: str) -> bool:
    """Check that there are two different answers with six asterisks between them."""
    parts = [part.strip() for part in text.split(_RESPONSES)]
    if not all(parts[1:-1]):
        return False
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Check that the text begins with the request."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_end(text: str, *, end_phrase: str) -> bool:
    """Check that the text ends with the phrase; a quotation mark may follow it."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def has_capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Check the number of words in capitals against a bound."""
    return _compare(count_capital_words(text), capital_relation, capital_frequency)


def is_english_capitals(text: str) -> bool:
    """Check that the text is English without a lower-case letter."""
    return text.isupper() and detect_language(text) in ("en", None)


def is_english_lowercase(text: str) -> bool:
    """Check that the text is English without a capital letter."""
    return text.islower() and detect_language(text) in ("en", None)


def has_no_comma(text: str) -> bool:
    """Check that there is no comma."""
    return "," not in text


def is_quoted(text: str) -> bool:
    """Check that the text is enclosed in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_frequency,
    "keywords:forbidden_words": avoids_words,
    "keywords:letter_frequency": has_letter_frequency,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_sentence_count,
    "length_constraints:number_paragraphs": has_paragraph_count,
    "length_constraints:number_words": has_word_count,
    "length_constraints:nth_paragraph_first_word": has_nth_paragraph_first_word,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_constrained_response,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": is_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": has_end,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_word_frequency,
    "change_case:english_capital": is_english_capitals,
    "change_case:english_lowercase": is_english_lowercase,
    "punctuation:no_comma": has_no_comma,
}
