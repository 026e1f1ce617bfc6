"""The benchmark's prompts: five kinds of everyday work, none of them used in training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    kind: str
    text: str


_TEXTS = {
    "chat": (
        "What should I pack for a weekend hike in the mountains?",
        "Explain to a ten-year-old why the sky is blue.",
        "My friend is nervous about a job interview. What could I say to help?",
        "What is the difference between weather and climate?",
        "How do vaccines protect people?",
        "Give me three reasons to learn a musical instrument as an adult.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number.",
        "Write a Python function that checks whether a string is a palindrome, with two examples.",
        "Show how to read a CSV file in Python and print each row.",
        "Write a JavaScript function that removes duplicates from an array.",
        "Write an SQL query that lists the ten customers with the most orders.",
        "Write a Python class for a stack with push, pop and peek.",
    ),
    "arithmetic": (
        "A shop sells pens at 3 dollars each. How much do 12 pens cost? Show the steps.",
        "What is 15 percent of 240? Explain step by step.",
        "A train travels 60 miles per hour for 3 hours. How far does it go?",
        "Add 125, 250 and 375 and explain each step.",
        "If I have 48 apples and share them among 6 people, how many does each get? Show the calculation.",
        "Solve for x: 2x + 6 = 20. Show every step.",
    ),
    "rewriting": (
        "Rewrite this sentence in a formal tone: Hey, can you send me the file when you get a chance?",
        "Correct the grammar and repeat the text: She go to school every days and like to reads books.",
        "Summarize in one sentence: The library opens at nine, closes at five, and offers free internet access, "
        "study rooms and a reading club for children on Saturdays.",
        "Turn this into bullet points: We need to buy milk, call the plumber, book the train and answer Anna's letter.",
        "Repeat this paragraph twice: The river is calm in the morning. Boats leave the harbour before sunrise.",
        "Rewrite in the past tense: The dog runs across the field and jumps over the fence.",
    ),
    "lists": (
        "List ten European countries and their capitals.",
        "List the planets of the solar system in order from the sun.",
        "Give me a list of eight healthy breakfast ideas.",
        "List the days of the week and one activity for each.",
        "Name twelve animals that live in the ocean.",
        "List the steps for making a cup of tea.",
    ),
}

PROMPTS = tuple(Prompt(kind, text) for kind, texts in _TEXTS.items() for text in texts)
