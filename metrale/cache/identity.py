"""The identity of a full K/V block: what must be equal for one block to stand in for another.

A block's content is decided by everything before it (its parent), its own tokens, and *extra*: whatever else changed the
K/V. Identities are compared by value; the hash only makes that fast, so two prompts that collide never share K/V.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extra:
    """What besides tokens decides K/V.

    adapter: (id, generation) of a LoRA adapter. media: (hash, offset in the block) of images that touch the block.
    salt: a tenant's secret, so that tenants cannot probe one another's prompts. kv_format: the pages' element format.
    """

    adapter: tuple[int, int] | None = None
    media: tuple[tuple[str, int], ...] = ()
    salt: str = ""
    kv_format: str = "f32"


class BlockIdentity:
    """One block's identity: (parent, tokens, extra). Immutable."""

    __slots__ = ("_hash", "depth", "extra", "parent", "tokens")

    def __init__(self, parent: BlockIdentity | None, tokens: tuple[int, ...], extra: Extra) -> None:
        """Chain a block to its parent (None for the first block of a sequence)."""
        self.parent = parent
        self.tokens = tokens
        self.extra = extra
        self.depth: int = 0 if parent is None else parent.depth + 1
        self._hash: int = hash((None if parent is None else parent._hash, tokens, extra))

    def __hash__(self) -> int:
        """Return the hash of the whole chain, computed once."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Compare the whole chains; stops where they become the same object, never recurses."""
        if not isinstance(other, BlockIdentity):
            return NotImplemented
        a: BlockIdentity | None = self
        b: BlockIdentity | None = other
        while a is not b:
            if a is None or b is None or a._hash != b._hash or a.tokens != b.tokens or a.extra != b.extra:
                return False
            a, b = a.parent, b.parent
        return True

    def __repr__(self) -> str:
        """Show the depth and the tokens."""
        return f"BlockIdentity(depth={self.depth}, tokens={self.tokens}, extra={self.extra})"


def identities(
    tokens: tuple[int, ...], extra: Extra, block_tokens: int, parent: BlockIdentity | None = None
) -> list[BlockIdentity]:
    """Return the identities of the full blocks of `tokens` (which follow `parent`), in order; a partial tail has none."""
    chain: list[BlockIdentity] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = BlockIdentity(parent, tokens[start : start + block_tokens], extra)
        chain.append(parent)
    return chain
