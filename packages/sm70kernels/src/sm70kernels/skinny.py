"""How the dense kernels for few rows divide their work: include/skinny.cuh holds the arithmetic.

The share of K a warp takes depends on the weight's shape alone, so that a row's bits do not depend on how many rows there are. How many
rows and columns a block takes changes no bits and follows the number of rows.
"""

from dataclasses import dataclass

SHARES = (1, 2, 4, 8)
"""Configurations: warps that share one column's sum over K."""

WARPS = 8
"""Warps of a block."""

NARROWEST = 2 * WARPS
"""Fewest columns of a block whose warps do not share sums."""

STEP = 256
"""k that a warp reads at a time: 8 a lane."""

ENOUGH = 1024
"""Warps that read 2 KiB each at a time: 13 a multiprocessor of a V100, four times what its memory latency asks for."""

REAL = (
    (4120, 2560), (3584, 2560), (2560, 1536), (640, 2560), (512, 2560), (336, 10240), (320, 2560), (2560, 160), (10240, 320), (2560, 2560),
    (16480, 2560), (13312, 2560), (2560, 6144), (1280, 2560), (2560, 640),
)  # fmt: skip
"""The model's weights [N, K]. On one of four GPUs: recurrent and sparse attention projections in and out, indexer, router, hyper-connection
down and up, shared expert in and out, n-gram value. On one GPU alone: the projections and the shared expert."""


@dataclass(frozen=True)
class Tile:
    """What a block computes: `rows` of x by groups * `columns` of w, each column's sum over K in `shares` parts."""

    rows: int
    columns: int
    shares: int

    @property
    def groups(self) -> int:
        return WARPS // self.shares

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def defines(self) -> dict[str, int]:
        return dict(ROWS=self.rows, COLUMNS=self.columns, WARPS_K=self.shares, GROUPS=self.groups)

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks for m rows and n columns."""
        return -(-m // self.rows), -(-n // (self.groups * self.columns))


def tile(m: int, shares: int) -> Tile:
    """Return the tile for m rows: 8 rows take half the columns, so that their sums fit the registers of two blocks a multiprocessor."""
    rows = next(rows for rows in (1, 2, 4, 8) if m <= rows or rows == 8)
    return Tile(rows, 2 if rows == 8 else 4, shares)


def shares(n: int, k: int) -> int:
    """Return how many warps share the sums over k of a weight [n, k]: as few as keep the memory busy, no more than there are steps."""
    steps = -(-k // STEP)
    return next((count for count in SHARES if n // 4 * count >= ENOUGH or 2 * count > steps), SHARES[-1])
