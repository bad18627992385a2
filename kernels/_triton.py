"""Triton, the optional dependency, in one place.

Without it every kernel module still imports: `jit` then leaves a kernel as an uncalled function, and only the dispatch
of CUDA tensors fails. With TRITON_INTERPRET=1 set before the first import, kernels run in Triton's interpreter.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["AVAILABLE", "INTERPRETED", "AotCase", "cdiv", "jit", "power_of_two", "tl"]

try:
    import triton
    import triton.language as tl
except ImportError:
    AVAILABLE = False

    class _AbsentLanguage:
        """Enough of `triton.language` to evaluate a kernel's annotations and constants."""

        tensor = tuple = object

        @staticmethod
        def constexpr(value: object) -> object:
            """A constant stays what it is."""
            return value

    tl = _AbsentLanguage()

    def jit(kernel: Callable[..., Any]) -> Any:
        """Leave the kernel alone: nothing can launch it."""
        return kernel

else:
    AVAILABLE = True

    def jit(kernel: Callable[..., Any]) -> Any:
        """Compile `kernel` on its first launch."""
        return triton.jit(kernel)


INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in the interpreter, whose bf16 dot multiplies bit patterns: operands are upcast under this flag."""


class AotCase(NamedTuple):
    """One kernel with the signature and constants of a real model, for the ahead-of-time check.

    `arguments` maps a parameter to its Triton type ("*u8", "i32", ...); those in `aligned` are multiples of 16.
    `wide` says whether the kernel must load 128 bits at a time, `architectures` where it is launched like this.
    """

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 2
    wide: bool = True
    architectures: tuple[int, ...] = (80, 90, 100)


def cdiv(total: int, part: int) -> int:
    """Number of parts that cover `total`."""
    return -(-total // part)


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
