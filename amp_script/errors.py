"""Every error this library raises of its own, in one place.

All derive from :class:`AmpScriptError`, so that a caller can catch the library's refusals without
catching anything else. Errors that stand for a wrong argument also derive from the built-in type
that torch raises in the same place (``ValueError``, ``TypeError``, ``RuntimeError``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_script.verification import VerificationReport


class AmpScriptError(Exception):
    """Base of every error that is raised by this library alone."""


class UsageError(AmpScriptError):
    """A command line that cannot be understood; the command ends with exit code 2."""


class ArgumentError(AmpScriptError, TypeError, ValueError):
    """An argument of a type or value that a function does not take.

    Attributes:
        name: the argument's name.
        value: what was given, as text.
        expected: what the function takes.
        advice: what to do instead, or ``""``.
    """

    def __init__(self, name: str, value: str, expected: str, advice: str = "") -> None:
        self.name = name
        self.value = value
        self.expected = expected
        self.advice = advice
        super().__init__(
            f"{name} is {value}: expected {expected}" + (f". {advice}" if advice else "")
        )

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str, str, str]]:
        """Pickle by the parts, so that the error passes between processes."""
        return type(self), (self.name, self.value, self.expected, self.advice)


class LoweringError(AmpScriptError, RuntimeError):
    """A program that cannot be lowered to explicit casts without differing from eager autocast.

    Attributes:
        operator: qualified name of what could not be lowered, such as
            ``"aten::binary_cross_entropy"``.
        reason: why, in one sentence.
        source: the user's source line as ``file:line: text``, or ``""`` where TorchScript kept
            none.
        advice: what to do instead.
    """

    def __init__(self, operator: str, reason: str, *, source: str = "", advice: str = "") -> None:
        self.operator = operator
        self.reason = reason
        self.source = source
        self.advice = advice
        lines = [f"cannot lower {operator}: {reason}"]
        if source:
            lines.append(f"  at {source}")
        if advice:
            lines.append(f"  instead: {advice}")
        super().__init__("\n".join(lines))


class UnknownPolicyError(AmpScriptError, LookupError):
    """An operator that the installed torch autocasts on a device, in a way no table records.

    Attributes:
        operator: qualified name with overload, such as ``"aten::conv1d.padding"``.
        device_type: device type of the region, such as ``"cpu"``.
    """

    def __init__(self, operator: str, device_type: str) -> None:
        self.operator = operator
        self.device_type = device_type
        super().__init__(
            f"the installed torch autocasts {operator} on {device_type!r}, and amp-script does not "
            f"know how: say so with amp_script.policy.register({operator!r}, ...), after "
            "`amp-script doctor --policies` has shown what this torch does"
        )


class InputError(AmpScriptError, RuntimeError):
    """A call whose inputs are not those that a frozen program was made for; names each of them."""


class ArtifactError(AmpScriptError, RuntimeError):
    """A file that cannot be loaded or written.

    Attributes:
        path: the file.
        reason: what is wrong with it, in one sentence.
        advice: what to do instead, or ``""``.
    """

    def __init__(self, path: str, reason: str, advice: str = "") -> None:
        self.path = path
        self.reason = reason
        self.advice = advice
        super().__init__(f"{path}: {reason}" + (f". {advice}" if advice else ""))

    def __reduce__(self) -> tuple[type[ArtifactError], tuple[str, str, str]]:
        """Pickle by the parts, so that the error passes between processes."""
        return type(self), (self.path, self.reason, self.advice)


class MissingFileError(ArtifactError, FileNotFoundError):
    """A file that is not there."""


class PolicyError(AmpScriptError, ValueError):
    """A record of what autocast does to an operator that cannot be right.

    Attributes:
        operator: the operator as it was named.
        reason: what is wrong, in one sentence.
    """

    def __init__(self, operator: str, reason: str) -> None:
        self.operator = operator
        self.reason = reason
        super().__init__(f"cannot register a policy for {operator}: {reason}")


class StructureError(AmpScriptError, TypeError):
    """An input or output that is no structure of tensors.

    Attributes:
        path: the place of the part that cannot be taken, such as ``"output.cache"``.
        type: the part's type.
    """

    def __init__(self, path: str, type: type, reason: str = "") -> None:
        self.path = path
        self.type = type
        super().__init__(
            f"{path} is a {type.__module__}.{type.__qualname__}: "
            + (reason or "expected a tensor, None, a number or string, or a tuple, list, mapping ")
            + ("" if reason else "with string keys, named tuple or dataclass of them")
        )


class SubmoduleError(AmpScriptError, ValueError):
    """A pattern of submodules' names with which nothing can be done.

    Attributes:
        pattern: the pattern as it was given.
        reason: what is wrong with it, and what to do.
    """

    def __init__(self, pattern: str, reason: str) -> None:
        self.pattern = pattern
        self.reason = reason
        super().__init__(f"keep_float32 pattern {pattern!r}: {reason}")

    def __reduce__(self) -> tuple[type[SubmoduleError], tuple[str, str]]:
        """Pickle by the parts, so that the error passes between processes."""
        return type(self), (self.pattern, self.reason)


class StubMismatchError(AmpScriptError, TypeError):
    """A script module that is not what a stub class says.

    Attributes:
        module: name of the class that the module was made from.
        stub: name of the stub class.
        differences: what differs, a line each.
    """

    def __init__(self, module: str, stub: str, differences: Sequence[str]) -> None:
        self.module = module
        self.stub = stub
        self.differences = tuple(differences)
        super().__init__(
            f"{module} is not what {stub} says; write it again with `amp-script stubgen`:\n"
            + "\n".join(f"  {difference}" for difference in differences)
        )


class StubsError(AmpScriptError, RuntimeError):
    """Type stubs that cannot be found, written or made; the message says which and why."""


class TracingError(AmpScriptError, RuntimeError):
    """A model, or the inputs given with it, that cannot be traced and frozen exactly."""


class TracingWarning(UserWarning):
    """A trace that may not hold for other inputs; shows the lines of the model that say so."""


class VerificationError(AmpScriptError, AssertionError):
    """A program that is not what eager autocast is.

    Attributes:
        report: the :class:`amp_script.verification.VerificationReport`.
        explanation: what in the model is at the bottom of it, where that is known, or ``""``.
    """

    def __init__(self, report: VerificationReport, explanation: str = "") -> None:
        self.report = report
        self.explanation = explanation
        super().__init__(str(report) + explanation)


class DecoratorError(AmpScriptError, RuntimeError):
    """A decorated function that TorchScript cannot compile with the region it is decorated with."""


class ComparisonError(AmpScriptError, RuntimeError):
    """A model that cannot be compared with itself in float32; says which run of it fails, where."""


class ExportError(AmpScriptError, RuntimeError):
    """A program that another format or server cannot take as it is; says why and what to do."""


class CustomFunctionError(AmpScriptError, AttributeError):
    """A decorated backward whose forward has not recorded the autocast state that it ran in.

    Attributes:
        function: qualified name of the backward.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        super().__init__(
            f"{function} is decorated with custom_bwd, and its forward has not recorded the "
            "autocast state that it ran in: decorate the forward with custom_fwd, and in "
            "torch.compile also the setup_context, where there is one"
        )
