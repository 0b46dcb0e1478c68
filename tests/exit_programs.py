"""Programs that leave regions, and what is around them, early."""

# The forms that these rules would shorten are what is tested.
# ruff: noqa: RET504, RET505, RET506, SIM102, SIM108

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import amp_script


def return_nested_in_a_region(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n > 0:
            if n > 1:
                return x
        y = torch.mm(x, x)
    return y


def return_nested_before_a_region(x: torch.Tensor, n: int):
    if n > 0:
        x = x + 1
        if n > 1:
            return x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, x)
    return torch.mm(y.float(), x)


def return_from_a_loop_in_a_region(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(3):
            x = torch.mm(x, x)
            if i == n:
                return x
        y = torch.mm(x, x)
    return torch.mm(y.float(), x.float())


def return_from_a_region_in_a_region(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.mm(x, x)
        with torch.autocast("cpu", enabled=False):
            b = torch.mm(x, a.float())
            if n == 0:
                return b
            with torch.autocast("cpu", dtype=torch.float16):
                if n > 0:
                    c = torch.mm(b, b)
                    if n == 1:
                        return torch.mm(c, b)
                c = torch.mm(b, x)
            d = torch.mm(b, x)
        e = torch.mm(d, c)
    f = torch.mm(e.float(), x)
    return a.float() + b + c.float() + d + e.float() + f


def return_of_every_way_out_of_a_region(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n > 0:
            with torch.autocast("cpu", dtype=torch.float16):
                if n > 1:
                    return torch.mm(x, x)
                y = torch.mm(x, x)
            return torch.mm(y, x)
        else:
            return x


def continue_nested_in_a_region(x: torch.Tensor, n: int):
    for i in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if i > 0:
                if i == n:
                    continue
                x = x / 2
            y = torch.mm(x, x)
            if i == n + 2:
                if n > 0:
                    break
        x = torch.mm(y.float(), x)
    return torch.mm(x, x)


def all_exits_in_regions_in_loops(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(3):
            with torch.autocast("cpu", enabled=i > 0, dtype=torch.float16):
                if i == 1:
                    if n == 0:
                        continue
                for j in range(2):
                    if j == n:
                        break
                    x = torch.mm(x, x) / 4
                    if i + j == 4 - n:
                        return x
                y = torch.mm(x, x)
            x = torch.mm(y, x).float() / 4
        z = torch.mm(x, x)
    return torch.mm(z.float(), x)


def continue_to_a_condition_from_a_region(x: torch.Tensor, n: int):
    i = 0
    while bool(torch.mm(x, x).dtype == torch.float32) and i < 4:
        i += 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if i == n:
                continue
            y = torch.mm(x, x)
        x = torch.mm(y.float(), x)
    return x, i


def return_from_a_region_without_gradients(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            if n > 0:
                if n > 1:
                    return x * 2
            y = torch.mm(x, x)
        z = torch.mm(x, x) + y
    return torch.mm(z.float(), x)


def exits_by_a_flag(x: torch.Tensor, n: int):
    if n > 0:
        flag = True
    else:
        flag = False
    if flag:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(x, x)
        x = torch.mm(y.float(), x)
    return torch.mm(x, x)


def regions_one_after_the_other_with_returns(x: torch.Tensor, n: int):
    # Entered, torch's own give None until torch 2.10.
    with amp_script.autocast("cpu", dtype=torch.bfloat16) as region:
        if n >= 0:
            if n == 0:
                return x
        y = torch.mm(x, x)
    with torch.autocast("cpu", dtype=torch.float16), torch.autocast("cpu", enabled=n > 1):
        if n > 0:
            if n == 1:
                return torch.mm(x, x)
        y = torch.mm(x, y.float())
    with region:
        z = torch.mm(x, x)
    return torch.mm(z.float(), y.float())


def exceptions_and_returns(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n > 0:
            if n > 2:
                raise RuntimeError("too large")
            elif n > 1:
                return x
        y = torch.mm(x, x)
    return torch.mm(y.float(), x)


NESTED_EXITS: list[Callable[..., Any]] = [
    return_nested_in_a_region,
    return_nested_before_a_region,
    return_from_a_loop_in_a_region,
    return_from_a_region_in_a_region,
    return_of_every_way_out_of_a_region,
    continue_nested_in_a_region,
    all_exits_in_regions_in_loops,
    continue_to_a_condition_from_a_region,
    return_from_a_region_without_gradients,
    exits_by_a_flag,
    regions_one_after_the_other_with_returns,
    exceptions_and_returns,
]
