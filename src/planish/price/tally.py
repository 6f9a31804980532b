"""Counts bytes held under names: what a piece of code allocates, replayed with sizes in place of tensors."""


class Tally:
    """Bytes held now and at most, since it was made.

    A name stands for a variable: what it held before goes only once the new bytes are there, as when Python rebinds.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._held: dict[str, int] = {}

    def hold(self, **sizes: int) -> None:
        """Allocate each size under its name, one after the other."""
        for name, nbytes in sizes.items():
            self.spike(nbytes)
            self.live_bytes += nbytes - self._held.get(name, 0)
            self._held[name] = nbytes

    def drop(self, *names: str) -> None:
        """Free what the names hold."""
        for name in names:
            self.live_bytes -= self._held.pop(name, 0)

    def rename(self, **names: str) -> None:
        """Let each name hold what its value held; what it held before is freed."""
        for name, before in names.items():
            self.drop(name)
            self._held[name] = self._held.pop(before)

    def free(self, nbytes: int) -> None:
        """Free bytes that were there before."""
        self.live_bytes -= nbytes

    def spike(self, nbytes: int) -> None:
        """Allocate bytes that are freed at once."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)
