"""Serve a model on the CPU: freeze it once, load it in each process, answer from many threads.

python examples/cpu_inference.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import amp_script


class Tagger(nn.Module):
    """Word vectors, an encoder and a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.encoder = nn.GRU(64, 64, batch_first=True)
        self.tags = nn.Linear(64, 12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the tags' scores, shape (batch, words, 12), zero where there is no word."""
        hidden, _ = self.encoder(self.words(ids))
        return self.tags(hidden) * mask.unsqueeze(-1)


def request(words: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make up a request of one sentence."""
    ids = torch.randint(1000, (1, words), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones(1, words)


def main() -> None:
    """Freeze, load, answer, and compare with eager autocast."""
    torch.manual_seed(0)
    model = Tagger().eval()
    frozen = amp_script.trace_and_freeze(
        model, request(12, 0), dtype=torch.bfloat16, check_inputs=[request(7, 1), request(40, 2)]
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tagger.pt"
        amp_script.save(frozen, file)
        # The plan is chosen for the processor that loads, not for the one that froze.
        program = amp_script.load(file)
    print(f"loaded, with {program.compute} kernels")
    for spec in program.metadata.inputs:
        print(f"  {spec.name}: {spec.dtype}, sizes {spec.shape}")

    # Requests are answered side by side, so each of them computes on one thread.
    torch.set_num_threads(1)
    requests = [request(5 + seed % 20, seed) for seed in range(32)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tensors: program(*tensors), requests))

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = [model(*tensors) for tensors in requests]
    worst = max(float((a - b).abs().max()) for a, b in zip(answers, expected, strict=True))
    exact = sum(map(torch.equal, answers, expected))
    print(f"{exact} of {len(answers)} answers equal to eager autocast to the bit")
    print(f"largest difference {worst:.1e}, which is none where the kernels are native")
    raise SystemExit(program.compute == "native" and exact < len(answers))


if __name__ == "__main__":
    main()
