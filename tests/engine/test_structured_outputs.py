"""Structured outputs: generated text matches its schema, regex, choice, grammar or tool format."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from quire.engine.client.grammar import GrammarTokens
from quire.engine.client.sampling_params import SamplingParams
from quire.parsing.answer import AnswerFormat
from quire.parsing.grammar_writer import as_lark
from quire.parsing.reasoning import ReasoningTags
from quire.parsing.structured.compilation import complete_grammar
from quire.parsing.structured.constraint import ReasoningPrefix, grammar_of
from quire.parsing.tools.calls import join_calls
from quire.parsing.tools.choice import ToolPlan
from quire.parsing.tools.custom import schema_of
from quire.parsing.tools.registry import FORMATS
from quire.protocol.custom import CustomDefinition, CustomTool, GrammarFormat
from quire.protocol.structured import StructuralTagFormat, StructuredOutputs
from tests.support.engine import Engine, random_prompt
from tests.support.formats import CONSTRAINED
from tests.support.models import make_model, save_model
from tests.support.tokenizer import EOS, SPECIAL, THINK, byte_tokenizer, write_tokenizer

SPECIAL_IDS = {text: token for token, text in enumerate((*SPECIAL, *THINK), 256)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    save_model(make_model("llama", max_position_embeddings=512, num_hidden_layers=1), folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder)


def constrained(grammar: str, seed: int = 0, **fields: Any) -> SamplingParams:
    """Sampling parameters for random text constrained by a grammar."""
    chosen = {"max_tokens": 400, "temperature": 1.0, "seed": seed, "eos_token_ids": (EOS,), **fields}
    return SamplingParams(grammar=grammar, **chosen)


def grammar_for(**kind: Any) -> str:
    return complete_grammar(grammar_of(StructuredOutputs.model_validate(kind), SPECIAL_IDS))


def text_of(tokens: list[int]) -> str:
    return byte_tokenizer().decode([token for token in tokens if token != EOS], skip_special_tokens=False)


def generate_texts(engine: Engine, grammar: str, count: int, **fields: Any) -> list[str]:
    """Texts of the seeds 0 to `count`, which are generated together."""
    names = [f"text-{len(engine.results) + seed}" for seed in range(count)]
    for seed, name in enumerate(names):
        engine.add(name, random_prompt(seed, 9), constrained(grammar, seed, **fields))
    engine.run()
    results = [engine.results[name] for name in names]
    for result in results:
        assert result.finish_reason == "stop", result.outputs[-1]
    return [text_of(result.tokens) for result in results]


def generate_text(engine: Engine, grammar: str, **fields: Any) -> str:
    return generate_texts(engine, grammar, 1, **fields)[0]


def random_schema(rng: Random, depth: int = 0) -> dict[str, Any]:
    """A random schema that only has short instances."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "anyOf"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, *["object", "array"] * 4])
    match kind:
        case "object":
            names = rng.sample(["a", "bee", "city name", "ä", "x-1", "id"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": rng.randint(0, 2),
                "maxItems": 2,
            }
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "integer" | "number":
            low = rng.randint(-50, 50)
            schema = {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 900)}
            return schema if kind == "integer" else {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}
        case "enum":
            return {"enum": rng.sample(["red", 'say "hi"', 7, None, True, "ü"], 3)}
        case "const":
            return {"const": rng.choice(["x", 5, None])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice([r"^[a-z]{2}-\d{3}$", r"^(ab|cd)+e$", r"^\+?\d{2,4}$"]),
                "maxLength": 12,
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 2), random_schema(rng, depth + 2)]}
        case _:
            return {"type": kind}


@cache
def schemas() -> list[dict[str, Any]]:
    rng = Random(5)
    return [random_schema(rng) for _ in range(200)]


def test_json_matches_two_hundred_random_schemas(engine: Engine) -> None:
    names = []
    for index, schema in enumerate(schemas()):
        grammar = grammar_for(json=schema, disable_any_whitespace=index % 2 == 0)
        names.append(f"schema-{index}")
        engine.add(names[-1], random_prompt(index, 5), constrained(grammar, index))
        if index % 16 == 15:
            engine.run()
    engine.run()
    for name, schema in zip(names, schemas(), strict=True):
        result = engine.results[name]
        assert result.finish_reason == "stop", (schema, text_of(result.tokens))
        jsonschema.validate(json.loads(text_of(result.tokens)), schema)
    assert engine.blocks_used == 0


