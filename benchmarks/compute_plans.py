"""Time one forward of BERT and ResNet-18 by every plan, beside float32 and the published recipe.

    python benchmarks/compute_plans.py
    python benchmarks/compute_plans.py --imitate-avx2

The second imitates a processor without reduced-precision kernels, by limiting oneDNN and PyTorch's
own kernels to AVX2. All ways run in one process, one call of each in turn, and the least time of
each counts, so that a busy machine disturbs all of them alike. With ``--cpu-time`` the time that
the process computed counts instead of the time that passed; it is for one thread.

Prints milliseconds, the ratio to frozen float32, and the relative distance to float32.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def main() -> None:
    """Read the command line and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--imitate-avx2", action="store_true", help="limit the kernels to AVX2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own time")
    options = parser.parse_args()
    if options.imitate_avx2 and not LIMITS.items() <= os.environ.items():
        # The libraries read their limits once, when they are loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **LIMITS})
    warnings.simplefilter("ignore")
    clock = time.process_time if options.cpu_time else time.perf_counter
    for name in options.models:
        compare(name, options.threads, options.repeats, clock)


def compare(name: str, threads: int, repeats: int, clock: Callable[[], float]) -> None:
    """Print one model's table."""
    import torch

    from amp_script.compute import describe
    from amp_script.timing import interleaved

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with torch.no_grad(), TemporaryDirectory() as folder:
        reference = model(*inputs)
        ways = ways_of(model, inputs, Path(folder) / "model.pt")
        distances = [distance(way(*inputs), reference) for way in ways.values()]
        runs = {name: lambda way=way: way(*inputs) for name, way in ways.items()}
        taken = interleaved(runs, repeats=repeats, clock=clock)
        times = [each.least for each in taken.values()]
    print(f"\n{name}, {threads} threads, torch {torch.__version__}")
    print(describe())
    print(f"{'':34}{'ms':>9}{'ratio':>8}{'distance':>10}")
    for way, taken, far in zip(ways, times, distances, strict=True):
        print(f"{way:34}{taken * 1e3:9.2f}{taken / times[0]:8.2f}{far:10.5f}")


def ways_of(model: Any, inputs: tuple[Any, ...], file: Path) -> dict[str, Callable[..., Any]]:
    """The programs to compare, frozen float32 first."""
    import torch

    import amp_script

    def freeze(model: Any, inputs: Any, enabled: bool = False) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            return torch.jit.freeze(torch.jit.trace(model, inputs, check_trace=False))

    def cast(tensors: Any) -> tuple[Any, ...]:
        return tuple(x.bfloat16() if x.is_floating_point() else x for x in tensors)

    frozen = amp_script.trace_and_freeze(model, inputs, compute="native", verify=False)
    amp_script.save(frozen, file)
    by_hand = freeze(copy.deepcopy(model).bfloat16(), cast(inputs))
    plans = {
        f"amp_script, compute={plan!r}": amp_script.load(file, compute=plan)
        for plan in ("native", "upcast", "packed", "auto")
    }
    return {
        "frozen float32": freeze(model, inputs),
        "published recipe, bfloat16": freeze(model, inputs, enabled=True),
        "cast by hand, frozen": lambda *given: by_hand(*cast(given)),
        **plans,
    }


def distance(given: Any, expected: Any) -> float:
    """Relative distance: the norm of the difference over the norm."""
    return float((given.double() - expected.double()).norm() / expected.double().norm())


def bert() -> tuple[Any, tuple[Any, ...]]:
    """BERT with 4 layers, 128 tokens."""
    import torch
    import transformers

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)[0]

    return Encoder().eval(), (torch.randint(0, 30_000, (1, 128)),)


def resnet() -> tuple[Any, tuple[Any, ...]]:
    """ResNet-18 on one image of 224 by 224."""
    import torch
    import transformers

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.ResNetConfig(
                hidden_sizes=[64, 128, 256, 512],
                depths=[2, 2, 2, 2],
                layer_type="basic",
                num_labels=1000,
            )
            self.model = transformers.ResNetForImageClassification(config)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.model(image)[0]

    return Classifier().eval(), (torch.randn(1, 3, 224, 224),)


MODELS = {"bert": bert, "resnet": resnet}

if __name__ == "__main__":
    main()
