"""Prompts found on any machine: everyday questions from templates, and the standard library's own documentation.

Everything follows from the seed (and from the Python version, whose documentation it is). Each prompt has a subject,
the topic or text it is made of, and no subject serves both training and the held-out set.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = 40

TOPICS = """
apples, bread baking, chess, coffee, gardening, the moon, volcanoes, bicycles, sleep, running, painting, the ocean,
rainbows, honey bees, dogs, cats, elephants, penguins, dinosaurs, the human heart, the brain, vaccines, vitamins,
electricity, magnets, gravity, light, sound, black holes, the solar system, Mars, earthquakes, hurricanes, climate
change, recycling, solar energy, wind power, batteries, electric cars, airplanes, trains, bridges, skyscrapers, the
Roman Empire, ancient Egypt, the Renaissance, the Industrial Revolution, World War II, the printing press, the
telephone, computers, the internet, artificial intelligence, databases, operating systems, computer networks,
encryption, passwords, email, video games, photography, music theory, the piano, the guitar, opera, jazz, dancing,
theater, novels, poetry, Shakespeare, fairy tales, myths, philosophy, ethics, democracy, elections, taxes, inflation,
banks, saving money, budgets, the stock market, small businesses, marketing, leadership, teamwork, job interviews,
writing a resume, time management, stress, meditation, yoga, healthy eating, breakfast, soup, pasta, rice, cheese,
chocolate, tea, wine, cooking for friends, camping, hiking, swimming, football, basketball, tennis, the Olympic Games,
learning a language, grammar, mathematics, fractions, prime numbers, geometry, probability, statistics, algebra,
chemistry, atoms, water, acids, metals, plastic, plants, trees, flowers, forests, deserts, rivers, mountains, islands,
Africa, Brazil, China, France, Germany, India, Japan, Mexico, Canada, Australia, London, Paris, New York, museums,
libraries, schools, teachers, homework, friendship, family, birthdays, weddings, holidays, travel, hotels, maps,
clocks, calendars, money, clothes, shoes, houses, furniture, kitchens, fire safety, first aid, doctors, dentists,
eyesight, hearing, allergies, the common cold, exercise, sugar, salt, fish, birds, insects, spiders, snakes, whales,
horses, cows, farms, tractors, soil, the weather, clouds, snow, seasons
"""

QUESTIONS = (
    "What is important to know about {0}?", "Explain {0} to a child.", "Write a short paragraph about {0}.",
    "Give me five facts about {0}.", "Why do people care about {0}?", "Tell me a short story about {0}.",
    "What are the advantages and disadvantages of {0}?", "How did people think about {0} in the past?",
    "List three common mistakes about {0} and how to avoid them.", "Write a poem about {0}.",
    "How would you describe {0} in simple words?", "What are some good questions to ask about {0}?",
    "Write an email to a friend about {0}.", "What are the most common myths about {0}?",
    "Give me some tips about {0}.", "What is the history of {0}?", "Write a dialogue between two people about {0}.",
    "Compare {0} with {1}.", "How are {0} and {1} related?", "What should a beginner learn first about {0}?",
    "Write the introduction of an essay about {0}.", "What is the role of {0} in everyday life?",
    "Summarize what you know about {0} in three sentences.", "What might change about {0} in the future?",
    "Plan a one-hour lesson about {0}.", "Write a product description that has to do with {0}.",
    "Describe {0} step by step.", "Create a list of ten words that have to do with {0} and explain each.",
)  # fmt: skip

DOCUMENT_TASKS = (
    "Explain the following text in simple words:\n\n{}", "Summarise the following:\n\n{}",
    "Summarize the text below in one sentence.\n\n{}", "{}\n\nWhat is the text above about?",
    "{}\n\nList the main points of this text.", "Rewrite the following text so that it is easier to read:\n\n{}",
    "Here is a document:\n\n{}\n\nAnswer in one paragraph: what should a reader remember?",
    "Write three questions about the following text, with answers.\n\n{}",
)  # fmt: skip

CODE_TASKS = (
    "Write a short Python example that uses `{}`.", "What does `{}` do in Python?", "When should I use `{}` in Python?",
    "Write a Python function that uses `{}` and explain it line by line.",
)  # fmt: skip

MODULES = """
argparse ast base64 bisect calendar cmd codecs collections configparser contextlib copy csv dataclasses datetime
decimal difflib email.message enum fileinput fnmatch fractions functools glob gzip hashlib heapq html http.client
http.cookies imaplib inspect io ipaddress itertools json linecache locale logging mailbox math mimetypes numbers
operator os os.path pathlib pickle pprint queue random re sched selectors shelve shlex shutil signal smtplib socket
sqlite3 statistics string struct subprocess tarfile tempfile textwrap threading time timeit tokenize traceback types
typing unittest unittest.mock urllib.parse urllib.request uuid warnings weakref xml.dom.minidom xml.etree.ElementTree
zipfile
"""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the target is asked. `chat` puts it into the chat template; otherwise the target continues the text."""

    subject: str
    text: str
    chat: bool = True
    other: str = ""  # a second subject

    def concerns(self, subjects: set[str]) -> bool:
        return self.subject in subjects or self.other in subjects


