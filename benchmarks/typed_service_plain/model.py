"""The model: embeddings of character triples, averaged, and two layers."""

from __future__ import annotations

from torch import Tensor, autocast, nn
from torch.nn import functional
from typed_service.config import Config

from typed_service_plain.rounding import round_through, sixteenths


class Classifier(nn.Module):
    """Scores languages, with the matrix products in reduced precision."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dtype = config.dtype
        self.embedding = nn.Embedding(config.buckets, config.width, padding_idx=0)
        self.hidden = nn.Linear(config.width, config.width)
        self.scores = nn.Linear(config.width, len(config.languages))

    def forward(self, triples: Tensor) -> Tensor:
        """Score texts.

        Args:
            triples: bucket of each character triple, 0 for none, int64 of shape (texts, triples).

        Returns:
            Logarithms of probabilities, float32 of shape (texts, languages).
        """
        mean = self.average(triples)
        with autocast("cpu", dtype=self.dtype) as region:
            hidden: Tensor = self.hidden(mean)
            active = functional.relu(hidden)
            # A file holds no Python, which a custom function is.
            rounded = round_through(active) if self.training else sixteenths(active)
            scores: Tensor = self.scores(rounded)
        with autocast(region.device, enabled=False):
            return functional.log_softmax(scores.float(), dim=-1)

    @autocast("cpu", enabled=False)
    def average(self, triples: Tensor) -> Tensor:
        """Average the embeddings of each text, in float32, of shape (texts, width)."""
        vectors: Tensor = self.embedding(triples)
        counts = triples.ne(0).sum(dim=1, keepdim=True).clamp(min=1)
        return vectors.sum(dim=1) / counts
