"""Text of file names for terminals: control characters are shown escaped, so that they move no cursor."""

# C0 and C1 controls and DEL but for tab and newline; line separators, marks and overrides of the writing direction; and
# halves of surrogate pairs, as which Python holds the bytes of a name that is no UTF-8.
_HIDDEN = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F,
    *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF, *range(0xD800, 0xE000),
)  # fmt: skip
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}


def printable(text: str) -> str:
    """Escape characters that move the cursor, change colours or reverse reading order; newlines and tabs stay."""
    return text.translate(_ESCAPED)
