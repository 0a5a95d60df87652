"""A tool: arithmetic, by walking the syntax tree. Nothing is evaluated that is not listed here."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_DIGITS = 1000  # of a result; a tower of powers would otherwise stop the program


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as "(17 + 4) * 2".
    """
    if len(expression) > 1000:
        raise ValueError("the expression is longer than 1000 characters")
    return str(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _small(node.value)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _value(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _small(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(base) > 1 and abs(exponent) * math.log10(abs(base)) > _DIGITS:
        raise ValueError(f"the result has more than {_DIGITS} digits")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return _small(value)


def _small(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _DIGITS * 4:
        raise ValueError(f"the result has more than {_DIGITS} digits")
    return value
