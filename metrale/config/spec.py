"""Model specs: what a dense decoder computes, in numbers and flags, with nothing about files or devices.

A family makes a `ModelSpec` from a config; weights, layers, cache and engine read it. Frozen and hashable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from metrale.errors import UnsupportedError

NormPlacement = Literal["pre", "sandwich", "post"]
QkNormScope = Literal["head", "full"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMS norm: out = x / sqrt(mean(x^2) + eps) * (offset + weight).

    cast_first: round to the activation dtype before the weight (Llama) instead of after it (Gemma, OLMo-2).
    """

    eps: float
    offset: float = 0.0
    cast_first: bool = True


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions, rotate-half layout; `metrale.layers.rope` turns it into a table.

    dim: rotated dims of a head (the rest stays). max_position: the length the config states, M of the dynamic rule.
    original: the trained length (llama3, yarn, longrope). attention_factor: multiplies cos and sin; None: the kind's own.
    short_factor, long_factor: dim/2 divisors each (longrope); factors: dim/2 divisors at any length.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    max_position: int = 0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: query head h reads K/V head h // (heads // kv_heads).

    scale: multiplies the scores. window: a row sees keys with index > its own - window; None: all before it.
    softcap: scores become cap * tanh(score / cap). qk_norm: "head" over each head, "full" over all heads together.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float | None = None
    qk_norm: QkNormScope | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def q_rows(self) -> int:
        """Return the rows of the query matrix, heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Return the rows of the key (and of the value) matrix, kv_heads * head_dim."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated feed-forward: down(act(gate(x)) * up(x)). act: "silu" or "gelu_tanh"."""

    size: int
    act: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    placement: "pre" norms before attention and MLP; "sandwich" also after each; "post" only after each.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    placement: NormPlacement = "pre"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: same kind, same window, same sizes.

    layers: layer indices, ascending. kind: "full" or "window". dtype: of the pages ("f32": the backend's own choice may
    be narrower). scales: scale values a head and block (0: none).
    """

    layers: tuple[int, ...]
    kind: Literal["full", "window"]
    heads: int
    k_dim: int
    v_dim: int
    dtype: str = "f32"
    scales: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder-only model.

    embed_scale: multiplies embedding rows (not a tied head's use of them); embed_scale_rounds: it is first rounded to the
    embedding's dtype. logit_softcap: logits become cap * tanh(logit / cap). max_context: tokens the config allows.
    """

    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied: bool
    max_context: int
    embed_scale: float = 1.0
    embed_scale_rounds: bool = False
    logit_softcap: float | None = None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the KV groups in the order of their first layer."""
        members: dict[tuple[object, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            a = layer.attention
            members.setdefault((a.window, a.kv_heads, a.head_dim), []).append(i)
        groups = []
        for found in members.values():
            a = self.layers[found[0]].attention
            kind: Literal["full", "window"] = "full" if a.window is None else "window"
            groups.append(KVGroup(tuple(found), kind, a.kv_heads, a.head_dim, a.head_dim, window=a.window))
        return tuple(groups)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Return the index into `kv_groups` of each layer."""
        where = {layer: g for g, group in enumerate(self.kv_groups) for layer in group.layers}
        return tuple(where[i] for i in range(len(self.layers)))

    @property
    def num_params(self) -> int:
        """Return the number of matrix elements, a tied head counted once."""
        total = self.vocab * self.hidden * (1 if self.tied else 2)
        for layer in self.layers:
            a, m = layer.attention, layer.mlp
            total += self.hidden * (2 * a.q_rows + 2 * a.kv_rows + 3 * m.size)
        return total

    def split(self, ranks: int) -> ModelSpec:
        """Return what one of several ranks computes: its heads and its part of each feed-forward; hidden size and
        vocabulary stay.

        Raises: UnsupportedError ``parallel.split`` when the ranks do not divide the heads or the feed-forward.
        """
        if ranks == 1:
            return self
        layers = []
        for layer in self.layers:
            a, m = layer.attention, layer.mlp
            for what, count in (("key/value heads", a.kv_heads), ("heads", a.heads), ("feed-forward columns", m.size)):
                if count % ranks:
                    raise UnsupportedError(
                        f"tensor parallelism: expected ranks that divide the {count} {what}, got {ranks}; use fewer ranks",
                        code="parallel.split",
                    )
            part = replace(a, heads=a.heads // ranks, kv_heads=a.kv_heads // ranks)
            layers.append(replace(layer, attention=part, mlp=replace(m, size=m.size // ranks)))
        return replace(self, layers=tuple(layers))

    def with_layers(self, num_layers: int) -> ModelSpec:
        """Return the spec cut to its first layers: for tests and measurements."""
        return replace(self, layers=self.layers[:num_layers])
