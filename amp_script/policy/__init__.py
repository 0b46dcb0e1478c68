"""What autocast does to an operator on a device: the tables, and the observer that proves them.

>>> from amp_script import policy
>>> policy.lookup("cpu", "aten::mm")
<Policy.LOWER: 'lower'>
>>> policy.lookup("cpu", "aten::relu") is None
True
>>> policy.find("cuda", "aten::norm", "Scalar").overload
'ScalarOpt_dtype'
"""

from .dispatcher import autocast_device_types, is_listed, listed_operators
from .kinds import Policy, Rule, optional_dtype_arguments
from .registry import find, lookup
from .tables import eligible_device_types

__all__ = [
    "Policy",
    "Rule",
    "autocast_device_types",
    "eligible_device_types",
    "find",
    "is_listed",
    "listed_operators",
    "lookup",
    "optional_dtype_arguments",
]
