"""Which codec, if any, reduces which stretch of a dense gradient: predicted, tried, measured, and taken back.

A stretch is reduced plainly first, which shows how long that takes and how much of it the backward pass hides. Only
where enough is exposed and a candidate is predicted to take less than `USE_BELOW` of the plain time is it tried; what
the trials took, and what they held back of the gradient, decides (`held_back`). Guards (error, residual, non-finite
values, time) ban a codec and all that are coarser.

Decisions are made at `round_due` calls from figures that all ranks have exchanged there (the slowest, the worst), so
that they are equal on all ranks; a digest of the state rides along and proves it. Between rounds nothing changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import numpy as np

from collectives.codec_cost import Candidate, CodecSpeed, DenseLoad, candidates, plain
from collectives.cost import Link
from collectives.errors import CollectiveMismatch
from collectives.guards import coarser, ppm, violation
from collectives.planner import SWITCH_GAIN, TRIALS, WINDOW

USE_BELOW = 0.9
MIN_SAVING_S = 20e-6
OPTIMISM = 0.75
"""A codec not yet measured here is hoped to take this share of its prediction, so that it gets a trial."""
MIN_EXPOSED_SHARE = 0.1
"""Agarwal et al., MLSys'22: below this share of the step, gradient compression did not pay."""

MAX_HELD_BACK = 0.999

MIN_CODED_STEPS = 10
"""Steps under one plan before they are held against plain ones."""
DOUBTFUL_SHARE = 0.25
"""A codec that saves less than this share of a step is held once against plain steps of now: those from which the first
measurement came paid for buffers, code generation and whatever else begins with a run."""
SLOWER = 1.02
"""Steps this many times as long as plain ones take the codecs back."""
MIN_STEPS = 5
"""Plain steps before a codec is tried; the first of a run pay for buffers and code generation."""
EVERY_CALL_UNTIL = 32
ROUND_CALLS = 50
"""Calls between two rounds once a stretch has settled."""
HOLD_CALLS = 200
"""A settled choice stays this long unless a guard speaks."""
CANARY_CALLS = 200
MAX_RESIDUAL_RATIO = 10.0

TRIAL = "trial"
RECORD_FIELDS = (
    "digest",
    "time_ns",
    "bytes",
    "exposed_ns",
    "step_ns",
    "error_ppm",
    "residual_ppm",
    "nonfinite",
    "coded_step_ns",
)


@dataclass(frozen=True)
class DenseChoice:
    """What reduces a stretch now. predicted_s: the model, corrected by what was measured; plain_s: the same without a
    codec. alternatives: corrected seconds by key."""

    candidate: Candidate
    predicted_s: float
    plain_s: float
    reason: str
    alternatives: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_off(self) -> bool:
        return self.candidate.codec == "off"


@dataclass(frozen=True)
class Exposure:
    """Communication that the backward pass does not hide, in seconds per step, under plain reductions."""

    exposed_s: float
    step_s: float

    @property
    def share(self) -> float:
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


def held_back(relative_error: float) -> float:
    """Further steps that a codec costs, per step: the update holds 1 - error^2 of the gradient's square, and the progress
    of a step with it. Error feedback delivers the rest, but late and, to an adaptive optimizer, in bursts that it divides
    by their own size (Karimireddy et al., ICML'19: with a residual too the rate falls with 1 - error^2).
    """
    return 1 / (1 - min(relative_error**2, MAX_HELD_BACK)) - 1


