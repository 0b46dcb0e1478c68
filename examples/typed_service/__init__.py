"""A small inference service whose types are checked from the model to the served file.

It tells the language of a text. ``python -m typed_service``, run in ``examples/``, trains the
model, freezes it, loads the file, and answers.
"""
