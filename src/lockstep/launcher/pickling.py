"""Pickling: functions and their arguments as bytes, for another process.

Functions and classes of `__main__`, a notebook or a test are sent by value, by cloudpickle. Their
code keeps the name of its file, which cloudpickle 3.1.3 and later leave out so that equal functions
have equal pickles: error reports, hang reports and debuggers name it and show its lines.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["Pickler", "dumps"]


def _reduce_code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    _, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _restore_code, (code.co_filename, *arguments)


def _restore_code(filename: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values; the code of functions sent by value keeps its file name."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Return the pickle of a value; errors of pickle are raised unchanged."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
