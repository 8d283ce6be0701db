"""What it takes to read a JSON body, told from its bytes before anything is read."""

LIST_WEIGHT = 8
"""Values that a list or an object counts for: it takes so many times as long to read as a number does."""


def num_values(body: bytes) -> int:
    """Return about how many values a body has, counted by the commas and opening brackets that are in no text.

    It takes a millisecond for each megabyte; reading takes 0.1 to 0.3 us for each value, which nothing interrupts.
    """
    # Escaped backslashes go first, so that what is left before a quote escapes it.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    bare = b"".join(unescaped.split(b'"')[::2])
    return bare.count(b",") + LIST_WEIGHT * (bare.count(b"[") + bare.count(b"{"))
