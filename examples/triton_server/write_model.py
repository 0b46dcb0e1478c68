"""A model for Triton Inference Server: frozen, written, and tried as the server will run it.

    python examples/triton_server/write_model.py REPOSITORY

Start the server on what it writes, say with

    docker run --rm -p 8000:8000 -v $PWD/REPOSITORY:/models \\
        nvcr.io/nvidia/tritonserver:25.10-pyt-python-py3 tritonserver --model-repository=/models

and ask it over HTTP:

    curl localhost:8000/v2/models/classifier/infer -d '{"inputs": [{"name": "images",
        "shape": [1, 3, 32, 32], "datatype": "FP32", "data": [...]}]}'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import amp_script
from amp_script.triton import write_repository


class Classifier(nn.Module):
    """A small convolutional network that returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Classify images.

        Args:
            images: float32, shape (batch, 3, height, width).

        Returns:
            ``scores``, shape (batch, 10), and ``best``, the place of the highest, shape (batch,).
        """
        scores = self.head(self.features(images).flatten(1))
        return {"scores": scores.softmax(-1), "best": scores.argmax(-1)}


def main() -> None:
    """Write the repository and run the model in it."""
    parser = argparse.ArgumentParser(description="Write a model for Triton Inference Server.")
    parser.add_argument("repository", type=Path, help="the folder of models")
    repository = parser.parse_args().repository

    torch.manual_seed(0)
    model = Classifier().eval()
    frozen = amp_script.trace_and_freeze(
        model,
        torch.randn(2, 3, 32, 32),
        dtype=torch.bfloat16,
        # Triton's PyTorch backend has no bfloat16 at the border.
        output_dtype=torch.float32,
        # What varies here may vary on the server.
        check_inputs=[torch.randn(3, 3, 48, 40)],
    )
    inputs, outputs = write_repository(frozen, repository, "classifier", max_batch_size=32)
    for port in (*inputs, *outputs):
        print(f"{port.name}: {port.dtype}, sizes {port.sizes}")

    served = torch.jit.load(repository / "classifier" / "1" / "model.pt")
    images = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        scores, best = served(images)
        expected = frozen(images)
    equal = torch.equal(scores, expected["scores"]) and torch.equal(best, expected["best"])
    print(f"what the server runs {'is' if equal else 'is not'} the frozen model to the bit")
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
