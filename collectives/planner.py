"""Which scheme reduces which tensor: predicted by the cost model, corrected by what calls really took, agreed by hash.

Every input of a decision is equal on all ranks: the gathered k, the union of past results, the agreed link, and
observed times that ride in the metadata round of the tensor's next call (the slowest rank's count). So all ranks decide
the same without asking; a digest of the inputs so far rides along and proves it. Tensors of one shape share what is
measured, and a settled tensor compares all schemes only now and then, because at every call that would cost more than
two ranks save by the choice.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any

import numpy as np

from collectives.cost import COSTS, Link, Load, Prediction, dense_wins_on_elements, predict
from collectives.errors import CollectiveMismatch, ConfigError
from collectives.sparse.agreement import Agreement

ROW_SCHEMES = ("column", "zen_rows", "hashed_rows", "hashed_blocks", "agsparse", "sparcml", "dense")
ELEMENT_SCHEMES = ("zen", "agsparse", "sparcml", "dense")

SWITCH_GAIN = 0.95
"""A scheme replaces the current one only if it is expected to take less than this share of its time."""
OPTIMISM = 0.5
"""A scheme not yet measured on this tensor is hoped to take this share of its prediction, so that it gets a trial."""
TRIALS = 3
"""Calls until a scheme counts as measured; the first (code generation, fresh buffers) is not counted."""
WINDOW = 5
"""Observed-to-predicted ratios kept per scheme; their median is the correction."""
GAMMA_WEIGHT = 0.3
RECONSIDER_CALLS = 16
"""Once its scheme is measured, a tensor compares all schemes again after this many calls ..."""
RECONSIDER_CHANGE = 0.1
"""... or when the number of touched rows has changed by this share."""
MAX_ROW_SHARE = 0.5
"""A dense gradient with more touched rows than this is not tried as sparse rows: even two ranks would gain little."""
MAX_SCAN_PAUSE = 64
MAX_RECORDS = 10_000
POLICY_REASON = "set by the policy"


@dataclass(frozen=True)
class Choice:
    """One decision. predicted_bytes: payload of the busiest rank, sent or received, whichever is more.

    model_s: seconds by the cost model alone. predicted_s: the same, corrected by what earlier calls took.
    alternatives: the schemes not taken, fastest first, with corrected seconds.
    """

    scheme: str
    predicted_bytes: int
    model_s: float
    predicted_s: float
    reason: str
    alternatives: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class CallRecord:
    """One reduction of one tensor. Observed figures are the slowest rank's once its next call has agreed on them.

    event: "" or what departs from the plan: a dense fallback of a sparse gradient, a switch of scheme.
    """

    tensor: str
    call: int
    scheme: str
    reason: str
    predicted_bytes: int
    observed_bytes: int
    model_s: float
    predicted_s: float
    observed_s: float
    event: str


def load_of(agreement: Agreement, *, is_dense: bool = False) -> Load:
    """The load that all ranks agreed on; its union is still unknown and stands at the most it can be."""
    union = min(float(agreement.k.sum()), float(agreement.num_rows))
    return Load(
        agreement.k, union, agreement.num_rows, agreement.width, agreement.itemsize, agreement.id_bytes, is_dense
    )


def predicted_union(k: np.ndarray, gamma: float | None, num_rows: int) -> float:
    """K = gamma * mean(k), held between max(k) and min(sum(k), num_rows); without a past, as for independent rows."""
    if gamma is None:
        share = np.minimum(k / max(num_rows, 1), 1 - 1e-12)
        expected = num_rows * -math.expm1(float(np.log1p(-share).sum()))
    else:
        expected = gamma * float(k.mean())
    return min(max(expected, float(k.max())), float(k.sum()), float(num_rows))


def choose_scheme(
    load: Load,
    link: Link,
    override: str | None = None,
    correction: Mapping[str, float] | None = None,
    current: str | None = None,
    value_codec: str | None = None,
) -> Choice:
    """The scheme with the least expected time; a pure function, so equal inputs give equal choices on all ranks.

    override: a scheme name from the policy; taken as it is. correction: observed over modelled seconds of the schemes
    measured so far; unmeasured ones are favoured by `OPTIMISM`. current: kept unless another gains `SWITCH_GAIN`.
    value_codec: also consider the column split with values in this codec.
    Raises ConfigError for an override without a cost formula.
    """
    if override is not None and override.partition("+")[0] not in COSTS:
        raise ConfigError(f"unknown scheme '{override}'; schemes are {', '.join(COSTS)}")
    quantised = (f"column+{value_codec}",) if value_codec and load.width >= load.size > 1 else ()
    names = dict.fromkeys((*(ROW_SCHEMES if load.width > 1 else ELEMENT_SCHEMES), *quantised, override or "dense"))
    known = correction or {}
    bias = min(known.values(), default=1.0)
    model = {name: predict(name, load, link) for name in names}
    likely = {name: replace(p, seconds=p.seconds * known.get(name, bias)) for name, p in model.items()}

    def hoped_s(name: str) -> float:
        return likely[name].seconds * (OPTIMISM if known and name not in known else 1.0)

    ranking = sorted(names, key=hoped_s)

    def choice(name: str, reason: str) -> Choice:
        rest = sorted((p for p in likely.values() if p.scheme != name), key=lambda p: p.seconds)
        return Choice(name, model[name].payload_bytes, model[name].seconds, likely[name].seconds, reason, tuple(rest))

    best, second = ranking[0], ranking[1]
    if override is not None:
        return choice(override, POLICY_REASON)
    share = load.total / load.size / load.num_rows
    if load.width == 1 and dense_wins_on_elements(load):
        return choice("dense", f"too dense for element ids ({share:.1%} touched)")
    if load.is_dense and share > MAX_ROW_SHARE:
        return choice("dense", f"a dense gradient with {share:.1%} of its rows touched")
    if current is not None and current in names and hoped_s(best) >= SWITCH_GAIN * hoped_s(current):
        return choice(current, "fastest" if best == current else f"kept: {best} gains under {1 - SWITCH_GAIN:.0%}")
    if known and best not in known:
        return choice(best, f"trial: {likely[best].seconds * 1e3:.3g} ms by the model, not yet measured here")
    return choice(best, f"fastest: {second} would take {likely[second].seconds * 1e3:.3g} ms")


@dataclass
class _Shape:
    """What is measured on tensors of one shape; equal on all ranks."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    num_observed: dict[str, int] = field(default_factory=dict)

    def correction(self) -> dict[str, float]:
        return {name: median(ratios) for name, ratios in self.ratios.items() if self.num_observed[name] >= TRIALS}

    def observe(self, scheme: str, seconds: float, model_s: float) -> None:
        seen = self.num_observed[scheme] = self.num_observed.get(scheme, 0) + 1
        if seen > 1 and model_s > 0:
            ratios = self.ratios.setdefault(scheme, [])
            ratios.append(seconds / model_s)
            del ratios[:-WINDOW]


