"""The declared kernel variants: every text that may ever be compiled, and how its prelude specialises it.

A variant is a file of `kernels/` and, where the file computes with activations, their type T. The prelude states T, the
suffix of the entry points and the constants of the contract; so a kernel has no template name and cannot disagree with
`backends.base`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from metrale.backends.base import BLOCK_TOKENS, MAX_BIAS, MAX_TOP_LOGPROBS, ROW_FIELDS

TYPES: Final = {"f32": "float", "f16": "f16", "bf16": "bf16"}  # activation dtype -> T
TYPED_FILES: Final = ("attention", "elementwise", "embed", "linear", "norm", "rope")
PLAIN_FILES: Final = ("rows", "sample")  # integers and float32 logits alone
# Weight formats, in the order of their numbers in gguf.cuh.
FORMATS: Final = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
# Compute capability -> target. "a" targets may use what only that one chip has.
ARCHITECTURES: Final = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}


class Variant(NamedTuple):
    """One compilation: a file's name without its ending, and the activation dtype ("" where it has none)."""

    file: str
    dtype: str

    @property
    def suffix(self) -> str:
        """Return what the names of its entry points end in."""
        return f"__{self.dtype}" if self.dtype else ""


VARIANTS: Final = tuple(
    [Variant(file, dtype) for dtype in TYPES for file in TYPED_FILES] + [Variant(file, "") for file in PLAIN_FILES]
)


def variants_of(dtype: str) -> tuple[Variant, ...]:
    """Return the variants that a backend with this activation dtype needs."""
    return tuple(v for v in VARIANTS if v.dtype in ("", dtype))


def prelude(variant: Variant) -> str:
    """Return the text that stands before a file: T, KERNEL and the contract's constants."""
    lines = []
    if variant.dtype:
        kind = TYPES[variant.dtype]
        lines += ([] if kind == "float" else [f"struct {kind};"]) + [f"using T = {kind};"]
    name = f"name##{variant.suffix}" if variant.suffix else "name"
    lines.append(f'#define KERNEL(name) extern "C" __global__ void {name}')
    constants = {"BLOCK_TOKENS": BLOCK_TOKENS, "MAX_BIAS": MAX_BIAS, "MAX_TOP_LOGPROBS": MAX_TOP_LOGPROBS,
                 "NUM_FIELDS": len(ROW_FIELDS)}
    constants |= {f"FIELD_{name.upper()}": i for i, name in enumerate(ROW_FIELDS)}
    constants |= {f"FORMAT_{name.upper()}": i for i, name in enumerate(FORMATS)}
    lines += [f"[[maybe_unused]] constexpr int {name} = {value};" for name, value in constants.items()]
    return "\n".join(lines) + "\n"


def architecture(capability: tuple[int, int]) -> str:
    """Return the compiler's target for a compute capability; one not in the list gets its plain target."""
    return ARCHITECTURES.get(capability, f"sm_{capability[0]}{capability[1]}")
