"""Programs with everything that a stub has to tell, and some that make it hard.

TorchScript reads these annotations, so they are written as it takes them.
"""

import enum
from typing import Any, Dict, Final, List, NamedTuple, Optional, Tuple, Union  # noqa: UP035

import torch
from torch import Tensor, nn

# ruff: noqa: UP006, UP007, UP045


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Word(enum.Enum):
    YES = "yes"
    NO = "no"


class Point(NamedTuple):
    x: Tensor
    y: Optional[int] = None


class Shape(NamedTuple):
    corner: Point
    names: List[str]
    count: int


@torch.jit.script
class Total:
    def __init__(self, value: int, items: List[Tensor]):
        self.value = value
        self.items = items

    def add(self, n: int = 1) -> int:
        self.value += n
        return self.value


@torch.jit.interface
class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass

    def score(self, x: Tensor, k: int) -> float:
        pass


@torch.jit.interface
class Runs:
    def run(self, x: Tensor) -> Tensor:
        pass


class Scorer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def score(self, x: Tensor, k: int) -> float:
        return 1.0


class Block(nn.Module):
    width: Final[int]
    name: Final[str]
    sizes: Final[List[int]]
    rate: Final[float]

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width
        self.name = 'it\'s\na "name"'
        self.sizes = [1, 2]
        self.rate = float("inf")
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(1))
        self.register_parameter("bias", None)
        self.flag = True
        self.table: Dict[str, int] = {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.mean + self.width


class Zoo(nn.Module):
    """One of each kind of type and of member."""

    scorer: Scores
    last: Optional[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(4)])
        self.by_name = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.ReLU()})
        self.sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.scorer = Scorer()
        self.total = Total(1, [torch.ones(1)])
        self.last = None
        self.color = Color.RED

    def forward(
        self,
        x: Tensor,
        n: int = 2,
        f: float = float("inf"),
        s: str = "a'b",
        flag: bool = True,
        o: Optional[Tensor] = None,
        numbers: Optional[List[int]] = None,
        pair: Tuple[int, float] = (1, 2.0),
        table: Optional[Dict[str, List[Tensor]]] = None,
    ) -> Tuple[Tensor, Optional[int]]:
        return x, n

    @torch.jit.export
    def make(self, x: Tensor, u: Union[int, str, Tensor]) -> Shape:
        return Shape(Point(x, 1), ["a"], 1)

    @torch.jit.export
    def pick(self, c: Color, w: Word, device: torch.device) -> Color:
        return c

    @torch.jit.export
    def collect(self, total: Total, runs: Runs) -> Total:
        total.add(1)
        return total

    @torch.jit.export
    def nothing(self, p: Point) -> None:
        pass

    @torch.jit.export
    def scalars(
        self,
        dtype: torch.dtype,
        number: Union[int, float, complex] = 2,
        c: complex = 1j,
        generator: Optional[torch.Generator] = None,
        default: Tensor = torch.ones(2),  # noqa: B008
    ) -> torch.dtype:
        return dtype

    @torch.jit.export
    def by_keyword(self, *, key: int, empty: Tuple[()]) -> Dict[int, Dict[str, Tensor]]:
        return {key: {"a": torch.ones(1)}}

    @torch.jit.export
    def anything(self, x: Any) -> Any:
        return x

    @torch.jit.export
    def later(self, x: Tensor) -> torch.jit.Future[Tensor]:
        return torch.jit.fork(self.sequence, x)


class Unsaveable(nn.Module):
    """A program that cannot be written to a file."""

    def forward(self, x: Tensor) -> Point:
        return Point(self.in_python(x), 1)

    @torch.jit.ignore
    def in_python(self, x: Tensor) -> Tensor:
        return x


@torch.jit.script
class Engine:
    def __init__(self) -> None:
        self.list = 3

    def run(self, x: Tensor) -> Tensor:
        return x


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Hostile(nn.Module):
    """Members with the names that a stub is written with, and that torch uses itself."""

    dict: Final[int]

    def __init__(self) -> None:
        super().__init__()
        self.int = 3
        self.torch = nn.Linear(1, 1)
        self.Tensor = nn.Parameter(torch.ones(1))
        self.register_buffer("list", torch.ones(1))
        self.dict = 4
        self.code = 3
        self.Final = True
        self.Hostile = Inner()
        self.Any = Inner()
        self.Runs = Inner()
        self.Engine = nn.Sequential(Inner())
        self.items: Dict[str, List[int]] = {"a": [1]}

    def forward(self, x: Tensor) -> Shape:
        return Shape(Point(x, 1), ["a"], 1)

    @torch.jit.export
    def tuple(self, x: Dict[str, Tensor]) -> List[int]:
        return [1]

    @torch.jit.export
    def bool(self, x: bool, runs: Runs) -> Optional[int]:
        return None

    @torch.jit.export
    def apply(self, x: Engine, generator: torch.Generator) -> str:
        return "3"

    @torch.jit.export
    def type(self, x: Any, device: torch.device) -> int:
        return 3


class Limit(enum.Enum):
    NONE = float("inf")
    BELOW = float("-inf")
    UNKNOWN = float("nan")
    SOME = 1.5


@torch.jit.script
class Final:
    def __init__(self, value: int):
        self.float = value

    def go(self, self_: int, limit: float = float("inf"), at: Tensor = torch.ones(1)) -> int:  # noqa: B008
        return self.float


class Shadowing(nn.Module):
    """Members and parameters with the names that a stub gives to what it makes way for them."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self._torch, self._torch2, self._default = 1, 2, 3, 4
        self.final = Block()
        self.protocol = Block(4)
        self.limit = Limit.NONE

    def forward(
        this,  # noqa: N805
        self: Tensor,
        _self: Final,
        by: float = float("-inf"),
        default: Tensor = torch.ones(2),  # noqa: B008
    ) -> Tuple[Tensor, float, int, Limit]:
        held = this.torch + this._torch + this._torch2 + this._default
        return self, by, held, this.limit
