"""Each rank loads its part of the weights, and reads no more than that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.options import ModelOptions
from quire.engine.execution.devices.host import ReferenceDevice
from quire.engine.models.checkpoint.checkpoint import SafetensorsCheckpoint
from quire.engine.models.checkpoint.formats.fp8 import Fp8Weight
from quire.engine.models.checkpoint.formats.mxfp4 import Mxfp4Weight
from quire.engine.models.checkpoint.weights import allocate
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnsupportedModel, WeightMismatch
from quire.engine.models.loader import load_model
from quire.engine.models.model_config import read_model_config
from quire.engine.models.registry import weight_names
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.sharding.weight_shards import WeightShards
from quire.engine.models.sharding.weights import ShardedWeightFiller
from quire.engine.models.specs.decoder import DecoderSpec
from tests.support.engine import no_progress
from tests.support.models import make_model, save_model


def fill(folder: Path, placement: Placement) -> tuple[ShardedDecoder, ShardedWeightFiller]:
    """Fill a rank's part of a folder's model; its weights are not packed."""
    config = read_model_config(folder)
    assert isinstance(config.spec, DecoderSpec)
    with torch.device("meta"):
        model = ShardedDecoder(config.spec, RankGroups.of(placement), torch.float32)
    allocate(model, torch.float32, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # what is not filled is noticed
    names = weight_names(config.spec, config.facts)
    filler = ShardedWeightFiller(model, names, WeightShards(model), tied=config.spec.tied)
    with ReferenceDevice().activate(), SafetensorsCheckpoint(folder) as checkpoint:
        filler.fill(names.prepare(checkpoint.tensors(torch.float32, lambda _: None, filler)))
    return model, filler


def parameters(folder: Path, placement: Placement) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in fill(folder, placement)[0].named_parameters()}


@pytest.mark.parametrize(
    ("case", "expert_parallel"),
    [
        ("llama", False),
        *((case, divided) for case in ("qwen3_moe", "gpt_oss", "deepseek_v3") for divided in (False, True)),
    ],
)
def test_a_rank_reads_its_share_of_the_bytes(tmp_path: Path, case: str, expert_parallel: bool) -> None:
    folder = save_model(make_model(case), tmp_path)
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    read = [fill(folder, Placement(rank, 2, 1, expert_parallel))[1].bytes_read for rank in range(2)]
    assert sum(read) >= total
    for nbytes in read:
        assert nbytes < 0.56 * total  # norms, routers and latent projections are on both


@pytest.mark.parametrize("case", ["lfm2", "granitemoehybrid-dense", "mamba2"])
def test_a_rank_has_its_share_of_recurrent_layers(tmp_path: Path, case: str) -> None:
    """Of each kind of channels that a convolution reads, too."""
    folder = save_model(make_model(case, num_hidden_layers=2), tmp_path)
    whole = parameters(folder, Placement(0, 1))
    ranks = [parameters(folder, Placement(rank, 2)) for rank in range(2)]
    total = sum(tensor.numel() for tensor in whole.values())
    assert all(sum(tensor.numel() for tensor in rank.values()) < 0.56 * total for rank in ranks)
    conv = next(name for name in whole if name.endswith("conv.weight"))
    columns = torch.cat([rank[conv] for rank in ranks], 1).t().tolist()
    assert sorted(columns) == sorted(whole[conv].t().tolist())
    assert not any(tensor.isnan().any() for rank in ranks for tensor in rank.values())


def test_a_stage_reads_its_layers(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    read = [fill(folder, Placement(rank, 1, 2))[1].bytes_read for rank in range(2)]
    assert sum(read) == total
    assert max(read) < 0.51 * total


def test_parts_make_the_whole(tmp_path: Path) -> None:
    """Rows of queries, gates and the vocabulary, columns of the second projections."""
    model = make_model("llama-biased-tied", vocab_size=301)
    folder = save_model(model, tmp_path)
    first, second = (parameters(folder, Placement(rank, 2)) for rank in range(2))
    layer = model.model.layers[3]
    for name, whole in (("k", layer.self_attn.k_proj), ("v", layer.self_attn.v_proj)):
        begin = 32 if name == "k" else 48  # behind a rank's rows of queries, and of keys
        for kind in ("weight", "bias"):
            rows = [part[f"layers.3.attn.qkv.{kind}"][begin : begin + 16] for part in (first, second)]
            assert torch.equal(torch.cat(rows), getattr(whole, kind))
    columns = torch.cat([part["layers.3.ffn.down.weight"] for part in (first, second)], 1)
    assert torch.equal(columns, layer.mlp.down_proj.weight)
    assert torch.equal(first["layers.3.ffn.down.bias"], layer.mlp.down_proj.bias)
    assert not second["layers.3.ffn.down.bias"].any()
    table = torch.cat([part["embed.weight"] for part in (first, second)])
    assert torch.equal(table[:301], model.model.embed_tokens.weight)
    assert not table[301:].any()


def test_the_last_stage_has_a_tied_head_of_its_own(tmp_path: Path) -> None:
    model = make_model("llama-biased-tied")
    folder = save_model(model, tmp_path)
    first, last = (parameters(folder, Placement(rank, 1, 2)) for rank in range(2))
    assert torch.equal(first["embed.weight"], model.model.embed_tokens.weight)
    assert torch.equal(last["head.weight"], model.model.embed_tokens.weight)
    assert "head.weight" not in first
    assert "embed.weight" not in last
    assert torch.equal(last["layers.0.attn_norm.weight"], model.model.layers[2].input_layernorm.weight)


def test_each_stage_has_the_blocks_of_its_layers(tmp_path: Path) -> None:
    """The block of layers 1 and 4 is in both stages, that of layer 3 in the last one."""
    folder = save_model(make_model("zamba2"), tmp_path)
    whole = parameters(folder, Placement(0, 1))
    first, last = (parameters(folder, Placement(rank, 1, 2)) for rank in range(2))
    for part in ("attention.out.weight", "attention.qkv.base.weight", "ffn.gate_up.base.weight", "attn_norm.weight"):
        common, other = (whole[f"layers.{layer}.attn.{part}"] for layer in (1, 3))
        assert torch.equal(first[f"layers.1.attn.{part}"], common)
        assert torch.equal(last[f"layers.1.attn.{part}"], other)
        assert torch.equal(last[f"layers.2.attn.{part}"], common)
    assert torch.equal(last["layers.2.attn.linear.weight"], whole["layers.4.attn.linear.weight"])
    assert not any(tensor.isnan().any() for part in (first, last) for tensor in part.values())


def test_a_weight_of_the_wrong_shape_is_named_with_the_shape_of_the_whole(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({**weights, name: weights[name][:, :60].clone()}, folder / "model.safetensors")
    with pytest.raises(WeightMismatch, match=rf"{name} has shape \(64, 60\), but the model's is \(64, 64\)"):
        fill(folder, Placement(1, 2))
    halves = {name: tensor[: len(tensor) // 2].clone() for name, tensor in weights.items()}
    save_file(halves, folder / "model.safetensors")  # as large as a rank's part, but not a part
    with pytest.raises(WeightMismatch, match="has shape"):
        fill(folder, Placement(1, 2))
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(WeightMismatch, match="missing"):
        fill(folder, Placement(1, 2))


@pytest.mark.parametrize("columns", [(0, 128), (32, 64), (40, 90), (31, 33)])
def test_a_part_of_mxfp4_is_what_the_whole_has_there(columns: tuple[int, int]) -> None:
    """Cuts may be anywhere: the groups around them are unpacked."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 132, (3, 10, 4), generator=generator).to(torch.uint8)
    window = (slice(1, 3), slice(*columns), slice(2, 8))
    part = Mxfp4Weight(blocks, scales).part(window).dequantize(torch.float32)
    assert torch.equal(part, Mxfp4Weight(blocks, scales).dequantize(torch.float32)[window])
    unused = blocks.clone()
    unused[0] = unused[:, :2] = unused[:, 8:] = 255
    assert torch.equal(part, Mxfp4Weight(unused, scales).part(window).dequantize(torch.float32))


@pytest.mark.parametrize("window", [(slice(100, 200), slice(None)), (slice(None), slice(75, 150))])
@pytest.mark.parametrize("scales", [(2, 3), (200, 1), (200,), (1,), ()])
def test_a_part_of_fp8_is_what_the_whole_has_there(window: tuple[slice, slice], scales: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(scales, generator=generator) + 0.5
    part = Fp8Weight(weight, factors).part(window).dequantize(torch.float32)
    assert torch.equal(part, Fp8Weight(weight, factors).dequantize(torch.float32)[window])


@pytest.mark.parametrize("case", ["diffllama"])
def test_models_that_ranks_cannot_share_are_refused(tmp_path: Path, case: str) -> None:
    folder = save_model(make_model(case), tmp_path)
    config = read_model_config(folder)
    groups = RankGroups.of(Placement(0, 2))
    with pytest.raises(UnsupportedModel, match="--tensor-parallel-size"):
        load_model(folder, config, ModelOptions(), ReferenceDevice(), no_progress, groups)
