"""Evaluates quire-nano-see on held-out pictures, locally or at a server: ``python -m training.see.evaluate``."""

from __future__ import annotations

import argparse
import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from training.see.heldout import Sight, group_of, sights
from training.see.run import EXPORT

COUNT, SEED = 300, 7
MODEL = "quire-nano-see"
# Names of the parts, whose phrasings they have, and whether the fonts are ones that training never uses.
_PARTS = (
    ("fonts of training", "heldout", False),
    ("other fonts", "heldout", True),
    ("phrasings of training", "train", False),
)
_MOST_NEW = 128  # tokens
_TIMEOUT = 120.0  # seconds

Answering = Callable[[Sight, str], str]


def normalized(answer: str) -> str:
    """Return an answer in small letters, without what makes no difference."""
    return re.sub(r"\s+", " ", answer).strip().rstrip(".").casefold()


def local(folder: Path) -> Answering:
    """Return a function that answers with transformers."""
    import torch  # noqa: PLC0415 - a server is asked without them
    from transformers import AutoTokenizer, Idefics3ForConditionalGeneration, Idefics3Processor  # noqa: PLC0415
    from transformers.models.idefics3.image_processing_pil_idefics3 import (  # noqa: PLC0415
        Idefics3ImageProcessorPil,
    )

    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(folder), tokenizer, _tokens(model),
        tokenizer.chat_template,
    )  # fmt: skip

    @torch.no_grad()
    def answer(sight: Sight, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=prompt, images=[sight.image], return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=_MOST_NEW)[0, inputs["input_ids"].shape[1] :]
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    return answer


def _tokens(model: Any) -> int:
    """Return the placeholder tokens of a picture."""
    vision = model.config.vision_config
    side: int = vision.image_size // vision.patch_size // model.config.scale_factor
    return side**2


def served(client: httpx.Client, name: str) -> Answering:
    """Return a function that asks a server."""

    def answer(sight: Sight, question: str) -> str:
        url = f"data:image/png;base64,{base64.b64encode(sight.png()).decode()}"
        content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": _MOST_NEW}
        reply = client.post("/chat/completions", json=body)
        reply.raise_for_status()
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    return answer


def evaluate(answering: Answering, drawn: list[Sight], wrong: int = 0) -> dict[str, Any]:
    """Ask all questions. Return the number of questions and the percentage of right answers by group."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for sight in drawn:
        for question in sight.questions:
            text = answering(sight, question.text)
            right[group_of(question)].append(normalized(text) == normalized(question.answer))
            if not right[group_of(question)][-1] and wrong > 0:
                wrong -= 1
                print(f"{question.text!r}\n  {question.answer!r}\n  {text!r}")
    return {
        group: {"questions": len(values), "percent": round(100 * sum(values) / len(values), 1)}
        for group, values in sorted(right.items())
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m training.see.evaluate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=EXPORT, help="a model's folder, which transformers runs")
    parser.add_argument("--url", help="a server's API, instead of the folder")
    parser.add_argument("--model", default=MODEL, help="its name at the server")
    parser.add_argument("--count", type=int, default=COUNT, help="pictures")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--json", type=Path, help="output file for the results")
    chosen = parser.parse_args(arguments)
    results = {}
    with httpx.Client(base_url=chosen.url or "", timeout=_TIMEOUT) as client:
        answering = served(client, chosen.model) if chosen.url else local(chosen.folder)
        for name, split, other_fonts in _PARTS:
            drawn = sights(chosen.count, chosen.seed, split=split, other_fonts=other_fonts)
            results[name] = evaluate(answering, drawn, chosen.wrong)
            print(name, json.dumps(results[name], indent=1), flush=True)
    if chosen.json:
        written = {"date": date.today().isoformat(), "seed": chosen.seed, "results": results}
        chosen.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
