"""Texts, and what the model sees of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from typed_service_plain.config import Config

TEXTS: Final[Mapping[str, Sequence[str]]] = {
    "English": (
        "The river was high after a week of rain, and the bridge stayed closed.",
        "She wrote three letters before breakfast and posted none of them.",
        "Nobody in the village knew who had painted the old church door.",
        "We should have taken the earlier train, which was still running then.",
        "There is a small shop on the corner that sells nothing but maps.",
        "He thought about the question for a while and then shook his head.",
    ),
    "French": (
        "La rivière était haute après une semaine de pluie, et le pont restait fermé.",
        "Elle a écrit trois lettres avant le petit déjeuner sans en envoyer aucune.",
        "Personne au village ne savait qui avait peint la vieille porte de l'église.",
        "Nous aurions dû prendre le train précédent, qui circulait encore.",
        "Il y a au coin de la rue une petite boutique qui ne vend que des cartes.",
        "Il réfléchit un moment à la question, puis il secoua la tête.",
    ),
    "German": (
        "Der Fluss war nach einer Woche Regen hoch, und die Brücke blieb gesperrt.",
        "Sie schrieb vor dem Frühstück drei Briefe und schickte keinen davon ab.",
        "Niemand im Dorf wusste, wer die alte Kirchentür gestrichen hatte.",
        "Wir hätten den früheren Zug nehmen sollen, der damals noch fuhr.",
        "An der Ecke gibt es einen kleinen Laden, der nur Landkarten verkauft.",
        "Er dachte eine Weile über die Frage nach und schüttelte dann den Kopf.",
    ),
}


def triples(texts: Sequence[str], config: Config) -> Tensor:
    """Put each text's character triples into buckets.

    Returns:
        int64 of shape (texts, ``config.longest``), 0 where a text is shorter.
    """
    rows = []
    for text in texts:
        padded = f" {text.lower()} "
        parts = [padded[start : start + 3] for start in range(len(padded) - 2)]
        row = [1 + zlib.crc32(part.encode()) % (config.buckets - 1) for part in parts]
        rows.append((row + [0] * config.longest)[: config.longest])
    return torch.tensor(rows)