def choose_codec(
    found: Sequence[Candidate],
    baseline: Candidate,
    exposure: Exposure | None,
    correction: Mapping[str, float] | None = None,
    current: str = "off",
    *,
    errors: Mapping[str, float] | None = None,
    fixed: bool = False,
) -> DenseChoice:
    """What takes the least expected time to the same progress if it is worth it, otherwise "off" with the reason; pure.

    found: what policy, support and memory allow. exposure: None while it is not known. correction: observed over
    modelled seconds by key; the plain reduction's, where known, also stands for candidates not yet measured. errors:
    relative error of the mean by key, of one step without a residual; what was never looked at is taken for exact.
    """
    known, lost = correction or {}, errors or {}
    bias = known.get("off", 1.0)
    plain_s = baseline.model_s * bias

    def likely_s(c: Candidate) -> float:
        return c.model_s * known.get(c.key, bias)

    def hoped_s(c: Candidate) -> float:
        """Further steps cost this reduction again, and its part of what else a step takes."""
        further, rest_s = held_back(lost.get(c.key, 0.0)), 0.0
        if exposure is not None:
            part = plain_s / max(exposure.exposed_s, plain_s)
            rest_s = part * max(0.0, exposure.step_s - exposure.exposed_s)
        hope = OPTIMISM if known and c.key not in known else 1.0
        return likely_s(c) * hope * (1 + further) + rest_s * further

    times = {c.key: likely_s(c) for c in found}

    def choice(c: Candidate, reason: str) -> DenseChoice:
        return DenseChoice(c, likely_s(c), plain_s, reason, times)

    if not found:
        return choice(baseline, "no codec is allowed")
    if fixed:  # by the model alone, so that a run can be repeated
        return choice(min(found, key=lambda c: c.model_s), "set by the policy")
    best = min(found, key=hoped_s)
    if exposure is None:
        return choice(baseline, "measuring the plain reduction")
    if exposure.share < MIN_EXPOSED_SHARE:
        return choice(baseline, f"communication is hidden: {exposure.share:.1%} of the step is exposed")
    kept = next((c for c in found if c.key == current), None)
    if kept is not None and hoped_s(best) >= SWITCH_GAIN * hoped_s(kept):
        best = kept
    saving_s = min(plain_s - hoped_s(best), exposure.exposed_s)
    if hoped_s(best) >= USE_BELOW * plain_s or saving_s <= MIN_SAVING_S:
        return choice(baseline, f"{best.key} would take {likely_s(best) * 1e3:.3g} of {plain_s * 1e3:.3g} ms")
    if known and best.key not in known:
        return choice(best, f"{TRIAL}: {likely_s(best) * 1e3:.3g} ms by the model, {plain_s * 1e3:.3g} ms without")
    reason = f"{likely_s(best) * 1e3:.3g} ms instead of {plain_s * 1e3:.3g} ms"
    faster = min((c for c in found if c.key in lost and likely_s(c) < likely_s(best)), key=likely_s, default=best)
    if held_back(lost.get(faster.key, 0.0)) > held_back(lost.get(best.key, 0.0)):
        reason += (
            f"; {faster.key}, {likely_s(faster) * 1e3:.3g} ms, holds back {lost[faster.key] ** 2:.0%} of the gradient"
        )
    return choice(best, reason)


