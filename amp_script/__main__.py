"""``python -m amp_script``: the command, for the Python that runs it."""

from amp_script.cli import main

if __name__ == "__main__":
    main()
