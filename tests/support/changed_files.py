"""Random changes of files, of JSON and of tensors, for tests that read what nobody has written."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

from tests.support.mutations import ODD_VALUES, Place

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool)


def changed_bytes(data: bytes, source: random.Random, header: int = 700) -> bytes:
    """A file with one to four changes, mostly in what comes before the tensors. `header`: bytes of that, roughly."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(source.choice((24, header, len(changed) or 1))) % max(1, len(changed))
        match source.randrange(6):
            case 0:
                changed[at : at + 1] = source.randbytes(1)
            case 1:
                width = source.choice((1, 2, 4, 8))
                changed[at : at + width] = source.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * width
            case 2:
                size = source.choice((1, 4, 8, 40))
                del changed[at : at + size]
            case 3:
                size = source.choice((1, 4, 8, 40))
                changed[at:at] = changed[at : at + size]
            case 4:
                other = source.randrange(len(changed) or 1)
                changed[at : at + 8] = changed[other : other + 8]
            case _:
                del changed[len(changed) - source.randrange(64) :]
    return bytes(changed)


def changed_tree(tree: Any, source: random.Random) -> Any:
    """JSON with one or two values that are odd, or missing."""
    changed = copy.deepcopy(tree)
    for _ in range(source.randint(1, 2)):
        places = [*_places(changed)]
        if not places:
            return changed
        node, key = source.choice(places)
        if source.randrange(4):
            node[key] = copy.deepcopy(source.choice(_PLAIN))
        else:
            del node[key]
    return changed


_PLAIN = [value for value in ODD_VALUES if isinstance(value, None | bool | int | float | str | list | dict)]


def _places(node: Any) -> list[Place]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, child in children for place in ((node, key), *_places(child))]


def changed_tensors(tensors: dict[str, Tensor], source: random.Random) -> dict[str, Tensor]:
    """Tensors of which one or two have another shape, type or content, or another name, or are missing."""
    changed = dict(tensors)
    for _ in range(source.randint(1, 2)):
        if not changed:
            break
        name = source.choice(sorted(changed))
        tensor = changed[name]
        match source.randrange(7):
            case 0:
                del changed[name]
            case 1:
                changed[source.choice(sorted(tensors))] = tensor
            case 2:
                changed[name] = tensor.reshape(-1)[: source.randrange(tensor.numel() + 1)].clone()
            case 3:
                changed[name] = tensor.reshape(source.choice(((-1,), (1, -1), (-1, 1), (1, -1, 1)))).clone()
            case 4:
                changed[name] = tensor.to(source.choice(_DTYPES))
            case 5:
                raw = torch.frombuffer(bytearray(source.randbytes(tensor.nbytes) or b"\0"), dtype=torch.uint8)
                changed[name] = raw[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) if tensor.nbytes else tensor
            case _:
                changed[name] = tensor.transpose(0, -1).contiguous() if tensor.dim() else tensor[None]
    return changed
