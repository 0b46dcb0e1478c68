"""Runs the frozen sentence encoder and compares it with the same model run in other ways.

Usage: ``python compare.py FILE``, FILE being what ``amp-script freeze`` wrote.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from encoder import SENTENCES, sentence_encoder, tokenize
from torch import nn

from amp_script.timing import interleaved

QUERIES = ("What can I cook tonight?", "News from outer space", "animals at home")
ROUNDS = 25


def main(file: Path) -> None:
    """Print what a newcomer wants to know about ``file``."""
    # transformers asks for sizes while it is traced; show_closeness tries many others.
    warnings.simplefilter("ignore", torch.jit.TracerWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # Newer releases of torch remind whoever runs TorchScript that it is deprecated.
    warnings.filterwarnings("ignore", r"`torch\.jit", FutureWarning)
    model = sentence_encoder()
    frozen = torch.jit.load(file)
    batch = tokenize(SENTENCES)
    with torch.no_grad():
        show_size(file, model)
        show_ranking(frozen)
        show_closeness(frozen, model)
        show_speed(frozen, model, batch)


def show_size(file: Path, model: nn.Module) -> None:
    """Compare the size on disk with the float32 model's, frozen and saved the same way."""
    float32_file = file.with_name("minilm-float32.pt")
    trace(model, tokenize(SENTENCES)).save(float32_file)
    size, float32_size = (path.stat().st_size / 2**20 for path in (file, float32_file))
    float32_file.unlink()
    print(f"\nSize: {size:.1f} MiB, against {float32_size:.1f} MiB in float32")
    print("  (the table of word vectors stays float32, because eager autocast does not cast it)")


def show_ranking(frozen: nn.Module) -> None:
    """Rank the sentences by their similarity to some queries."""
    print(f"\nSearch among {len(SENTENCES)} sentences, the most similar first:")
    vectors = frozen(**tokenize(SENTENCES))
    for query in QUERIES:
        similarity = vectors @ frozen(**tokenize([query]))[0]
        print(f"  {query}")
        for index in similarity.argsort(descending=True)[:3].tolist():
            print(f"    {similarity[index]:5.2f}  {SENTENCES[index]}")


def show_closeness(frozen: nn.Module, model: nn.Module) -> None:
    """Compare the vectors with float32's and with eager autocast's, at many lengths."""
    batches = [tokenize(SENTENCES), *(tokenize([text]) for text in (*SENTENCES, *QUERIES))]
    lengths = sorted({batch["input_ids"].shape[1] for batch in batches})
    cosines = []
    equal = 0
    for batch in batches:
        vectors = frozen(**batch)
        cosines.append(nn.functional.cosine_similarity(vectors, model(**batch)))
        equal += torch.equal(vectors, autocast(model, batch))
    print(f"\nCloseness over {len(batches)} batches of {lengths[0]} to {lengths[-1]} tokens:")
    print(f"  cosine similarity to float32: {torch.cat(cosines).min():.5f} or more")
    print(f"  equal to eager autocast to the bit: {equal} of {len(batches)}")


def show_speed(frozen: nn.Module, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Time every way of running the model in turn, so that all meet the same disturbances."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        recipe = trace(model, batch)
    times = interleaved(
        {
            "eager float32": lambda: model(**batch),
            "eager autocast": lambda: autocast(model, batch),
            "published recipe": lambda: recipe(**batch),
            "this file": lambda: frozen(**batch),
        },
        repeats=ROUNDS,
    )
    sentences, tokens = batch["input_ids"].shape
    print(
        f"\nTime for {sentences} sentences of {tokens} tokens, {torch.get_num_threads()} threads:"
    )
    print("  milliseconds        median   middle half of the runs")
    for name, taken in times.items():
        low, median, high = (1000 * t for t in (taken.middle[0], taken.median, taken.middle[1]))
        print(f"  {name:<16} {median:9.1f}   {low:.1f} to {high:.1f}")
    print("  (published recipe: torch.jit.trace under torch.autocast, then torch.jit.freeze)")


def autocast(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the model eagerly under torch's own autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def trace(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    """Trace and freeze with torch alone."""
    return torch.jit.freeze(torch.jit.trace(model, example_kwarg_inputs=batch))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
