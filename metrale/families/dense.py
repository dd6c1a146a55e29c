"""What the dense families share: sizes, windows, spec assembly and the weight map of a gated decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from metrale.config.reader import MAX_INT, MAX_LAYERS, ConfigReader
from metrale.config.rope import read_rope
from metrale.config.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormPlacement, NormSpec, QkNormScope, RopeSpec
from metrale.errors import ConfigError, UnsupportedError
from metrale.weights.map import Matrix, Part, Rows, Shard, Vector, WeightMap

ACTIVATIONS: Final = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip

# Tensors that some exporters store though they follow from the config.
IGNORED: Final = (
    "*rotary_emb.inv_freq",
    "*.attention.bias",
    "*.masked_bias",
    "rope_freqs.weight",
    "rope_factors_*.weight",
    "blk.*.attn_rot_embd",
)
# Image parts of models whose text part stands alone here.
IGNORED_VISION: Final = ("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*")


class Sizes(NamedTuple):
    """The numbers every dense config states."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_position: int


def read_sizes(config: ConfigReader, defaults: Mapping[str, Any] | None = None) -> Sizes:
    """Read the sizes; `defaults` fills absent keys (of configs that rely on class defaults).

    Raises: ConfigError ``config.missing``, ``config.type``, ``config.value``.
    """
    known = defaults or {}

    def size(key: str, default: Any = None, most: int = MAX_INT) -> int:
        fallback = known.get(key, default)
        options = {} if fallback is None else {"default": fallback}
        value: int = config.int(key, least=1, most=most, **options)
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = config.int("head_dim", default=known.get("head_dim"), least=2)
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"{config.name('head_dim')}: expected a value, as hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}, got none; correct the config",
            code="config.value",
        )
    head_dim = hidden // heads if head_dim is None else head_dim
    if heads % kv_heads:
        raise ConfigError(
            f"{config.name('num_key_value_heads')}: expected a divisor of num_attention_heads {heads}, got {kv_heads}; "
            "correct the config",
            code="config.value",
        )
    eps = config.positive("rms_norm_eps", **({"default": known["rms_norm_eps"]} if "rms_norm_eps" in known else {}))
    return Sizes(
        size("vocab_size"),
        hidden,
        size("intermediate_size"),
        size("num_hidden_layers", most=MAX_LAYERS),
        heads,
        kv_heads,
        head_dim,
        eps,
        size("max_position_embeddings"),
    )


def read_activation(config: ConfigReader, *keys: str, default: str = "silu") -> str:
    """Return the contract's name of the activation. Raises: UnsupportedError ``config.unsupported``."""
    name: str = config.str(*keys, default=default)
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"{config.name(keys[0])}: expected one of {', '.join(ACTIVATIONS)}, got {name!r}; this build does not implement it",
            code="config.unsupported",
        )
    return ACTIVATIONS[name]


def read_windows(
    config: ConfigReader, layers: int, window: int | None, default: Callable[[int], bool] = lambda layer: False
) -> tuple[int | None, ...]:
    """Return each layer's window: ``layer_types`` decides where given, else `default` says which layers slide.

    Raises: UnsupportedError ``config.unsupported``; ConfigError ``config.value``, ``config.type``.
    """
    types = config.list("layer_types", of=str, default=None, length=layers)
    if types is None:
        types = tuple("sliding_attention" if default(i) else "full_attention" for i in range(layers))
    wrong = next((t for t in types if t not in ("sliding_attention", "full_attention")), None)
    if wrong is not None:
        raise UnsupportedError(
            f"{config.name('layer_types')}: expected sliding_attention or full_attention, got {wrong!r}; this build "
            "does not implement it",
            code="config.unsupported",
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError(
            f"{config.name('sliding_window')}: expected a window for the sliding layers, got none; correct the config",
            code="config.missing",
        )
    return tuple(window if t == "sliding_attention" else None for t in types)


def build(
    family: str,
    config: ConfigReader,
    sizes: Sizes,
    *,
    windows: Sequence[int | None],
    act: str,
    tied: bool,
    rope: RopeSpec | None = None,
    local_rope: RopeSpec | None = None,
    norm: NormSpec | None = None,
    placement: NormPlacement = "pre",
    scale: float | None = None,
    softcap: float | None = None,
    qk_norm: QkNormScope | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    embed_scale: float = 1.0,
    embed_scale_rounds: bool = False,
    logit_softcap: float | None = None,
) -> ModelSpec:
    """Assemble a spec; `local_rope` is for windowed layers where they have their own."""
    rope = rope if rope is not None else read_rope(config, sizes.head_dim, sizes.max_position)
    norm = norm if norm is not None else NormSpec(sizes.eps)
    mlp = MlpSpec(sizes.inner, act, mlp_bias)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                sizes.heads,
                sizes.kv_heads,
                sizes.head_dim,
                sizes.head_dim**-0.5 if scale is None else scale,
                local_rope if window is not None and local_rope is not None else rope,
                window,
                softcap,
                qk_norm,
                qkv_bias,
                out_bias,
            ),
            mlp,
            norm,
            placement,
        )
        for window in windows
    )
    return ModelSpec(
        family,
        sizes.vocab,
        sizes.hidden,
        layers,
        norm,
        tied,
        _max_context(sizes, rope),
        embed_scale,
        embed_scale_rounds,
        logit_softcap,
    )


