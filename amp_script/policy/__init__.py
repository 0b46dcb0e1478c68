"""What autocast does to an operator on a device: the tables, and the observer that proves them.

>>> from amp_script import policy
>>> policy.lookup("cpu", "aten::mm")
<Policy.LOWER: 'lower'>
>>> policy.lookup("cpu", "aten::relu") is None
True
>>> policy.find("cuda", "aten::norm", "Scalar").overload
'ScalarOpt_dtype'
"""

from .dispatcher import (
    autocast_device_types,
    has_autocast,
    is_listed,
    listed_operators,
    overload_names,
    without_autocast,
)
from .kinds import Policy, Rule, optional_dtype_arguments
from .registry import Registration, find, lookup, register
from .tables import eligible_device_types

__all__ = [
    "Policy",
    "Registration",
    "Rule",
    "autocast_device_types",
    "eligible_device_types",
    "find",
    "has_autocast",
    "is_listed",
    "listed_operators",
    "lookup",
    "optional_dtype_arguments",
    "overload_names",
    "register",
    "without_autocast",
]
