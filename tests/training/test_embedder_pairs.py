"""The pairs of quire-nano-embed: the same seed gives the same pairs, and training never uses held-out text."""

from __future__ import annotations

from random import Random

import pytest
import torch

from training.embedder.evaluate import mean, measure, ranks, table
from training.embedder.heldout import KINDS, Search, from_pairs, search
from training.embedder.pairs.docs import paragraphs
from training.embedder.pairs.facts import recall_question
from training.embedder.pairs.pair import Pair, same
from training.embedder.pairs.quire import answer_of, heldout_facts, training_facts
from training.embedder.pairs.records import heldout_questions
from training.embedder.pairs.themes import THEMES, make_pair
from training.embedder.pairs.topics import topics
from training.embedder.pairs.wording import content_words, garble, reword, synonyms
from training.embedder.recipe import MIX
from training.embedder.retrievers import Bm25
from training.grammar import all_phrases, normalize

PAIRS = 60


@pytest.mark.parametrize("theme", list(THEMES))
def test_pairs_are_repeatable_and_complete(theme: str) -> None:
    for split in ("train", "heldout"):
        first, second = (make_pair(theme, Random("a"), split) for _ in range(2))
        assert first == second
        rng = Random(1)
        for _ in range(PAIRS):
            pair = make_pair(theme, rng, split)
            assert pair.query.strip()
            assert pair.text.strip()
            assert pair.fits(pair)
            assert pair.negative != pair.text


def test_every_theme_has_a_share() -> None:
    assert set(MIX) == set(THEMES)
    assert sum(MIX.values()) == pytest.approx(1)


def test_a_query_fits_texts_that_hold_what_it_asks_for() -> None:
    asked = Pair(
        "who lives in Oslo", "Ann lives in Oslo.", frozenset({"city oslo"}), frozenset({"city oslo", "name ann"})
    )
    other = Pair("how old is Ben", "Ben from Oslo is 4.", frozenset({"name ben"}), frozenset({"name ben", "city oslo"}))
    assert asked.fits(other)
    assert not other.fits(asked)
    assert not same("a", "b", ["x"]).fits(same("c", "d", ["y"]))


def test_heldout_facts_are_not_trained() -> None:
    hidden = {answer_of(fact) for fact in heldout_facts()}
    assert 5 <= len(heldout_facts()) <= 10
    assert not set(heldout_facts()) & set(training_facts())
    rng = Random(2)
    for _ in range(300):
        pair = make_pair("quire_answer", rng)
        assert pair.text not in hidden


def test_heldout_topics_and_questions_are_not_trained() -> None:
    assert len(topics("heldout")) >= 10
    assert not set(topics("train")) & set(topics("heldout"))
    heldout = {normalize(phrase) for topic in topics("train").values() for phrase in topic["heldout"]}
    hidden = {text for topic in topics("heldout").values() for text in topic["text"]}
    rng = Random(3)
    for _ in range(400):
        pair = make_pair("topics", rng)
        assert not {normalize(pair.query), normalize(pair.text)} & heldout
        assert not {pair.query, pair.text} & hidden


def test_heldout_record_questions_are_not_trained() -> None:
    from training.books import phrase_book

    tables = phrase_book("pairs")["questions"].values()
    trained = {
        phrase
        for table in tables
        for topic in table.values()
        for line in topic["train"]
        for phrase in all_phrases(line)
    }
    assert not trained & heldout_questions()


def test_pages_belong_to_one_split() -> None:
    train, heldout = ({paragraph.key.split()[0] for paragraph in paragraphs(split)} for split in ("train", "heldout"))
    assert train
    assert heldout
    assert not train & heldout
    assert all("](" not in paragraph.text for paragraph in paragraphs("train"))


def test_typos_and_synonyms() -> None:
    rng = Random(4)
    garbled = {garble("where is the railway station", rng) for _ in range(20)}
    assert len(garbled) > 15
    assert "where is the railway station" not in garbled
    assert "car" in synonyms()["automobile"]
    assert {reword("Buy a car", Random(at)) for at in range(20)} > {"Purchase an automobile".replace("an", "a")}
    assert content_words("The cat, the dog and the cat!") == ["cat", "dog"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_searches_have_one_right_candidate(kind: str) -> None:
    pairs = search(kind, 12, seed=3)
    assert pairs == search(kind, 12, seed=3)
    assert len(pairs.queries) == len(pairs.right)
    assert len(pairs.queries) > 3
    assert len(set(pairs.candidates)) > len(pairs.candidates) * 0.98
    assert all(0 <= at < len(pairs.candidates) for at in pairs.right)


def test_search_from_pairs_has_no_second_answer() -> None:
    pairs = from_pairs(recall_question, Random(5), 15)
    assert len(set(pairs.right)) == len(pairs.queries)


def test_recall_of_bm25() -> None:
    texts = ["the cat sat on the mat", "dogs bark at night", "a ship sails the sea"]
    searched = Search(["ship on the sea", "who can bark at night", "mat of the cat"], texts, [2, 1, 0])
    result = measure(Bm25(), searched)
    assert result["recall@1"] == 100
    assert ranks(torch.tensor([[1.0, 1.0, 0.5], [0.1, 0.3, 0.2]]), [1, 2]) == [2, 2]
    results = {"a": {"queries": 3, "candidates": 3, "BM25": result}}
    assert mean(results, "BM25", 10) == 100
    assert "BM25" in table(results, ["BM25"])