@dataclass
class _Spent:
    """What this rank saw since the last round."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: int = 0
    relative_error: float = 0.0
    residual_ratio: float = 0.0
    num_nonfinite: int = 0


@dataclass
class _Stretch:
    """State of one stretch. All but `spent` and `choice` is equal on all ranks and goes into the digest."""

    current: str = "off"
    model_s: float = 0.0
    calls: int = 0
    held_until: int = 0
    was_doubted: bool = False
    """Whether plain steps have been measured once more, after those that the run began with."""
    ratios: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """By key, of its first call."""
    num_observed: dict[str, int] = field(default_factory=dict)
    banned: list[str] = field(default_factory=list)
    exposed_ns: int = 0
    step_ns: int = 0
    coded_step_ns: int = 0
    residual_ratio: float = 0.0
    relative_error: float = 0.0
    observed_s: float = 0.0
    observed_bytes: int = 0
    spent: _Spent = field(default_factory=_Spent)
    choice: DenseChoice | None = None

    def correction(self) -> dict[str, float]:
        return {key: median(ratios) for key, ratios in self.ratios.items() if self.num_observed[key] >= TRIALS}

    def is_settled(self) -> bool:
        """Plain, or with a codec that has had its trial."""
        return self.current == "off" or self.num_observed.get(self.current, 0) >= TRIALS

    def exposure(self) -> Exposure | None:
        return Exposure(self.exposed_ns / 1e9, self.step_ns / 1e9) if self.step_ns else None

    def shared(self) -> dict[str, Any]:
        local = ("spent", "choice")
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in local}


@dataclass(frozen=True)
class Stretch:
    """What the planner knows of a stretch of parameters that lie side by side in a bucket."""

    label: str
    codecs: tuple[str, ...]
    load: DenseLoad
    fixed: bool = False


class DensePlanner:
    """Decides per stretch, by label. One per hook; not thread-safe.

    A call is `round_due` -> (at a round: `record` -> exchange -> `settle` -> `decide`) -> the reduction -> `observe`.
    """

    def __init__(self, link: Link):
        self.link = link
        self.events: list[str] = []
        """What departed from the plan, with label and reason; equal on all ranks."""
        self._stretches: dict[str, _Stretch] = {}
        self._exposures: list[Exposure] = []
        self._coded_steps_s: list[float] = []
        """Of the last steps under one plan with a codec in it, none on trial."""
        self._coded_plan = ""
        self.all_off, self.all_settled = True, True
        """No stretch of the running step carries a codec, so that what is exposed is that of plain reductions; none that
        does is on trial."""

    def note_step(self, exposed_s: float, step_s: float) -> None:
        """One backward pass is over: what this rank waited for communication at its end, and the time of the step."""
        plan = self.plan_hash()
        if plan != self._coded_plan:
            self._coded_plan, self._coded_steps_s = plan, []
        if self.all_off:
            self._exposures = [*self._exposures, Exposure(exposed_s, step_s)][-MIN_STEPS:]
        elif self.all_settled:
            self._coded_steps_s = [*self._coded_steps_s, step_s][-2 * MIN_CODED_STEPS :]
        self.all_off = self.all_settled = True

    def round_due(self, label: str) -> bool:
        """Whether this call starts with an exchange of figures: so that a trial, too, lasts calls and not rounds."""
        stretch = self._of(label)
        return stretch.calls < EVERY_CALL_UNTIL or stretch.calls % ROUND_CALLS == 0 or not stretch.is_settled()

    def canary_due(self, label: str) -> bool:
        """Whether to compare this call's result with the exact mean: one stretch at a time, in turn."""
        order, stretch = list(self._stretches), self._of(label)
        turn = stretch.calls // CANARY_CALLS % len(order) == order.index(label)
        return stretch.current != "off" and (self.is_first(label) or (turn and stretch.calls % CANARY_CALLS == 0))

    def is_first(self, label: str) -> bool:
        """Whether what reduces this stretch now has never done so before."""
        stretch = self._of(label)
        return not stretch.num_observed.get(stretch.current) and not stretch.spent.seconds

    def choice(self, label: str) -> DenseChoice:
        """The choice that holds for `label`, after its first round."""
        chosen = self._of(label).choice
        assert chosen is not None
        return chosen

    def needs_choice(self, label: str) -> bool:
        """Whether nothing was decided since the start or the last `load_state_dict`."""
        return self._of(label).choice is None

    def record(self, label: str) -> list[int]:
        """This rank's part of a round: int64 by `RECORD_FIELDS`."""
        stretch = self._of(label)
        text = json.dumps([label, stretch.shared()], sort_keys=True).encode()
        spent = stretch.spent
        seen = self._exposures
        return [
            int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"),
            round(median(spent.seconds) * 1e9) if spent.seconds else 0,
            spent.num_bytes,
            round(median(e.exposed_s for e in seen) * 1e9) if len(seen) >= MIN_STEPS else -1,
            round(median(e.step_s for e in seen) * 1e9) if len(seen) >= MIN_STEPS else 0,
            ppm(spent.relative_error),
            ppm(spent.residual_ratio),
            spent.num_nonfinite,
            round(median(coded) * 1e9) if len(coded := self._coded_steps_s) >= MIN_CODED_STEPS else 0,
        ]

    def settle(self, label: str, table: np.ndarray) -> None:
        """Take in the gathered records (int64 [n, 9]). Raises CollectiveMismatch where the ranks' states differ.

        The wait of a rank holds its peers' delay too, so the rank that waited least shows what is exposed.
        """
        odd = np.flatnonzero(table[:, 0] != table[0, 0]).tolist()
        if odd:
            raise CollectiveMismatch(
                f"gradient of {label}: the planner's state on rank(s) {odd} differs from rank 0's. Load the same "
                f"state_dict on all ranks, and use the same policy and versions everywhere."
            )
        worst = dict(zip(RECORD_FIELDS, map(int, table.max(axis=0)), strict=True))
        stretch = self._of(label)
        if (least := int(table[:, 3].min())) >= 0:
            stretch.exposed_ns, stretch.step_ns = least, worst["step_ns"]
        if worst["time_ns"]:
            self._note_time(stretch, worst["time_ns"] / 1e9, worst["bytes"])
        if worst["error_ppm"]:
            stretch.errors.setdefault(stretch.current, worst["error_ppm"] / 1e6)
        reason = self._violation(stretch, worst)
        if reason:
            self._demote(label, stretch, reason)
        stretch.coded_step_ns = worst["coded_step_ns"]
        stretch.spent = _Spent()

    def _note_time(self, stretch: _Stretch, seconds: float, num_bytes: int) -> None:
        stretch.observed_s, stretch.observed_bytes = seconds, num_bytes
        seen = stretch.num_observed[stretch.current] = stretch.num_observed.get(stretch.current, 0) + 1
        if seen > 1 and stretch.model_s > 0:
            ratios = stretch.ratios.setdefault(stretch.current, [])
            ratios.append(seconds / stretch.model_s)
            del ratios[:-WINDOW]

    def _violation(self, stretch: _Stretch, worst: Mapping[str, int]) -> str:
        """Why the current codec must go, or nothing."""
        codec, before = stretch.current.partition("/")[0], stretch.residual_ratio
        if codec == "off":
            return ""
        stretch.residual_ratio, error = worst["residual_ppm"] / 1e6, worst["error_ppm"] / 1e6
        stretch.relative_error = error or stretch.relative_error
        if stretch.residual_ratio > MAX_RESIDUAL_RATIO and stretch.residual_ratio > before:
            return f"residual {stretch.residual_ratio:.3g} times the gradient and growing"
        return violation(codec, error, worst["nonfinite"])

    def _rest(self, label: str, stretch: _Stretch) -> None:
        """A reduction may look faster and the step be slower: codecs take the processor from the backward pass."""
        slower = (
            f"steps take {stretch.coded_step_ns / 1e6:.3g} ms with codecs and {stretch.step_ns / 1e6:.3g} ms without"
        )
        self.events.append(f"{label}: {stretch.current} rests for {HOLD_CALLS} calls: {slower}")
        stretch.current, stretch.held_until = "off", stretch.calls + HOLD_CALLS
        if stretch.choice is not None:
            stretch.choice = replace(stretch.choice, reason=slower)

    @staticmethod
    def _is_doubtful(stretch: _Stretch) -> bool:
        if (
            stretch.was_doubted
            or stretch.calls < EVERY_CALL_UNTIL
            or not stretch.coded_step_ns
            or stretch.choice is None
        ):
            return False
        saving_ns = (stretch.choice.plain_s - stretch.observed_s) * 1e9
        return saving_ns < DOUBTFUL_SHARE * stretch.coded_step_ns

    def _doubt(self, label: str, stretch: _Stretch) -> None:
        """Measure plain steps anew, then choose anew."""
        reason = f"plain steps are measured anew: a codec saves less than {DOUBTFUL_SHARE:.0%} of a step"
        self.events.append(f"{label}: {stretch.current} waits: {reason}")
        stretch.was_doubted = True
        stretch.current, stretch.held_until = "off", stretch.calls + MIN_STEPS
        if stretch.choice is not None:
            stretch.choice = replace(stretch.choice, reason=reason)

    def _demote(self, label: str, stretch: _Stretch, reason: str) -> None:
        codec = stretch.current.partition("/")[0]
        stretch.banned = sorted({*stretch.banned, *coarser(codec)})
        stretch.held_until = 0
        self.events.append(f"{label}: {codec} taken back at call {stretch.calls}: {reason}")

    def decide(self, stretch: Stretch, speeds: Mapping[str, CodecSpeed]) -> DenseChoice:
        """Choose what reduces the stretch from now on; at a round, after `settle`."""
        state = self._of(stretch.label)
        if state.current != "off" and not stretch.fixed and state.coded_step_ns > SLOWER * state.step_ns > 0:
            self._rest(stretch.label, state)
        elif state.current != "off" and not stretch.fixed and self._is_doubtful(state):
            self._doubt(stretch.label, state)
        baseline, allowed = plain(stretch.load, self.link), [c for c in stretch.codecs if c not in state.banned]
        found = list(candidates(allowed, stretch.load, self.link, speeds))
        before, known = state.current, state.correction()
        choice = choose_codec(
            found, baseline, state.exposure(), known, before, errors=state.errors, fixed=stretch.fixed
        )
        if stretch.codecs and not found:
            why = f"{', '.join(state.banned)} taken back" if state.banned else "the memory budget leaves no codec"
            choice = replace(choice, reason=why)
        kept = next((c for c in [baseline, *found] if c.key == before), None)
        on_trial = 0 < state.num_observed.get(before, 0) < TRIALS
        if kept is not None and not stretch.fixed and (on_trial or state.calls < state.held_until):
            reason = state.choice.reason if state.choice is not None else choice.reason
            choice = replace(choice, candidate=kept, predicted_s=kept.model_s * known.get(kept.key, 1.0), reason=reason)
        elif choice.candidate.key != before:
            if before != "off":
                self.events.append(f"{stretch.label}: {before} replaced by {choice.candidate.key}: {choice.reason}")
            if state.calls >= EVERY_CALL_UNTIL and not choice.reason.startswith(TRIAL):
                state.held_until = state.calls + HOLD_CALLS
        state.current, state.model_s, state.choice = choice.candidate.key, choice.candidate.model_s, choice
        return choice

    def observe(
        self, label: str, seconds: float, num_bytes: int, *, relative_error: float, residual_ratio: float, finite: bool
    ) -> None:
        """Note what the call took on this rank; 0 stands for an error or ratio that was not measured.

        finite: neither NaN or infinity in the result, nor a share of values lost to the range of the codec.
        """
        stretch = self._of(label)
        spent = stretch.spent
        spent.seconds.append(seconds)
        spent.num_bytes = num_bytes
        if not relative_error <= spent.relative_error:  # NaN is the worst of all
            spent.relative_error = relative_error
        spent.residual_ratio = residual_ratio or spent.residual_ratio
        spent.num_nonfinite = 0 if finite else spent.num_nonfinite + 1
        stretch.calls += 1
        self.all_off &= stretch.current == "off"
        self.all_settled &= stretch.is_settled()

    def measured(self) -> dict[str, tuple[DenseChoice, float, int, float, float]]:
        """By label: choice, observed seconds and bytes, relative error, residual ratio, as agreed at the last round."""
        return {
            label: (s.choice, s.observed_s, s.observed_bytes, s.relative_error, s.residual_ratio)
            for label, s in self._stretches.items()
            if s.choice is not None
        }

    def exposure(self) -> Exposure | None:
        """What all ranks last agreed to be exposed under plain reductions."""
        return next((e for s in self._stretches.values() if (e := s.exposure()) is not None), None)

    def plan_hash(self) -> str:
        """Twelve hex digits over the choices of all stretches."""
        plan = json.dumps({label: s.current for label, s in self._stretches.items()}, sort_keys=True)
        return hashlib.blake2b(plan.encode(), digest_size=6).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, equal on all ranks."""
        return {
            "size": self.link.size,
            "stretches": {label: deepcopy(stretch.shared()) for label, stretch in self._stretches.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, on all ranks alike. With another number of ranks only the bans still hold."""
        same_size = state["size"] == self.link.size
        self._stretches = {
            label: _Stretch(**deepcopy(s)) if same_size else _Stretch(banned=list(s["banned"]))
            for label, s in state["stretches"].items()
        }

    def _of(self, label: str) -> _Stretch:
        return self._stretches.setdefault(label, _Stretch())
