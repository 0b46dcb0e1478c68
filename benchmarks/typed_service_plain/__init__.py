"""The service of ``examples/typed_service`` on plain torch, to count what a type checker loses.

Same names and steps, written as in the documentation of torch, with every annotation that can be
given. Settings and texts, which have nothing to lose, are the example's.
"""
