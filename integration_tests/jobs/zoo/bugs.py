"""Which bugs the zoo has, and what must be said of each. No torch."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug in a layout of the zoo's job.

    Attributes:
        layout: Layout that shows it, or report of a job that is not the zoo's.
        name: What the job calls it.
        phase: Phase of the first difference; `FAILS`: the job fails.
        where: Pattern of the module or parameter of the first difference.
        likely: Words that are said to be likely, or of the failure.
    """

    layout: str
    name: str
    phase: str
    where: str = ""
    likely: str = ""

    @property
    def is_tied(self) -> bool:
        """Whether it is of a model whose table is its head."""
        return self.name == "tied-end"


def _torch_is_before(minor: int) -> bool:
    """Tell whether torch is older than 2.`minor`, or not installed."""
    try:
        return int(version("torch").split(".")[1]) < minor
    except PackageNotFoundError:
        return True


SOUND = ("dp", "fsdp", "tp", "ep", "cp", "pp", "pp tied")
"""Layouts whose job without a bug must equal one process; `tied`: with one table for both ends."""
BUGS = (
    Bug("dp", "no-reduce", "gradient", r"layers\.1\.norm1\.weight", "sum over them is missing"),
    Bug("dp", "microbatch-sum", "gradient", likely="2 times"),
    Bug("dp", "reduce-each-microbatch", "gradient"),
    Bug("dp", "local-mean", "loss", likely="its mean"),
    Bug("dp", "last-microbatch", "input", likely="batches"),
    Bug("dp", "same-data", "input", likely="batches"),
    Bug("dp", "start", "first weight", r"norm\.weight"),
    Bug("dp", "stale-copy", "forward", "norm"),
    Bug("dp", "bf16-reduce", "gradient"),
    Bug("dp", "norm-local", "gradient norm"),
    Bug("dp", "norm-twice", "gradient norm", likely="twice"),
    Bug("dp", "clip-per-rank", "gradient norm"),
    Bug("dp", "decay", "weight", "feed", "update"),
    Bug("dp", "rate-per-rank", "learning rate", "group 0"),
    Bug("dp", "resume-moments", "weight", likely="update"),
    Bug("dp", "eval-other", "evaluation", "norm"),
    Bug("dp", "eval-mode", "forward", r"layers\.0\.norm1"),
    Bug("dp", "dropout-on", "forward", r"layers\.0\.norm1", "dropout could explain it"),
    Bug("tp", "tp-input-gradient", "backward", r"layers\.0\.norm2|layers\.1\.norm1"),
    Bug("tp", "tp-bias-twice", "forward", r"layers\.0\.attention", "mask"),
    Bug("tp", "tp-kv", "gradient", r"attention\.kv\.weight"),
    Bug("tp", "tp-norm", "gradient", r"^norm\.weight"),
    Bug("tp", "tp-smoothing", "backward"),
    Bug("tp", "tp-log-size", "loss"),
    Bug("tp", "lora-no-sum", "forward", r"layers\.0\.attention"),
    Bug("ep", "router-gradient", "backward", r"layers\.1\.feed\.router"),
    Bug("ep", "router-detached", "backward", r"layers\.1\.(feed\.router|norm2)"),
    Bug("ep", "router-not-normalised", "forward", r"layers\.1\.feed"),
    Bug("ep", "ep-scaled", "gradient", r"feed\.(up|down)", "2 times"),
    Bug("ep", "ep-averaged", "gradient", r"feed\.(up|down)", "1/2"),
    Bug("ep", "expert-lost", "forward", r"layers\.1\.feed", "sum over ranks"),
    Bug("ep", "shared-twice", "forward", r"layers\.1\.feed", "sum over ranks"),
    Bug("cp", "cp-documents", "forward", r"layers\.0\.attention", "mask"),
    Bug("cp", "cp-positions", "forward", "embed|norm1|layers"),
    Bug("cp", "cp-off", "forward", r"layers\.0\.attention", "keys of other ranks"),
    Bug("cp", "cp-averaged", "gradient", likely="1/2"),
    Bug("pp", "last-microbatch", "gradient"),
    Bug("pp", "tied-end", "gradient", r"embed\.weight", "sum over them is missing"),
)
"""As public threads of training systems tell them."""
_LATE = Bug("late-gradient", "reported", FAILS, likely="expects uniform gradient dtype")
"""Of torch's FSDP2, which was mended in 2.15."""
_MISSING, _OTHER = "a sum over them is missing", "the jobs are given other batches"
REPORTS = (
    Bug("changing-lengths", "reported", "gradient", r"3\.bias", "what they reduce is right"),
    Bug("scattered", "reported", "forward", "out", "what out was given is equal"),
    Bug("second-resume", "reported", "input", likely=_OTHER),
    Bug("tied-export", "reported", "forward", "embed", "changed after the last update"),
    Bug("sequence-balance", "reported", "loss", likely="outputs are equal and the loss is not"),
    Bug("cut-experts", "reported", "gradient", "router", _MISSING),
    Bug(
        "odd-buckets", "reported", "weight", r"1\.bias", "the optimizer's options, groups or state"
    ),
    Bug("transposed-sum", "reported", "forward", likely=_MISSING),
    Bug("forked-data", "reported", "input", likely=_OTHER),
    Bug("alike-chunks", "reported", "first weight", r"3\.weight", "begin with other weights"),
    Bug("hybrid-shard", "reported", "gradient", r"3\.bias", _MISSING),
    *([_LATE] if _torch_is_before(15) else []),
    Bug("leftover", "reported", FAILS, likely="step-2.tmp is there already"),
    Bug("uneven-evaluation", "reported", FAILS, likely="Timed out waiting"),
)
"""Reports of 2026, each a job of its own in `integration_tests.jobs.zoo.reports`."""
