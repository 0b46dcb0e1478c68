"""The demo runs from a real model to its last line, on the texts that it ships."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo"


def test_freezes_searches_and_compares(tmp_path: Path) -> None:
    encoder, file = DEMO / "encoder.py", tmp_path / "minilm.pt"
    command = [sys.executable, "-c", "from amp_script.cli import main; main()", "freeze"]
    command += [f"{encoder}:sentence_encoder", "--inputs", f"{encoder}:example_inputs"]
    command += ["--check-inputs", f"{encoder}:other_inputs", "-o", str(file)]
    frozen = subprocess.run(command, capture_output=True, text=True)
    assert frozen.returncode == 0, frozen.stderr
    assert not frozen.stderr
    assert "input input_ids       int64 ?x?" in frozen.stdout
    assert "equal to eager autocast to the bit" in frozen.stdout

    compared = subprocess.run(
        [sys.executable, DEMO / "compare.py", file], capture_output=True, text=True
    )
    assert compared.returncode == 0, compared.stderr
    assert not compared.stderr
    shown = compared.stdout
    assert "cosine similarity to float32: 0.999" in shown
    assert "equal to eager autocast to the bit: 12 of 12" in shown
    ranked = shown[shown.index("What can I cook tonight?") :].splitlines()
    assert "tomatoes" in ranked[1]
    assert "dough" in ranked[2]
    assert shown.index("eager float32") < shown.index("published recipe") < shown.index("this file")
    assert {path.name for path in tmp_path.iterdir()} == {"minilm.pt"}
