"""CPU kernels by address; nothing is checked here. `isa` is a name of available_isas(), `pool` None means the calling thread."""

from collections.abc import Sequence

PIECE: int
SUM_PIECE: int

class Pool:
    def __init__(self, threads: int, affinity: Sequence[int]) -> None: ...
    @property
    def threads(self) -> int: ...
    def close(self) -> None: ...

def available_isas() -> list[str]: ...
def step(
    isa: str,
    pool: Pool | None,
    n: int,
    rule: int,
    weights_dtype: int,
    grads_dtype: int,
    weights: int,
    rest: int,
    moments: Sequence[int],
    ema: int,
    grads: int,
    scalars: Sequence[float],
    most: float,
    average: Sequence[float],
    /,
) -> None: ...
def sum_squares(isa: str, pool: Pool | None, n: int, x_dtype: int, x: int, initial: float, /) -> float: ...
def cast(isa: str, pool: Pool | None, n: int, src_dtype: int, dst_dtype: int, src: int, dst: int, /) -> None: ...
def accumulate(isa: str, pool: Pool | None, n: int, dst_dtype: int, src_dtype: int, dst: int, src: int, scale: float, /) -> None: ...
def split(isa: str, pool: Pool | None, n: int, src: int, hi: int, lo: int, /) -> None: ...
def join(isa: str, pool: Pool | None, n: int, hi: int, lo: int, dst: int, /) -> None: ...
def copy(isa: str, pool: Pool | None, bytes: int, src: int, dst: int, /) -> None: ...
