"""Train, freeze, load, answer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from typed_service.config import Config

from typed_service_plain.freezing import write
from typed_service_plain.serving import Service
from typed_service_plain.training import train

QUESTIONS = (
    "Where does this road lead?",
    "Où mène cette route ?",
    "Wohin führt diese Straße?",
)


def main() -> None:
    """Run the service once on a few questions."""
    config = Config()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "classifier.pt")
        write(train(config), config, path)
        answers = Service(path, config).answer(QUESTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{answer.language:8} {answer.probability:4.0%}  {question}")


if __name__ == "__main__":
    main()
