"""lm-evaluation-harness: tasks of local files, by log probabilities of prompts and by answers."""
# needs: lm_eval[api]>=0.4.11,<1 transformers>=5,<6 openai>=2,<3

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from questions import MODEL, SUM, TOTAL, URL

os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from openai import OpenAI
from transformers import AutoTokenizer

DOCUMENTS = [
    {"question": "What is 27 + 58?", "choices": ["85", "86", "a horse"], "label": 0},
    {"question": "The sun rises in the", "choices": ["west and", "east", "cellar"], "label": 1},
    {"question": "Two plus two is", "choices": ["seven", "nine hundred", "four"], "label": 2},
]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """
task: choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """
task: answers
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]
"""
client = OpenAI(base_url=URL, api_key="none")
root = next(model for model in client.models.list() if model.id == MODEL).root
tokenizer = AutoTokenizer.from_pretrained(root)


def evaluate(model: str, path: str, tasks: list[str], manager: TaskManager, **arguments: object) -> dict:
    """The harness's results of tasks at an endpoint."""
    return simple_evaluate(
        model=model,
        model_args={"model": MODEL, "base_url": f"{URL}/{path}", **arguments},
        tasks=tasks,
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )


def expected(question: str, choice: str) -> tuple[float, bool]:
    """The log probability of a choice behind a question, and whether each token of it is the most probable one."""
    context, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (question, f"{question} {choice}"))
    answer = client.completions.create(model=MODEL, prompt=whole, max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = [
        entry[str(token)] for entry, token in zip(answer.choices[0].prompt_logprobs, whole, strict=True) if entry
    ][len(context) - 1 :]
    return sum(entry["logprob"] for entry in entries), all(entry["rank"] == 1 for entry in entries)


with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
        (Path(folder) / f"{name}.yaml").write_text(COMMON.format(data=data) + text)
    manager = TaskManager(include_path=folder)

    local = {"tokenizer": root, "tokenizer_backend": "huggingface", "num_concurrent": 2}
    results = evaluate("local-completions", "completions", ["choices", "answers"], manager, batch_size=2, **local)
    for sample in results["samples"]["choices"]:
        document = sample["doc"]
        for choice, (logprob, greedy) in zip(document["choices"], sample["filtered_resps"], strict=True):
            wanted, most_probable = expected(document["question"], choice)
            assert abs(float(logprob) - wanted) < 0.05 * max(1, abs(wanted)), (document, choice, logprob, wanted)
            assert str(greedy) == str(most_probable), (document, choice)
    for sample in results["samples"]["answers"]:
        (text,) = sample["filtered_resps"]
        answer = client.completions.create(
            model=MODEL, prompt=sample["doc"]["question"], max_tokens=24, temperature=0, stop=["\n"]
        )
        assert text == answer.choices[0].text, (text, answer)

    results = evaluate(
        "local-chat-completions", "chat/completions", ["answers"], manager, num_concurrent=1, eos_string="none"
    )  # without a template of its own, questions go as messages
    (text,) = next(s for s in results["samples"]["answers"] if s["doc"]["question"] == SUM)["filtered_resps"]
    assert TOTAL in text, text
