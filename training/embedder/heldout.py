"""The searches of the evaluation: phrasings, values, tools and topics that training never uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training.embedder.pairs.docs import docs_sentence, paragraphs
from training.embedder.pairs.facts import recall_question, recall_wording
from training.embedder.pairs.pair import Pair
from training.embedder.pairs.quire import answer_of, heldout_facts, quire_question, training_facts
from training.embedder.pairs.records import record_question, record_short, record_wording
from training.embedder.pairs.tools import VALUES, describe, tool_wording
from training.embedder.pairs.topics import topics
from training.embedder.pairs.wording import arithmetic, keywords, other_words, typo
from training.generators.knowledge import quire_turn
from training.generators.tool_calls import call_turn
from training.generators.tool_specs import ToolSpec, heldout_requests, instantiate, read_specs

SPLIT = "heldout"
TRIES = 40


@dataclass(frozen=True)
class Search:
    """Queries, the candidates, and for each query the number of the right candidate."""

    queries: list[str]
    candidates: list[str]
    right: list[int]


def _search(asked: Sequence[tuple[str, str]], candidates: Sequence[str], rng: Random) -> Search:
    """Return a search with the candidates in random order; ``asked`` are queries and their right candidates."""
    shuffled = rng.sample(list(dict.fromkeys(candidates)), len(dict.fromkeys(candidates)))
    place = {text: at for at, text in enumerate(shuffled)}
    return Search([query for query, _ in asked], shuffled, [place[text] for _, text in asked])


def from_pairs(make: Callable[[Random, str], Pair], rng: Random, count: int, split: str = SPLIT) -> Search:
    """Return a search among the texts, and the wrong texts, of pairs of which no query fits the text of another."""
    pairs: list[Pair] = []
    for _ in range(count * TRIES):
        pair = make(rng, split)
        clash = any(pair.fits(other) or other.fits(pair) or pair.query == other.query for other in pairs)
        if not clash:
            pairs.append(pair)
        if len(pairs) == count:
            break
    wrong = [
        pair.negative for pair in pairs if pair.negative and not any(pair.negative == other.text for other in pairs)
    ]
    return _search([(pair.query, pair.text) for pair in pairs], [*(pair.text for pair in pairs), *wrong], rng)


def _pairs(make: Callable[[Random, str], Pair]) -> Callable[[Random, int], Search]:
    return lambda rng, count: from_pairs(make, rng, count)


def _quire_answers(names: Callable[[], Sequence[str]]) -> Callable[[Random, int], Search]:
    """Return a maker of searches among all answers on Quire, with questions on some of the facts."""

    def make(rng: Random, count: int) -> Search:
        answers = [answer_of(fact) for fact in (*training_facts(), *heldout_facts())]
        asked = {
            quire_turn(rng, SPLIT, fact).user: answer_of(fact) for fact in (rng.choice(names()) for _ in range(count))
        }
        return _search(list(asked.items()), answers, rng)

    return make


def _tools(new: bool) -> Callable[[Random, int], Search]:
    """Return a maker of searches among all tools, for requests for those of training or for new ones."""

    def make(rng: Random, count: int) -> Search:
        specs = (*read_specs("train"), *read_specs(SPLIT))
        shown = {spec.names[0]: _description(spec, rng) for spec in specs}
        asked: dict[str, str] = {}
        for _ in range(count):
            spec = rng.choice(read_specs(SPLIT) if new else heldout_requests())
            asked[call_turn(rng, VALUES[SPLIT], instantiate(spec, VALUES[SPLIT], rng)).user] = shown[spec.names[0]]
        return _search(list(asked.items()), list(shown.values()), rng)

    return make


def _description(spec: ToolSpec, rng: Random) -> str:
    return describe(instantiate(spec, VALUES[SPLIT], rng))


def _topics(new: bool) -> Callable[[Random, int], Search]:
    """Return a maker of searches among all topics, for questions on those of training or on new ones."""

    def make(rng: Random, _count: int) -> Search:
        everything = {**topics("train"), **topics(SPLIT)}
        asked: dict[str, str] = {}
        for name in topics(SPLIT if new else "train"):
            text = " ".join(everything[name]["text"])
            asked |= dict.fromkeys(everything[name]["heldout"], text)
            if new:
                asked |= dict.fromkeys((question for question in everything[name]["ask"] if "|" not in question), text)
        return _search(list(asked.items()), [" ".join(topic["text"]) for topic in everything.values()], rng)

    return make


def _docs(rng: Random, count: int) -> Search:
    """Return a search for the rest of a paragraph by one of its sentences, in pages that training does not use."""
    pairs = from_pairs(docs_sentence, rng, min(count, len(paragraphs(SPLIT))))
    others = [paragraph.text for paragraph in paragraphs("train")]
    return Search(pairs.queries, [*pairs.candidates, *others], pairs.right)


KINDS: dict[str, Callable[[Random, int], Search]] = {
    "quire_answer": _quire_answers(training_facts), "quire_new_answer": _quire_answers(heldout_facts),
    "quire_question": _pairs(quire_question), "tool": _tools(new=False), "new_tool": _tools(new=True),
    "tool_wording": _pairs(tool_wording), "recall_question": _pairs(recall_question),
    "recall_wording": _pairs(recall_wording), "record_question": _pairs(record_question),
    "record_wording": _pairs(record_wording), "record_short": _pairs(record_short), "arithmetic": _pairs(arithmetic),
    "typo": _pairs(typo), "other_words": _pairs(other_words), "keywords": _pairs(keywords),
    "topic": _topics(new=False), "new_topic": _topics(new=True), "docs": _docs,
}  # fmt: skip


def search(kind: str, count: int, seed: int) -> Search:
    """Return the search of a kind; the same seed gives the same one."""
    return KINDS[kind](Random(f"{seed}-{kind}"), count)
