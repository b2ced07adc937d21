"""The registry of model families, and families of packages outside of Quire."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.config.options import EngineOptions, ModelOptions
from quire.engine.build.attention_checks import with_attention_backend
from quire.engine.build.core_config import CoreConfig
from quire.engine.models.config.checks import check_spec
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import UnknownArchitecture, UnsupportedModel
from quire.engine.models.families.llama import LLAMA, llama
from quire.engine.models.family import Family
from quire.engine.models.model_config import read_model_config
from quire.engine.models.registry import Conflict, Registry, registry, weight_names
from quire.engine.models.sharding.shard import check_divisible
from quire.engine.models.specs.decoder import DecoderSpec
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.outside_family import SeparateAttention, install, save_outside
from tests.support.triton_device import InterpretedDevice

_MODULE = "tests.support.outside_family"
Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs entry points for the duration of a test."""

    def put(**entries: str) -> None:
        folder = tmp_path / "site"
        install(folder, **entries)
        monkeypatch.syspath_prepend(str(folder))
        registry.cache_clear()

    yield put
    registry.cache_clear()


@pytest.mark.parametrize("name", ["outside", "separate"])
def test_a_family_from_outside_equals_hugging_face(name: str, installed: Install, tmp_path: Path) -> None:
    """The second one brings a layer of its own as well."""
    installed(**{name: f"{_MODULE}:{name.upper()}"})
    model = save_outside(tmp_path / "model", name)
    engine = Engine(tmp_path / "model", block_size=8)
    assert engine.info.implementation == "quire"
    prompt = random_prompt(1, 20)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)
    assert engine.generate(prompt, greedy(32)).tokens == expected[0, len(prompt) :].tolist()


def test_attention_from_outside_is_refused_by_name_where_it_cannot_be_run(installed: Install, tmp_path: Path) -> None:
    installed(separate=f"{_MODULE}:SEPARATE")
    save_outside(tmp_path, "separate")
    spec = read_model_config(tmp_path).spec
    assert isinstance(spec, DecoderSpec)
    with pytest.raises(UnsupportedModel, match="separate attention cannot be divided among 2 ranks"):
        check_divisible(spec, Placement(tensor_size=2))
    config = CoreConfig(
        folder=tmp_path,
        model_config=read_model_config(tmp_path),
        model=ModelOptions(),
        engine=EngineOptions(attention_backend="flashinfer", block_size=16),
    )
    with pytest.raises(UnsupportedModel, match="flashinfer does not support separate attention"):
        with_attention_backend(config, InterpretedDevice())
    layer = spec.layers[0]
    assert isinstance(layer.attn, SeparateAttention)
    with pytest.raises(UnsupportedModel, match="heads is 0, but must be above 0"):
        check_spec(replace(spec, layers=(replace(layer, attn=replace(layer.attn, heads=0)),)))


def test_a_server_reads_its_config_without_torch(installed: Install, tmp_path: Path) -> None:
    installed(outside=f"{_MODULE}:OUTSIDE")
    save_outside(tmp_path / "model")
    configs = ConfigReader()
    configs.start([tmp_path / "model"], ReadingOptions("quire", {}, PoolingOptions()))
    config = configs.next()
    assert isinstance(config.spec, DecoderSpec)
    assert config.spec.family == "outside"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:FAMILY", "No module named 'no_such_module'"),
        (f"{_MODULE}:MISSING", "has no attribute 'MISSING'"),
        (f"{_MODULE}:NOT_A_FAMILY", "must be a Family or a Composite"),
        (f"{_MODULE}:TAKES_LLAMA", "model type 'llama' belongs to the family 'llama'"),
        (f"{_MODULE}:CHANGES_LLAMA", "'llama', whose configs it changes"),
        (f"{_MODULE}:TAKES_NAME", "another family of the name 'llama'"),
    ],
)
def test_a_broken_family_is_logged_and_affects_no_other(
    value: str, reason: str, installed: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed(broken=value, outside=f"{_MODULE}:OUTSIDE")
    assert {"outside", "llama"} <= registry().types.keys()
    assert registry().types["llama"].spec is llama
    assert "my-llama" not in registry().types
    (record,) = caplog.records
    assert "broken" in record.getMessage()
    assert reason in record.getMessage()
    spec = read_model_config(save_model(make_model("llama"), tmp_path)).spec
    assert isinstance(spec, DecoderSpec)
    assert weight_names(spec, read_model_config(tmp_path).facts) is LLAMA
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my-llama"}))
    with pytest.raises(UnknownArchitecture, match=r"cannot be used: broken: "):
        read_model_config(tmp_path)


def test_two_families_cannot_claim_a_type() -> None:
    made = Registry()
    made.add([Family(name="first", config_types=("a", "b"), spec=llama, tensors=LLAMA)])
    with pytest.raises(Conflict, match="model type 'b' belongs to the family 'first'"):
        made.add([Family(name="second", config_types=("c", "b"), spec=llama, tensors=LLAMA)])
    assert made.types.keys() == {"a", "b"}


def _modules(code: str) -> set[str]:
    """The modules that Python has imported after it has run some code, without torch."""
    script = f"import sys; sys.modules['torch'] = None\n{code}\nprint('\\n' + ' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_families_are_imported_when_one_is_looked_up() -> None:
    """The help neither needs them nor torch; they do not need torch."""
    shown = _modules("from quire.app.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert "quire.app.cli" in shown
    assert not {name for name in shown if name.startswith("quire.engine.models.families")}
    lazy = _modules("import quire.engine.models.registry")
    assert "quire.engine.models.families.llama" not in lazy
    asked = _modules("from quire.engine.models.registry import family_of; assert family_of('llama')")
    assert "quire.engine.models.families.whisper" in asked
