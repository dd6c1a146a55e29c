"""Pre-tokenizers of byte-level vocabularies by their GGUF name (``tokenizer.ggml.pre``).

Each name stands for a list of expressions applied one after the other; every match and every gap between matches becomes
a piece, and merges never cross pieces. The expressions are those of the families' own tokenizer.json. llama.cpp's are
equal except for tekken and gpt-4o, whose cased letter classes it approximates outside ASCII; the families' own win there.

Source: tokenizer.json of the named models; llama.cpp src/llama-vocab.cpp for which name means which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metrale.errors import UnsupportedError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
    r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + r"*|\p{N}|" + _SLASH_TAIL
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _CONTRACTION + "?"
    r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _CONTRACTION + r"?|\p{N}{1,3}|" + _SLASH_TAIL
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|" + _SPACES,
)


@dataclass(frozen=True, slots=True)
class PreSpec:
    """A named pre-tokenizer: its expressions in order, and two habits of the families that use it.

    `whole_words`: a piece that is itself a token is taken whole, before any merge. `add_bos`: what ``add_bos_token``
    means when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_SPECS: tuple[tuple[tuple[str, ...], PreSpec], ...] = (
    (("default", ""), PreSpec(_DEFAULT)),
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum"),
     PreSpec((_GPT2,))),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), PreSpec((r"\p{N}", _GPT2))),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
     PreSpec((_LLAMA3,), whole_words=True, add_bos=True)),
    (("dbrx", "smaug-bpe", "chatglm-bpe"), PreSpec((_LLAMA3,))),  # dbrx is also what OLMo 2 files say
    (("glm4",), PreSpec((_LLAMA3,), whole_words=True)),
    (("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), PreSpec((_QWEN2,))),
    (("qwen35",), PreSpec((_QWEN35,))),
    (("tekken",), PreSpec((_TEKKEN,), whole_words=True, add_bos=True)),
    (("gpt-4o", "llama4"), PreSpec((_GPT4O,))),
    (("falcon",), PreSpec(_FALCON)),
    (("deepseek-v3", "hunyuan-dense"), PreSpec(_DEEPSEEK3)),
)
_BY_NAME: dict[str, PreSpec] = {name: spec for names, spec in _SPECS for name in names}


def known_names() -> tuple[str, ...]:
    """Return every supported name, sorted; the empty name is what files without the key have."""
    return tuple(sorted(name for name in _BY_NAME if name))


def find(name: str) -> PreSpec:
    """Return the pre-tokenizer of that name.

    Raises: UnsupportedError (``tokenizer.pre``) for any other name: a wrong split gives wrong ids silently.
    """
    spec = _BY_NAME.get(name)
    if spec is None:
        raise UnsupportedError(f"tokenizer.ggml.pre: expected one of {', '.join(known_names())}, got {name!r}; use the "
                               "checkpoint's safetensors and tokenizer.json instead", code="tokenizer.pre")
    return spec


def build(spec: PreSpec) -> PreTokenizer:
    """Return the `tokenizers` pre-tokenizer: split by each expression, then spell bytes as characters."""
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in spec.patterns]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, spell])
