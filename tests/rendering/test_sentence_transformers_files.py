"""Files of sentence-transformers, and prompts of rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.multimodal.errors import ModelFileError, PromptError
from quire.rendering.pooling_prompts import InputNames, TextsJob, Truncation, tokenize_texts
from quire.rendering.reranker_prompts import ChatPairTemplate, Qwen3Template, pair_template
from quire.rendering.sentence_transformers_files import SentenceTransformersFiles, read_sentence_transformers_files
from quire.rendering.tokenizer import Tokenizer
from tests.support.tokenizer import CHAT_TEMPLATE, byte_tokenizer

CONFIG = "config_sentence_transformers.json"


def folder_with(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content))
    return folder


def test_a_folder_without_them_has_no_prompts(tmp_path: Path) -> None:
    files = read_sentence_transformers_files(tmp_path)
    assert files == SentenceTransformersFiles()
    assert files.prompt(None) == files.prompt_for("query") == files.prompt_for("x") == ""
    with pytest.raises(PromptError, match="it has: none"):
        files.prompt("query")


def test_prompts_by_name_and_by_use(tmp_path: Path) -> None:
    config = {"prompts": {"query": "q: ", "passage": "p: ", "clustering": "c: "}, "default_prompt_name": "passage"}
    files = read_sentence_transformers_files(folder_with(tmp_path, config_sentence_transformers=config))
    assert files.prompt(None) == "p: "
    assert files.prompt("query") == "q: "
    uses = ("query", "search_query", "document", "search_document", "passage", "clustering", "classification")
    assert [files.prompt_for(use) for use in uses] == ["q: ", "q: ", "p: ", "p: ", "p: ", "c: ", "p: "]


def test_prefixes_of_models_that_compare_tokens(tmp_path: Path) -> None:
    config = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
    files = read_sentence_transformers_files(folder_with(tmp_path, config_sentence_transformers=config))
    assert (files.prompt_for("query"), files.prompt_for("document"), files.prompt(None)) == ("[Q] ", "[D] ", "")


def test_markers_of_colberts_training_are_one_token(tmp_path: Path) -> None:
    """Words of the vocabulary that a text with the same characters would not become."""
    words = {"[UNK]": 0, "[unused0]": 1, "[unused1]": 2, "river": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "artifact.metadata").write_text(
        '{"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "dim": 8}'
    )
    prompt = read_sentence_transformers_files(tmp_path).prompt_for("query")
    assert Tokenizer.load(tmp_path).encode(f"{prompt}river", add_special_tokens=False) == [1, 3]
    assert read_sentence_transformers_files(tmp_path).prompt_for("document") == "[unused1]"


def test_other_files(tmp_path: Path) -> None:
    bert, pooling = {"do_lower_case": True, "max_seq_length": 128}, {"include_prompt": False}
    files = read_sentence_transformers_files(
        folder_with(tmp_path, sentence_bert_config=bert, **{"1_Pooling__config": pooling})
    )
    assert (files.lower_case, files.pools_prompt) == (True, False)


@pytest.mark.parametrize("content", ["[]", "{", "\udc80"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / CONFIG).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFileError, match=CONFIG):
        read_sentence_transformers_files(tmp_path)


def test_odd_values_are_left_out(tmp_path: Path) -> None:
    config = {"prompts": {"query": 5, "other": "x"}, "default_prompt_name": "query"}
    files = read_sentence_transformers_files(folder_with(tmp_path, config_sentence_transformers=config))
    assert (files.prompts, files.default_prompt) == ({"other": "x"}, None)


def test_instructions_are_replaced_where_there_is_one() -> None:
    prompt = "Instruct: Given a question\nQuery: "
    assert SentenceTransformersFiles.with_instruction(prompt, "Find \\1") == "Instruct: Find \\1\nQuery: "
    with pytest.raises(PromptError, match="no instruction to replace"):
        SentenceTransformersFiles.with_instruction("query: ", "Find")


def test_rerankers_have_the_template_that_fits(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), {})
    assert pair_template(tmp_path, tokenizer, CHAT_TEMPLATE, {}) is None
    folder_with(tmp_path, config={"model_type": "qwen3"})
    assert isinstance(pair_template(tmp_path, tokenizer, CHAT_TEMPLATE, {}), Qwen3Template)
    source = "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}{{ x }} 'document'"
    template = pair_template(tmp_path, tokenizer, source, {"x": "!"})
    assert isinstance(template, ChatPairTemplate)
    assert template.text("a", "b", None, {}) == "a! 'document'"
    assert template.text("a", "b", None, {"x": "?"}) == "a? 'document'"
    with pytest.raises(PromptError, match="no template variables"):
        Qwen3Template().text("a", "b", None, {"x": 1})


def test_pairs_of_qwen3_vl_have_the_prompt_that_it_was_trained_with(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"model_type": "qwen3_vl"})
    template = pair_template(tmp_path, Tokenizer(byte_tokenizer(), {}), CHAT_TEMPLATE, {})
    assert isinstance(template, ChatPairTemplate)
    text = template.text("a", "b", None, {})
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert text.endswith(
        "<|im_start|>user\n<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
        "<Query>:a\n<Document>:b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<Instruct>: find<Query>:a\n" in template.text("a", "b", "find", {})


def test_texts_for_siglip_are_lowered(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"model_type": "siglip"})
    files = read_sentence_transformers_files(tmp_path)
    assert (files.lower_case, files.without_punctuation) == (True, False)
    folder_with(tmp_path, tokenizer_config={"tokenizer_class": "SiglipTokenizer"})
    assert read_sentence_transformers_files(tmp_path).without_punctuation
    job = TextsJob(texts=["A  Cat!", "a cat"], truncation=Truncation(9), names=InputNames("input"))
    first, second = tokenize_texts(job, Tokenizer(byte_tokenizer(), {}), lower_case=True, without_punctuation=True)
    assert first.token_ids.tolist() == second.token_ids.tolist()
