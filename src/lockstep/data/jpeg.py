"""The upper rows of a JPEG: what is below a crop is not decoded.

    FF D8 | FF E0 length ... | ... | FF C0 length 08 height width ... | FF DA ... rows ... | FF D9

libjpeg decodes as many rows as the frame header (FF C0) says, and skips the data of the others.
Therefore the height in a copy of the file is reduced. A random crop ends at 85% of the height on
average, and the time of decoding is proportional to the rows.
"""

from __future__ import annotations

import io

from PIL import Image

__all__ = ["upper_rows"]

MARKER = 0xFF
BASELINE, EXTENDED = 0xC0, 0xC1  # frames whose scans hold whole pixels, row by row
OTHER_FRAMES = set(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}  # progressive, arithmetic, lossless
SCAN = 0xDA
END = b"\xff\xd9"
BLOCK = 16  # rows: with chroma of half the height, those of a row of blocks


def upper_rows(image: Image.Image, bottom: float) -> Image.Image:
    """Return a JPEG with at least the rows above `bottom`; `image` itself if it has few others.

    The rows have the same pixels as those of `image`, of which nothing has been decoded yet. A
    truncated file is returned as it is, so that an error does not depend on the crop.
    """
    rows = -(-int(bottom + 1) // BLOCK) * BLOCK  # one more: chroma is interpolated between rows
    file = getattr(image, "fp", None)
    if rows >= image.height or file is None:
        return image
    file.seek(0)
    data = bytearray(file.read())
    place = _find_height(data)
    if place is None or int.from_bytes(data[place : place + 2], "big") != image.height:
        return image
    if data.rfind(END, place) < 0:
        return image
    data[place : place + 2] = rows.to_bytes(2, "big")
    return Image.open(io.BytesIO(data), formats=("JPEG",))


def _find_height(data: bytearray) -> int | None:
    """Return the place of the height in the frame header; None for other kinds of frames."""
    place = 2
    while place + 7 <= len(data) and data[place] == MARKER:
        kind = data[place + 1]
        if kind in (BASELINE, EXTENDED):
            return place + 5
        if kind in OTHER_FRAMES or kind == SCAN:
            return None
        # A marker may be preceded by more bytes FF.
        place += 1 if kind == MARKER else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None