@pytest.mark.parametrize("pattern", [r"[A-Z]{3}-\d{4}", r"(a|bc){2,5}", r"^\w{3} \w{2}$", r"https?://[a-z]{1,9}\.org"])
def test_the_whole_text_matches_a_regex(engine: Engine, pattern: str) -> None:
    for text in generate_texts(engine, grammar_for(regex=pattern), 5):
        assert re.fullmatch(pattern, text)


def test_the_text_is_one_of_the_choices(engine: Engine) -> None:
    choices = ["yes", "no", 'a "quoted" one', "nö\n", "<think>"]
    chosen = set(generate_texts(engine, grammar_for(choice=choices), 20))
    assert chosen <= set(choices)
    assert len(chosen) > 1


def test_as_many_choices_as_documented(engine: Engine) -> None:
    choices = ["", "<think>", *(f"{n} is a number" for n in range(4094))]
    assert set(generate_texts(engine, grammar_for(choice=choices), 4)) <= set(choices)


def test_grammars_are_needed_until_their_requests_end(engine: Engine) -> None:
    grammars: Any = engine.core._grammars
    for name in ("finished", "aborted", "refused"):
        grammar = "{" if name == "refused" else grammar_for(regex=f"a{{40}}{name}")
        engine.add(name, random_prompt(1, 5), constrained(grammar))
    assert sorted(grammars._needed) == ["aborted", "finished"]
    engine.step()
    engine.abort("aborted")
    assert list(grammars._needed) == ["finished"]
    engine.run()
    assert not grammars._needed


@pytest.mark.parametrize(
    "grammar",
    ['start: item ("," item)*\nitem: /[0-9]{1,3}/ | "x"', 'root ::= item ("," item)*\nitem ::= [0-9] [0-9]? | "x"'],
)
def test_lark_and_gbnf_grammars(engine: Engine, grammar: str) -> None:
    texts = generate_texts(engine, grammar_for(grammar=grammar), 6, max_tokens=240)
    assert all(re.fullmatch(r"(\d{1,3}|x)(,(\d{1,3}|x))*", item) for item in texts)


SPELLED = "use <think> or <|im_end|> now"


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"const": SPELLED}},
        {"json": {"enum": [SPELLED]}},
        {"json": {"type": "object", "properties": {SPELLED: {"const": 1}}, "required": [SPELLED]}},
        {"choice": [SPELLED]},
        {"choice": ["<think>x", SPELLED, "<|im_start|>"]},
        {"regex": SPELLED.replace("|", r"\|")},
        {"regex": "use <(think|</think>)> x"},
        {"grammar": f'start: "{SPELLED}"'},
        {"grammar": 'start: "<" "think" ">" "x"'},
        {"grammar": f'root ::= "{SPELLED}"'},
    ],
)
@pytest.mark.parametrize("forced", [True, False])
def test_text_that_spells_special_tokens(folder: Path, fields: Any, forced: bool) -> None:
    """All tokens that a mask allows are consumed, and none of them is special."""
    tokens = GrammarTokens(folder, len(SPECIAL_IDS) + 256, (EOS,))
    tokens.forces_tokens = forced
    grammar = grammar_of(StructuredOutputs.model_validate(fields), tokens.special)
    for seed in range(3):
        answer = walk(tokens, grammar, Random(seed))
        assert not set(answer) & set(SPECIAL_IDS.values())
        text = text_of(answer)
        assert "<" in text
        if forced:  # the tokens are those of the text
            assert answer == tokens.backend.tokenize_str(text)


