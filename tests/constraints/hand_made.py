"""Answers made by hand: some meet a kind of instruction, and some only nearly."""

from __future__ import annotations

from typing import Any

ENGLISH = "the river was quiet this morning and we walked along it for an hour before breakfast"

CASES: list[tuple[str, dict[str, Any], str, str]] = [  # kind, arguments, an answer that meets it, one that does not
    ("keywords:existence", {"keywords": ["Cat", "mat"]}, "A cat on a MAT.", "A cat on a rug."),
    ("keywords:existence", {"keywords": ["cat"]}, "Concatenate.", "Dogs."),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "at least"}, "No, no.", "No."),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "less than"}, "No.", "Nothing, no."),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "Rocking chairs.", "They ROCK!"),
    ("keywords:forbidden_words", {"forbidden_words": ["d.c"]}, "A duct.", "In D.C today."),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 2, "let_relation": "at least"}, "Banal", "Bent at"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "#a #b", "#a"),
    ("language:response_language", {"language": "de"}, "Der Fluss war heute Morgen sehr ruhig.", ENGLISH),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "One. Two.",
        "So. What? That!",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Stop! Go.", "Just one"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", "a\n***\n***\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "it's three"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b c", "a-b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "River"},
        "One.\n\nRiver, deep.",
        "River.\n\nOne.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"},
        '"So!" she said.',
        "So.\n\nIt went.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", "[a] and (b)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. call me", "Bye. PS call me"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. more", "P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "So:\n* a\n - b", "* a\n**b**\nc - d"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1\na\nPart 2\nb",
        "part 1\na\npart 2\nb",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<Rivers>>\nThey flow.", "<< >> <Rivers>"),
    ("combination:two_responses", {}, "yes\n******\nno", "yes ****** yes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, "say hi.\nHi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "See you!"}, 'Bye. "See you!"', "See you! Bye."),
    ("startend:quotation", {}, ' "All of it." ', '"Some" of it'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "I SAY", "I say"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "A cat", "A B"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("change_case:english_lowercase", {}, ENGLISH, "der fluss war heute morgen sehr ruhig und wir gingen lange"),
    ("punctuation:no_comma", {}, "One; two.", "One, two."),
]
