"""How far a model under autocast is from float32, layer by layer, and what to keep in float32.

:mod:`~amp_script.accuracy.comparison` is the whole way. The steps have a file each: what a
difference is (``difference``), the two runs and the calls in them (``runs``), which block to keep
in float32, tried out (``advice``), and what is reported (``report``).
"""

from amp_script.accuracy.comparison import compare_layers
from amp_script.accuracy.difference import Difference
from amp_script.accuracy.report import Advice, LayerCall, LayerReport

__all__ = ["Advice", "Difference", "LayerCall", "LayerReport", "compare_layers"]
