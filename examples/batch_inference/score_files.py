"""Score many files with one frozen model, on as many processes or machines as Ray has.

    python examples/batch_inference/score_files.py MODEL.pt INPUT_FOLDER OUTPUT_FOLDER

Each input is a ``.npy`` file with one batch of rows after the other, and becomes a ``.npy`` file of
the rows' scores. An actor loads the artifact once and keeps it. Files are taken in the same batches
wherever they run, so that the scores are those of a single process to the bit; a file that has been
scored already is left alone, so that a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch

import amp_script


class Scorer:
    """One process's copy of the model."""

    def __init__(self, artifact: str, output: str, batch_size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        # The plan is chosen here, for the processor that this process runs on.
        self.model = amp_script.load(artifact)
        self.output = Path(output)
        self.batch_size = batch_size

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Score one file, and tell how many rows it has."""
        file = Path(row["file"])
        scores = self.score(np.load(file))
        done = self.output / file.name
        # The name appears when the file is whole.
        unfinished = done.with_name(f".{done.name}.{os.getpid()}.npy")
        np.save(unfinished, scores)
        unfinished.replace(done)
        return {"file": row["file"], "rows": len(scores)}

    def score(self, rows: np.ndarray) -> np.ndarray:
        """Return the scores of rows, in float32."""
        with torch.no_grad():
            batches = torch.from_numpy(rows).split(self.batch_size)
            return torch.cat([self.model(batch).float() for batch in batches]).numpy()


def main() -> None:
    """Read the command line, and score what has not been scored."""
    parser = argparse.ArgumentParser(description="Score .npy files with a frozen model.")
    parser.add_argument("artifact", type=Path, help="what amp-script freeze wrote")
    parser.add_argument("inputs", type=Path, help="a folder of .npy files")
    parser.add_argument("outputs", type=Path, help="a folder for the scores")
    parser.add_argument("--actors", type=int, default=2, help="processes with a model each")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--batch-size", type=int, default=64, help="rows that are scored at once")
    parser.add_argument("--address", help="a Ray cluster; this machine alone if not given")
    options = parser.parse_args()

    options.outputs.mkdir(exist_ok=True)
    waiting = [
        file
        for file in sorted(options.inputs.glob("*.npy"))
        if not (options.outputs / file.name).exists()
    ]
    print(f"{len(waiting)} files to score")
    if waiting:
        rows = score(waiting, options)
        print(f"{rows} rows scored by {options.actors} processes of {options.threads} threads")


def score(files: list[Path], options: argparse.Namespace) -> int:
    """Score files on Ray Data, and return how many rows they have."""
    start(options)
    try:
        done = ray.data.from_items([{"file": str(file.resolve())} for file in files]).map(
            Scorer,
            fn_constructor_args=(
                str(options.artifact.resolve()),
                str(options.outputs.resolve()),
                options.batch_size,
                options.threads,
            ),
            compute=ray.data.ActorPoolStrategy(size=options.actors),
            num_cpus=options.threads,
        )
        return sum(row["rows"] for row in done.iter_rows())
    finally:
        ray.shutdown()


def start(options: argparse.Namespace) -> None:
    """Join a cluster, or start one on this machine that leaves when this program does."""
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(
            num_cpus=options.actors * options.threads,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=100 * 2**20,
        )
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False


if __name__ == "__main__":
    main()