@pytest.mark.parametrize("merged", [False, True])
def test_text_that_spells_added_tokens_of_the_vocabulary(tmp_path: Path, merged: bool) -> None:
    """A token may be in the vocabulary and an added token; it may even be what others are merged to."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    new = len(SPECIAL_IDS) + 256
    tokenizer["model"]["vocab"] |= {"<b": new, "<b>": new + 1}
    tokenizer["model"]["merges"] = [["<", "b"], ["<b", ">"]] if merged else [["<", "b"]]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": new + 1, "content": "<b>"})
    path.write_text(json.dumps(tokenizer))
    tokens = GrammarTokens(tmp_path, new + 2, (EOS,))
    assert tokens.special["<b>"] == new + 1
    for seed in range(3):
        answer = walk(tokens, grammar_of(StructuredOutputs.model_validate({"choice": ["a <b> c"]}), {}), Random(seed))
        assert new + 1 not in answer
        assert tokens.backend.decode_str(answer) == "a <b> c"


def test_a_structural_tag_may_contain_special_tokens(folder: Path) -> None:
    node = {"type": "tag", "begin": "a<think>b", "content": {"type": "const_string", "value": "c"}, "end": " </think>d"}
    tag = StructuralTagFormat.model_validate({"type": "structural_tag", "format": node})
    tokens = GrammarTokens(folder, len(SPECIAL_IDS) + 256, (EOS,))
    answer = walk(tokens, grammar_of(tag, tokens.special), Random(1))
    assert text_of(answer) == "a<think>bc </think>d"
    assert {SPECIAL_IDS["<think>"], SPECIAL_IDS["</think>"]} < set(answer)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_a_tool_whose_names_and_values_spell_special_tokens(folder: Path, name: str) -> None:
    enum = {"type": "string", "enum": ["x <think> y"]}
    schemas = {"f<think>": {"type": "object", "properties": {"a<think>": enum}, "required": ["a<think>"],
                            "additionalProperties": False}}  # fmt: skip
    plan = ToolPlan(format=FORMATS[name].constrained, schemas=schemas, required=True, parallel=False)
    tokens = GrammarTokens(folder, len(SPECIAL_IDS) + 256, (EOS,))
    for seed in range(2):
        answer = walk(tokens, grammar_of(None, tokens.special, plan=plan), Random(seed))
        assert SPECIAL_IDS["<think>"] not in answer
        assert "x <think> y" in text_of(answer)


def walk(tokens: GrammarTokens, grammar: str, rng: Random) -> list[int]:
    """Random tokens that a grammar allows, up to its end; ordinary ones where the end is not the only possibility."""
    matcher, answer = tokens.matcher(complete_grammar(grammar)), list[int]()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
        assert allowed, matcher.get_error()
        token = rng.choice(allowed)
        if token == EOS:
            break
        assert matcher.consume_token(token), matcher.get_error()
        answer.append(token)
        assert len(answer) < 500
    return answer


def test_the_content_of_a_structural_tag_matches_its_schema(engine: Engine) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [
                {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {"const": 5}}, "end": "</f>"}
            ],
            "at_least_one": True,
            "stop_after_first": True,
        },
    }
    grammar = grammar_of(StructuralTagFormat.model_validate(tag), SPECIAL_IDS)
    result = engine.generate(
        random_prompt(1, 5), constrained(grammar, logit_bias={byte_tokenizer().encode("<").ids[0]: 9.0})
    )
    assert re.search(r"<f=add>5</f>$", text_of(result.tokens))


def test_reasoning_precedes_constrained_text(engine: Engine) -> None:
    structure = StructuredOutputs.model_validate({"choice": ["left", "right"]})
    end = SPECIAL_IDS["</think>"]
    for prefix, opening in ((ReasoningPrefix.OPEN, ""), (ReasoningPrefix.POSSIBLE, "(<think>|(?=left|right))")):
        grammar = grammar_of(structure, SPECIAL_IDS, ReasoningTags(), prefix)
        for text in generate_texts(engine, grammar, 4, logit_bias={end: 4.0, SPECIAL_IDS["<think>"]: 4.0}):
            assert re.fullmatch(rf"{opening}(.*</think>\s*)?(left|right)", text, re.DOTALL)


ARGUMENTS = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_a_required_tool_call_is_valid_in_every_format(engine: Engine, name: str) -> None:
    schemas = {"f": ARGUMENTS, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
    plan = ToolPlan(format=FORMATS[name].constrained, schemas=schemas, required=True, parallel=False)
    grammar = grammar_of(None, SPECIAL_IDS, plan=plan)
    for text in generate_texts(engine, grammar, 2):
        parsed = plan.format.parser(schemas).push(text, last=True)
        (call,) = join_calls(parsed.calls)
        jsonschema.validate(json.loads(call.arguments), schemas[call.name or ""])
        assert parsed.content == ""


@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_input_of_a_custom_tool_matches_its_format(engine: Engine, name: str) -> None:
    pattern = r'[ab"\\][ab"\n\\]{0,4}x'
    grammar = GrammarFormat.model_validate({"type": "grammar", "grammar": {"syntax": "regex", "definition": pattern}})
    tool = CustomTool(type="custom", custom=CustomDefinition(name="f", format=grammar))
    plan = ToolPlan(
        format=FORMATS[name].constrained,
        schemas={"f": schema_of(tool)},
        required=True,
        parallel=False,
        custom=frozenset(["f"]),
    )
    read = AnswerFormat(tags=None, prompt=None, plan=plan)
    for text in generate_texts(engine, grammar_of(None, SPECIAL_IDS, plan=plan), 2):
        (call,) = join_calls(read.parser().push(text, last=True).calls)
        assert re.fullmatch(pattern, call.arguments), text


def test_a_grammar_rendered_as_lark_is_equivalent(engine: Engine) -> None:
    schemas = {"f": ARGUMENTS, "@g0": {"type": "object", "properties": {}, "additionalProperties": False}}
    calling = ToolPlan(format=FORMATS["hermes"], schemas=schemas, required=True)
    tagged = ToolPlan(format=FORMATS["qwen3_coder"], schemas=schemas, strict=frozenset(["f"]))
    grammars = [
        grammar_for(json={"type": "object", "properties": {'"{}/\n': {"enum": ["@g0", "}", "é"]}}}),
        grammar_for(json=True),
        grammar_for(regex=r"[a-c/]{2,5}@g0\}\d"),
        grammar_for(choice=["@g0", "/@g0/", '"@g0"', "a\nb"]),
        grammar_for(grammar='start: "}" x // a } in a comment\nx: /[}{]/ y\ny: "@g0"'),
        grammar_for(grammar='root ::= "a" [0-9]+'),
        grammar_of(None, SPECIAL_IDS, ReasoningTags(), ReasoningPrefix.POSSIBLE, calling),
        grammar_of(None, SPECIAL_IDS, ReasoningTags(), ReasoningPrefix.OPEN, tagged),
    ]
    for grammar in grammars:
        again = grammar_for(grammar=as_lark(grammar))
        for seed in range(2):
            tokens = [
                engine.generate(random_prompt(seed, 9), constrained(text, seed, max_tokens=40)).tokens
                for text in (grammar, again)
            ]
            assert tokens[0] == tokens[1]


def test_tokens_do_not_depend_on_the_batch(folder: Path, engine: Engine) -> None:
    grammars = [grammar_for(json=schema) for schema in schemas()[:12]]
    alone = [
        engine.generate(random_prompt(i, 20), constrained(grammar, i)).tokens for i, grammar in enumerate(grammars)
    ]
    for options in (
        {"max_num_batched_tokens": 24, "block_size": 16, "kv_cache_memory_bytes": 1 << 20},
        {"speculative_method": "ngram", "num_speculative_tokens": 4},
    ):
        other = Engine(folder, **options)
        for i, grammar in enumerate(grammars):
            other.add(f"r{i}", random_prompt(i, 20), constrained(grammar, i))
        other.run()
        assert [other.results[f"r{i}"].tokens for i in range(len(grammars))] == alone
        assert other.blocks_used == 0


def test_the_grammar_overrides_bad_words_and_min_tokens(engine: Engine) -> None:
    word = tuple(byte_tokenizer().encode("y").ids)
    assert generate_text(engine, grammar_for(choice=["yes", "yet"]), bad_words=(word,), min_tokens=100) in (
        "yes",
        "yet",
    )


def test_an_invalid_grammar_fails_only_its_request(engine: Engine) -> None:
    engine.add("bad", random_prompt(1, 5), constrained('{"grammars":[{"lark_grammar":"start: ("}]}'))
    engine.add("good", random_prompt(1, 5), constrained(grammar_for(choice=["a"])))
    engine.run()
    assert engine.results["bad"].error
    assert text_of(engine.results["good"].tokens) == "a"


def test_abort_while_the_grammar_is_compiled(engine: Engine) -> None:
    engine.add("gone", random_prompt(1, 5), constrained(grammar_for(choice=["a", "gone"])))
    engine.abort("gone")
    engine.run()
    assert engine.blocks_used == 0