def _max_context(sizes: Sizes, rope: RopeSpec) -> int:
    """Return the tokens a config allows: those of yarn and dynamic state the trained length and a factor beside it."""
    if rope.kind == "yarn":
        return max(sizes.max_position, int(rope.factor * rope.original))
    if rope.kind == "dynamic":
        return max(sizes.max_position, int(rope.factor * sizes.max_position))
    return sizes.max_position


# --- weights -----------------------------------------------------------------------------------------------------------


def dense_weight_map(
    spec: ModelSpec, *, fused: bool = False, interleaved: bool = False, plus_one: bool = False, ignored: tuple[str, ...] = ()
) -> WeightMap:
    """Return the weight map of a gated decoder in Llama's names.

    fused: qkv and gate_up stand fused in the checkpoint (Phi-3). interleaved: GGUF files hold the rows of q and k with
    the halves of each head interleaved (Llama). plus_one: GGUF files hold 1 + w for norms (Gemma).
    """
    # The largest first: while one is packed, its pages stand beside what is packed already.
    matrices: list[Matrix] = [Matrix("embed", spec.hidden, (Part(Rows("embed_tokens.weight", 0, spec.vocab, spec.vocab)),))]
    if not spec.tied:
        matrices.append(Matrix("head", spec.hidden, (Part(Rows("lm_head.weight", 0, spec.vocab, spec.vocab), shard="vocab"),)))
    vectors: list[Vector] = []
    add = -1.0 if plus_one else 0.0
    for i, layer in enumerate(spec.layers):
        name = f"layers.{i}."
        matrices += [
            _qkv(spec, layer, name, fused, interleaved),
            _rows_in(
                f"{name}o",
                layer.attention.q_rows,
                f"{name}self_attn.o_proj",
                spec.hidden,
                layer.attention.out_bias,
                unit=layer.attention.head_dim,
            ),
            _gate_up(spec, layer, name, fused),
            _rows_in(f"{name}down", layer.mlp.size, f"{name}mlp.down_proj", spec.hidden, layer.mlp.bias),
        ]
        vectors += [Vector(f"{name}{norm}", f"{name}{norm}.weight", spec.hidden, add) for norm in NORMS[layer.placement]]
        vectors += _qk_norms(layer, name, add)
    vectors.append(Vector("norm", "norm.weight", spec.hidden, add))
    skipped = (*IGNORED, *ignored)
    if spec.tied:
        skipped = (*skipped, "*lm_head.weight")  # a copy of the embedding, where it is stored at all
    return WeightMap(tuple(matrices), tuple(vectors), skipped, spec.tied)


# The norms of a layer in the order they run, by placement.
NORMS: Final[dict[str, tuple[str, ...]]] = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def _qkv(spec: ModelSpec, layer: LayerSpec, name: str, fused: bool, interleaved: bool) -> Matrix:
    a = layer.attention
    # A norm over all heads together needs them all on each rank.
    shard: Shard = "none" if a.qk_norm == "full" else "rows"
    counts = {"q": a.q_rows, "k": a.kv_rows, "v": a.kv_rows}
    total = sum(counts.values())
    parts, start = [], 0
    for letter, count in counts.items():
        heads = count // a.head_dim if interleaved and letter != "v" else 0
        base = f"{name}self_attn.{'qkv' if fused else letter}_proj"
        at, whole = (start, total) if fused else (0, count)
        bias = Rows(f"{base}.bias", at, count, whole) if a.qkv_bias else None
        parts.append(Part(Rows(f"{base}.weight", at, count, whole), bias, shard=shard, unit=a.head_dim, gguf_heads=heads))
        start += count
    return Matrix(f"{name}qkv", spec.hidden, tuple(parts))


def _gate_up(spec: ModelSpec, layer: LayerSpec, name: str, fused: bool) -> Matrix:
    size = layer.mlp.size
    parts = []
    for i, part in enumerate(("gate", "up")):
        base = f"{name}mlp.{'gate_up' if fused else part}_proj"
        at, whole = (i * size, 2 * size) if fused else (0, size)
        bias = Rows(f"{base}.bias", at, size, whole) if layer.mlp.bias else None
        parts.append(Part(Rows(f"{base}.weight", at, size, whole), bias, shard="rows"))
    return Matrix(f"{name}gate_up", spec.hidden, tuple(parts))


def _rows_in(target: str, columns: int, base: str, rows: int, bias: bool, unit: int = 1) -> Matrix:
    """Return a matrix whose inputs are split over the ranks."""
    added = Rows(f"{base}.bias", 0, rows, rows) if bias else None
    return Matrix(target, columns, (Part(Rows(f"{base}.weight", 0, rows, rows), added, shard="columns", unit=unit),))


def _qk_norms(layer: LayerSpec, name: str, add: float) -> list[Vector]:
    a = layer.attention
    if a.qk_norm is None:
        return []
    sizes = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.q_rows, a.kv_rows)
    return [
        Vector(f"{name}{n}_norm", f"{name}self_attn.{n}_norm.weight", size, add) for n, size in zip("qk", sizes, strict=True)
    ]
