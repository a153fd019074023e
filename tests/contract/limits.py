"""What each backend cannot do, found by running it. The suite wants each line to stay true."""

from __future__ import annotations

from contract.check import Limit

NO_TYPE = "gloo: Invalid scalar type"
NO_FACTOR = "gloo: Cannot use ReduceOp.PREMUL_SUM"
UNKNOWN = ("int16", "uint16", "uint32", "uint64")
MEMORY = "gloo sends, adds and fills the memory from the tensor's first element on"
WRONG_LAYOUTS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter_input",
    "reduce_scatter_output",
)

GLOO: tuple[Limit, ...] = (
    Limit("* PREMUL_SUM float*", "refuses", NO_FACTOR),
    Limit("* PREMUL_SUM bfloat*", "refuses", NO_FACTOR),
    Limit("* PREMUL_SUM complex*", "refuses", NO_FACTOR),
    *(Limit(f"all_reduce [SPMB]* {dtype} *", "refuses", NO_TYPE) for dtype in UNKNOWN),
    *(Limit(f"reduce* SUM {dtype} *", "refuses", NO_TYPE) for dtype in UNKNOWN),
    *(
        Limit(f"{operation} {dtype} *", "refuses", NO_TYPE)
        for operation in ("broadcast", "gather", "scatter", "all_gather *", "all_to_all *")
        for dtype in (*UNKNOWN, "float8_*")
    ),
    Limit("gather complex*", "refuses", NO_TYPE),
    Limit("all_gather into_rows *", "refuses", "gloo: invalid tensor size"),
    Limit("all_gather uneven *", "breaks", "gloo writes beyond the shorter outputs", least=2),
    Limit("messages to oneself", "refuses", "gloo has no connection to oneself"),
    Limit("asynchronous reduce_scatter * by future", "refuses", "gloo: no getFuture there"),
    Limit("all_to_all uneven_lists *", "refuses", "gloo: invalid tensor size", least=2),
    Limit("layouts all_reduce expanded", "breaks", "gloo writes beyond the memory", least=2),
    Limit("layouts scatter_*", "wrong", MEMORY),
    *(Limit(f"layouts {case} *", "wrong", MEMORY, least=2) for case in WRONG_LAYOUTS),
    Limit("layouts all_gather_single_input *", "refuses", "gloo: invalid tensor size"),
    Limit("aliases reduce_scatter_to_*", "wrong", "gloo adds into an input not yet read", least=2),
    Limit("aliases scatter_to_*", "breaks", "gloo may receive before it has sent", least=2),
)

LIMITS: dict[str, tuple[Limit, ...]] = {"gloo": GLOO, "lockstep": ()}

# Bytes of a message at which a backend takes another path; sizes around each are tried.
THRESHOLDS: dict[str, tuple[int, ...]] = {
    "gloo": (),
    "lockstep": (8 << 10, 16 << 10, 32 << 10, 64 << 10),
    **dict.fromkeys(("lockstep-small", "lockstep-shared", "lockstep-mixed"), (1 << 10, 2 << 10)),
}

# Variables that shrink a backend's pieces, so that small messages take the long paths.
SMALL_PIECES = {
    "LOCKSTEP_SLOT_BYTES": "512",
    "LOCKSTEP_STAGING_BYTES": "1024",
    "LOCKSTEP_CELL_BYTES": "128",
    "LOCKSTEP_BOUNCE_BYTES": "512",
    "LOCKSTEP_CACHE_BYTES": "4096",
}

# Backends whose sums are those of the tree, on every rank and in every run.
GUARANTEE_TREE = ("lockstep",)
