"""A 4- or 8-bit base is quantized a layer at a time as it is read, with the numbers of one that is loaded whole."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from tiny_models import saved, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config.weights import LoraConfig
from rlhf.errors import ModelError
from rlhf.models.backbone import add_lora, freeze, load_causal_lm
from rlhf.models.kernels.quantized import QuantizedLinear
from rlhf.models.stored import store_weights
from rlhf.models.weight_files import WeightFiles

KINDS = ("int8", "nf4")
FAMILIES = ("llama", "gemma3_text", "qwen3")


@pytest.fixture(autouse=True)
def _needs_bitsandbytes(request: pytest.FixtureRequest) -> None:
    if "nf4" in request.node.name:
        pytest.importorskip("bitsandbytes")


def folder_of(family: str, folder: Path) -> str:
    """The folder of a small model in bfloat16, as models are published."""
    return saved(tiny(family, dtype=torch.float32).to(torch.bfloat16), folder)


def loaded_whole(path: str, kind: str) -> PreTrainedModel:
    return store_weights(freeze(load_causal_lm(path, kept="bfloat16")), kind)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_numbers_of_a_model_that_is_loaded_whole(kind: str, family: str, tmp_path: Path) -> None:
    path = folder_of(family, tmp_path)
    layered = store_weights(freeze(load_causal_lm(path, kept=kind)), kind)
    whole = loaded_whole(path, kind)
    expected, numbers = whole.state_dict(), layered.state_dict()
    assert list(numbers) == list(expected)
    assert all(torch.equal(numbers[name], tensor) for name, tensor in expected.items())
    assert all(numbers[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert dict(layered.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        assert torch.equal(layered(ids).logits, whole(ids).logits)
    tied = (layered.get_input_embeddings().weight, layered.get_output_embeddings().weight)
    assert (tied[0] is tied[1]) == bool(whole.config.get_text_config().tie_word_embeddings)


@pytest.mark.parametrize("kind", ["bfloat16", *KINDS])
def test_the_scale_of_embeddings_is_not_rounded_with_the_files(kind: str, tmp_path: Path) -> None:
    """A Gemma 3 multiplies its embeddings by √d, which transformers keeps in the dtype that it loads the model in."""
    path = saved(tiny("gemma3_text", dtype=torch.float32, hidden_size=24).to(torch.bfloat16), tmp_path)
    root = freeze(load_causal_lm(path)).get_input_embeddings().embed_scale
    assert root != root.bfloat16()
    kept = store_weights(freeze(load_causal_lm(path, kept=kind)), kind).get_input_embeddings().embed_scale
    assert (kept.dtype, kept.item()) == (torch.float32, root.item())


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_at_a_time_is_there_unquantized(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of("llama", tmp_path)
    models: WeakSet[nn.Module] = WeakSet()
    whole: list[int] = []
    read, make = WeightFiles.read, nn.Module.__init__

    def remember(module: nn.Module, *args: object, **kwargs: object) -> None:
        make(module, *args, **kwargs)  # type: ignore[arg-type]
        models.add(module)

    def counted(files: WeightFiles, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        linear = [module for module in models if type(module) is nn.Linear and "weight" in module._parameters]
        whole.append(sum(module.weight.device.type != "meta" for module in linear))
        return read(files, name, start, stop)

    monkeypatch.setattr(nn.Module, "__init__", remember)
    monkeypatch.setattr(WeightFiles, "read", counted)
    model = load_causal_lm(path, kept=kind)
    layers = sum(name.endswith("_proj") for name, _ in model.named_modules())
    assert len(whole) > layers > 10
    assert max(whole) <= 1


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = folder_of("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelError, match="cut off"):
        load_causal_lm(path, kept="int8")


@pytest.mark.parametrize(("dora", "reads"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_added_without_the_numbers_of_the_base(
    kind: str, dora: bool, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = store_weights(freeze(tiny(dtype=torch.float32)), kind)
    read: list[QuantizedLinear] = []
    dense = QuantizedLinear.dense

    def counted(layer: QuantizedLinear, dtype: torch.dtype = torch.float32) -> Tensor:
        read.append(layer)
        return dense(layer, dtype)

    monkeypatch.setattr(QuantizedLinear, "dense", counted)
    adapted = add_lora(base, LoraConfig(r=2, dora=dora))
    assert bool(read) is reads
    layer = next(module for module in adapted.modules() if isinstance(module, QuantizedLinear))
    assert layer.weight.abs().sum() > 0  # afterwards its numbers again
    shapes = [tuple(p.shape) for name, p in adapted.named_parameters() if "q_proj.lora_A" in name]
    assert set(shapes) == {(2, layer.in_features)}