def builtin_prompts(count: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """`count` prompts to train on and 40 held out, in an order that follows from the seed."""
    rng = random.Random(seed)
    everyday, documents, code = list(_everyday(rng)), list(_documents(rng)), list(_code(rng))
    for pool in (everyday, documents, code):
        rng.shuffle(pool)
    held_out = everyday[:20] + documents[:12] + code[:8]
    subjects = {prompt.subject for prompt in held_out} | {prompt.other for prompt in held_out if prompt.other}
    pools = [[prompt for prompt in pool if not prompt.concerns(subjects)] for pool in (everyday, documents, code)]
    # Half everyday questions, a third documents, the rest code, evenly through the list, so that any first part of
    # it has the same mixture.
    mixture = [0, 1, 0, 1, 0, 2]
    train: list[Prompt] = []
    while len(train) < count and any(pools):
        for pool in (pools[index] for index in mixture):
            if pool:
                train.append(pool.pop())
    return train[:count], held_out


def file_prompts(path: Path, count: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of a text file, one a line, or of a `.jsonl` file with `{"prompt": ...}` or a string a line.

    A tenth of them, at most 40, is held out.
    """
    texts: dict[str, None] = {}  # a repeated prompt must not be on both sides
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        text = line.strip()
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                text = row if isinstance(row, str) else row["prompt"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f'{path}:{number}: expected a JSON string or an object with "prompt"') from None
        texts.setdefault(text)
    prompts = [Prompt(text, text) for text in texts]
    if len(prompts) < 2:
        raise ValueError(f"{path} holds {len(prompts)} different prompts; at least two are needed")
    random.Random(seed).shuffle(prompts)
    held_out = min(HELD_OUT, max(1, len(prompts) // 10))
    return prompts[held_out : held_out + count], prompts[:held_out]


def _everyday(rng: random.Random) -> Iterator[Prompt]:
    topics = [topic.strip() for topic in TOPICS.replace("\n", " ").split(",")]
    for topic in topics:
        for question in rng.sample(QUESTIONS, 14):
            other = rng.choice(topics) if "{1}" in question else ""
            if other != topic:
                yield Prompt(topic, question.format(topic, other), other=other)


def _documents(rng: random.Random) -> Iterator[Prompt]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", topics[name])]
        text = " ".join(part for part in paragraphs if len(part) > 80)
        for start in range(0, len(text) - 200, 500):
            # Mostly short, some of up to 3,000 characters: prompts cost time, but drafts must hold up after long ones.
            length = rng.choice((250, 400, 600, 900, 3000))
            passage = text[start : start + length].rsplit(" ", 1)[0].split(" ", 1)[-1]
            if rng.random() < 0.25:
                yield Prompt(name, passage[:600].rsplit(" ", 1)[0], chat=False)
            else:
                yield Prompt(name, rng.choice(DOCUMENT_TASKS).format(passage))


def _code(rng: random.Random) -> Iterator[Prompt]:
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            if rng.random() < 0.5:
                yield Prompt(module_name, rng.choice(CODE_TASKS).format(f"{module_name}.{name}"))
                continue
            text = inspect.getdoc(value) or ""
            if 80 <= len(text) <= 900:
                yield Prompt(module_name, rng.choice(DOCUMENT_TASKS).format(text))
