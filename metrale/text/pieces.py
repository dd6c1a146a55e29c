"""The two spellings of tokens as text: byte-level (GPT-2) and SentencePiece.

A vocabulary stores its tokens as text. Byte-level vocabularies write each byte as one printable character; SentencePiece
writes a space as U+2581 and a lone byte as ``<0x0A>``. Both are undone here, token by token, into the exact bytes.
"""

from __future__ import annotations

from typing import Literal

Spelling = Literal["bytes", "spm"]
SPACE = "\u2581"


def byte_characters() -> dict[int, str]:
    """Return the printable character that stands for each byte.

    Source: GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {}
    extra = 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(0x100 + extra)
            extra += 1
    return table


_BYTE_OF: dict[str, int] = {character: byte for byte, character in byte_characters().items()}


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """Return the bytes that an ordinary token adds to the text.

    A byte-level piece with a character outside the table stands for its own UTF-8, as in `tokenizers`.
    """
    if spelling == "bytes":
        try:
            return bytes([_BYTE_OF[character] for character in piece])
        except KeyError:
            return piece.encode("utf-8")
    byte = spm_byte(piece)
    if byte is not None:
        return bytes([byte])
    return piece.replace(SPACE, " ").encode("utf-8")


def spm_byte(piece: str) -> int | None:
    """Return the byte a ``<0x..>`` piece stands for, or None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None
