"""A rank's bytes in lines, as they may be shown between those of other ranks. Pure.

"one\\ntw"  then  "o\\n"        ->  one | two
"10%\\r20%\\r30%"              ->  30%, at most once a second: a progress bar
"name? "  and then nothing    ->  name?, after a moment: a question
a megabyte without an end     ->  pieces of 64 KiB
"""

from __future__ import annotations

__all__ = ["Lines"]

LONGEST = 1 << 16  # bytes
PATIENCE = 0.3  # seconds that an unfinished line waits for its end
REFRESH = 1.0  # seconds between two states of a line that is overwritten


class Lines:
    """Cuts one stream; `now` is any clock in seconds."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0  # when the rest grew, or was last shown
        self._continued = False  # the rest's beginning was shown as a line already

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take in `data` and return the lines that it finishes, without their ends."""
        *finished, rest = (self._rest + data).split(b"\n")
        lines = [_visible(line) for line in finished]
        if lines:
            if self._continued and not lines[0]:
                del lines[0]
            self._continued = False
        while len(rest) > LONGEST:
            lines.append(rest[:LONGEST])
            rest, self._continued = rest[LONGEST:], True
        if finished or b"\r" not in rest or not self._rest:
            self._since = now
        self._rest = rest
        return lines

    def due(self, now: float) -> list[bytes]:
        """Return the unfinished line where it has waited long enough."""
        patience = REFRESH if b"\r" in self._rest else PATIENCE
        if not self._rest or now - self._since < patience:
            return []
        self._since = now
        return self.rest()

    def rest(self) -> list[bytes]:
        """Return the unfinished line, at the end of the stream or when it is due."""
        line, self._rest = _visible(self._rest), b""
        self._continued = self._continued or bool(line)
        return [line] if line else []


def _visible(line: bytes) -> bytes:
    """Return what a terminal would show of a line that was overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