@dataclass
class _Tensor:
    """State of one tensor. All of it but `pending` is equal on all ranks.

    considered: calls until all schemes are compared again.
    considered_rows, considered_codec: what the last comparison was made for.
    """

    gamma: float | None = None
    current: str | None = None
    calls: int = 0
    considered: int = 0
    considered_rows: int = 0
    considered_codec: str | None = None
    scan_pause: int = 0
    scan_wait: int = 0
    pending: tuple[CallRecord, str] | None = None
    """The last call, with its shape, until the ranks agree on what it took."""

    def shared(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "pending"}


def _shape_of(load: Load) -> str:
    return f"{load.num_rows}x{load.width}x{load.itemsize}{' dense' if load.is_dense else ''}"


class Planner:
    """Decides per tensor and learns from every call. One per hook; keyed by tensor name; not thread-safe.

    One call of a tensor is `record` -> metadata round -> `settle` -> `choose` -> the reduction -> `observe`.
    """

    RECORD_LENGTH = 3

    def __init__(self, link: Link):
        self.link = link
        self.choices: dict[str, Choice] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._shapes: dict[str, _Shape] = {}
        self._digest = 0
        """Of all that was observed and agreed, in the order of the calls, which is the same on all ranks."""
        self._history: deque[CallRecord] = deque(maxlen=MAX_RECORDS)

    def record(self, name: str) -> tuple[int, int, int]:
        """This rank's part of the metadata round: state digest, nanoseconds and payload bytes of the last call."""
        tensor = self._tensor(name)
        counters = self._digest, tensor.calls, tensor.considered, tensor.considered_rows, tensor.scan_wait
        digest = zlib.crc32(struct.pack("<5q", *counters))
        if tensor.pending is None:
            return digest, 0, 0
        last, _ = tensor.pending
        return digest, round(last.observed_s * 1e9), last.observed_bytes

    def settle(self, name: str, table: np.ndarray) -> None:
        """Take in the gathered records (int64 [n, 3]). Raises CollectiveMismatch where the ranks' states differ."""
        digests, nanoseconds, payloads = table.T.tolist()
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise CollectiveMismatch(
                f"tensor '{name}': the planner's state on rank(s) {odd} differs from rank 0's. Load the same "
                f"state_dict on all ranks, and use the same policy and versions everywhere."
            )
        tensor = self._tensor(name)
        if tensor.pending is None:
            return
        (last, shape), tensor.pending = tensor.pending, None
        agreed = replace(last, observed_s=max(nanoseconds) / 1e9, observed_bytes=max(payloads))
        self._mix(agreed.observed_s, agreed.observed_bytes)
        self._history.append(agreed)
        self._shape(shape).observe(agreed.scheme, agreed.observed_s, agreed.model_s)

    def choose(self, name: str, load: Load, override: str | None = None, value_codec: str | None = None) -> Choice:
        """Decide this call. `load.union` is replaced by the prediction from this tensor's past."""
        tensor, shape = self._tensor(name), self._shape(_shape_of(load))
        load = replace(load, union=predicted_union(load.k, tensor.gamma, load.num_rows))
        num_seen = shape.num_observed.get(tensor.current or "", 0)
        if override is None and tensor.current is not None and 0 < num_seen < TRIALS:
            choice = choose_scheme(load, self.link, tensor.current, shape.correction())
            choice = replace(choice, reason=f"trial: call {num_seen + 1} of {TRIALS}")
        elif override is None and self._is_settled(tensor, load, value_codec):
            tensor.considered -= 1
            choice = self._repeat(name, tensor.current or "", load, shape)
        else:
            choice = choose_scheme(load, self.link, override, shape.correction(), tensor.current, value_codec)
            tensor.considered = RECONSIDER_CALLS if choice.scheme == tensor.current and num_seen >= TRIALS else 0
            tensor.considered_rows, tensor.considered_codec = load.total, value_codec
        if load.is_dense:
            tensor.scan_pause = min(2 * tensor.scan_pause + 1, MAX_SCAN_PAUSE) if choice.scheme == "dense" else 0
            tensor.scan_wait = tensor.scan_pause
        self.choices[name] = choice
        return choice

    def _is_settled(self, tensor: _Tensor, load: Load, value_codec: str | None) -> bool:
        """Whether the last comparison still holds."""
        change = abs(load.total - tensor.considered_rows)
        is_alike = change <= RECONSIDER_CHANGE * tensor.considered_rows and value_codec == tensor.considered_codec
        return tensor.considered > 0 and is_alike

    def _repeat(self, name: str, scheme: str, load: Load, shape: _Shape) -> Choice:
        """The last choice again, with the figures of this load."""
        model = predict(scheme, load, self.link)
        likely_s = model.seconds * shape.correction().get(scheme, 1.0)
        last = self.choices.get(name, Choice(scheme, 0, 0.0, 0.0, "fastest when last compared"))
        return replace(last, predicted_bytes=model.payload_bytes, model_s=model.seconds, predicted_s=likely_s)

    def scan_due(self, name: str) -> bool:
        """Whether to scan this dense gradient for zero rows now; ask once a call. Pauses double while it is in vain."""
        tensor = self._tensor(name)
        if tensor.scan_wait == 0:
            return True
        tensor.scan_wait -= 1
        return False

    def observe(self, name: str, load: Load, union: int | None, payload_bytes: int, seconds: float) -> None:
        """Note what the chosen reduction did: distinct rows of the result (None: not known), and this rank's cost."""
        tensor, choice = self._tensor(name), self.choices[name]
        events = []
        if choice.scheme == "dense" and not load.is_dense and choice.reason != POLICY_REASON:
            events.append("dense fallback")
        if tensor.current not in (None, choice.scheme):
            events.append(f"switched from {tensor.current}")
        if load.total and union is not None:
            now = union * load.size / load.total
            tensor.gamma = now if tensor.gamma is None else tensor.gamma + GAMMA_WEIGHT * (now - tensor.gamma)
        tensor.current = choice.scheme
        tensor.calls += 1
        self._mix(zlib.crc32(choice.scheme.encode()), choice.model_s, -1 if union is None else union)
        record = CallRecord(
            tensor=name,
            call=tensor.calls,
            scheme=choice.scheme,
            reason=choice.reason,
            predicted_bytes=choice.predicted_bytes,
            observed_bytes=payload_bytes,
            model_s=choice.model_s,
            predicted_s=choice.predicted_s,
            observed_s=seconds,
            event=", ".join(events),
        )
        tensor.pending = record, _shape_of(load)

    def records(self) -> list[CallRecord]:
        """The newest `MAX_RECORDS` calls; each tensor's last one still carries this rank's own figures."""
        return [*self._history, *(t.pending[0] for t in self._tensors.values() if t.pending is not None)]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, equal on all ranks, independent of process groups."""
        return {
            "size": self.link.size,
            "digest": self._digest,
            "tensors": {name: tensor.shared() for name, tensor in self._tensors.items()},
            "shapes": {name: deepcopy(asdict(shape)) for name, shape in self._shapes.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, on all ranks alike. With another number of ranks its measurements do not apply."""
        nothing: Mapping[str, Any] = {"digest": 0, "tensors": {}, "shapes": {}}
        known = state if state["size"] == self.link.size else nothing
        self._digest = known["digest"]
        self._tensors = {name: _Tensor(**tensor) for name, tensor in known["tensors"].items()}
        self._shapes = {name: _Shape(**deepcopy(shape)) for name, shape in known["shapes"].items()}

    def _tensor(self, name: str) -> _Tensor:
        return self._tensors.setdefault(name, _Tensor())

    def _mix(self, *numbers: float) -> None:
        self._digest = zlib.crc32(struct.pack(f"<{len(numbers)}d", *numbers), self._digest)

    def _shape(self, name: str) -> _Shape:
        return self._shapes.setdefault(name, _Shape())
