"""Logits to tokens for the requests that do not just take the highest logit.

Penalties, biases and masks change the logits first; then a token is drawn by temperature, min-p, top-k and top-p, or
the best one is taken. A draw needs one uniform number, a hash of the request's seed and the token's position, so it
does not depend on what else is in the batch or on how often the request was preempted.

Everything that the device needs travels to it in one copy, and nothing here waits for the device. Only masks of
grammars are waited for, which the host computes while the device is busy with the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.grammar import MASK_SECONDS
from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.engine.ops import NO_TOKEN, NOTHING_LEFT, Draw
from megatoken.errors import RequestError

VALUE_ERRORS = (ArithmeticError, TypeError, ValueError)  # of one request's values


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): two rounds of the SplitMix64 finaliser (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ (positions * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(
    logits_SV: Tensor,
    requests: Sequence[ActiveRequest],
    positions: NDArray[np.int64],
    slots: NDArray[np.int32],
    last_tokens: Tensor,
    chosen_S: Tensor,
    failed: MutableMapping[int, Exception],
    draw: Draw | None = None,
) -> None:
    """Replace the greedy choice of the rows that draw or whose options change the logits.

    Args:
        logits_SV: any float dtype; not changed.
        requests: of each row; a seed is set wherever the temperature is above 0.
        positions: position each new token will take, part of the draw. A request whose tokens on the host end before
            it has one more token, still on the device.
        slots: of each row, where ``last_tokens`` (int64 [slots]) has the token before the new one.
        last_tokens: on the device of the logits.
        chosen_S: int64 [S], the greedy ids; changed in place, except where they are ``NO_TOKEN``. ``NOTHING_LEFT``
            where the options leave no token.
        failed: gets the error of each row whose own options cannot be computed, which is then ``NO_TOKEN``.
        draw: how to draw for requests that draw from all tokens, where the back end has a way of its own.
    """
    if draw is not None:
        _draw_from_all(logits_SV, requests, positions, chosen_S, draw)
    drawn: list[int] = []
    adjusted: list[int] = []
    values = {}
    masks = _masks(requests, failed)
    for row in failed:
        chosen_S[row] = NO_TOKEN
    for row, request in enumerate(requests):
        if row in failed or (request.sampling.temperature == 0 and request.adjustments is None):
            continue
        if draw is not None and request.draws_from_all:
            continue
        try:
            values[row] = _values(request)
        except VALUE_ERRORS as error:
            failed[row] = error
            chosen_S[row] = NO_TOKEN
        else:
            (drawn if request.sampling.temperature > 0 else adjusted).append(row)
    rows = drawn + adjusted
    if not rows:
        return
    host = _row_arrays([values[row] for row in rows], np.array(rows), positions, slots)
    host |= _entry_arrays([requests[row] for row in rows], positions[rows])
    host |= _mask_arrays([masks.get(row) for row in rows])
    on_device = to_device(host, logits_SV.device)
    for draws, begin, end in ((True, 0, len(drawn)), (False, len(drawn), len(rows))):
        for first in range(begin, end, BLOCK_SAMPLES):
            block = _Block(host, on_device, first, min(first + BLOCK_SAMPLES, end))
            logits_RV = _adjusted(logits_SV.index_select(0, block["row"]).double(), block, last_tokens)
            chosen_R = _drawn(logits_RV, block) if draws else _best(logits_RV)
            chosen_R = chosen_R.masked_fill(~logits_RV.amax(-1).isfinite(), NOTHING_LEFT)
            unknown_R = chosen_S.index_select(0, block["row"]) == NO_TOKEN
            chosen_S.index_copy_(0, block["row"], chosen_R.masked_fill(unknown_R, NO_TOKEN))


def _draw_from_all(
    logits_SV: Tensor,
    requests: Sequence[ActiveRequest],
    positions: NDArray[np.int64],
    chosen_S: Tensor,
    draw: Draw,
) -> None:
    rows = [row for row, request in enumerate(requests) if request.draws_from_all]
    if not rows:
        return
    options = [requests[row].sampling for row in rows]
    seeds = np.array([(one.seed or 0) & (2**64 - 1) for one in options], dtype=np.uint64)
    arrays = {
        "row": np.array(rows, dtype=np.int64),
        "temperature": np.array([one.temperature for one in options], dtype=np.float64),
        "uniform": uniform(seeds, positions[rows].astype(np.uint64)),
    }
    on_device = to_device(arrays, logits_SV.device)
    drawn_R = draw(logits_SV, *on_device.values())
    unknown_R = chosen_S.index_select(0, on_device["row"]) == NO_TOKEN
    chosen_S.index_copy_(0, on_device["row"], drawn_R.masked_fill(unknown_R, NO_TOKEN))


def _masks(requests: Sequence[ActiveRequest], failed: MutableMapping[int, Exception]) -> dict[int, NDArray[np.int32]]:
    """By row, which tokens it or its grammar allows; ``failed`` gets the errors of rows whose grammar has no mask."""
    coming, guides, masks = {}, {}, {}
    for row, request in enumerate(requests):
        if (adjustments := request.adjustments) is None:
            continue
        if adjustments.allowed is not None:
            masks[row] = adjustments.allowed
        elif (guide := adjustments.guide) is not None and not guide.failed and not request.ended:
            guides[row], coming[row] = guide, guide.start(request.generated)
    deadline = time.monotonic() + MASK_SECONDS
    for row, mask in coming.items():
        try:
            masks[row] = mask.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            mask.cancel()
            failed[row] = guides[row].give_up()
        except RequestError as error:
            failed[row] = error
    return masks


_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _values(request: ActiveRequest) -> tuple[list[float], int, int, int]:
    """Of one row: the reals, top-k, the seed as 64 bits, and its tokens on the host."""
    sampling = request.sampling
    reals = [float(getattr(sampling, name)) for name in _REALS]
    return reals, int(sampling.top_k), (sampling.seed or 0) & (2**64 - 1), len(request.prompt) + len(request.generated)


def _row_arrays(
    values: Sequence[tuple[list[float], int, int, int]],
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int32],
) -> dict[str, NDArray[Any]]:
    """What each row needs, one array [D] for each name."""
    reals, top_k, seeds, num_tokens = zip(*values, strict=True)
    return {
        **dict(zip(_REALS, np.array(reals, dtype=np.float64).T, strict=True)),
        "row": rows,
        "slot": slots[rows].astype(np.int64),
        "top_k": np.array(top_k, dtype=np.int64),
        "uniform": uniform(np.array(seeds, dtype=np.uint64), positions[rows].astype(np.uint64)),
        "in_flight": (positions[rows] > np.array(num_tokens)).astype(np.int64),
    }


def _entry_arrays(requests: Sequence[ActiveRequest], positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What single tokens of the rows need: biases, and the tokens that are in prompt or answer.

    ``*_at`` is the place of a token's row in ``requests``, ascending.
    """
    biases, counts = [], []
    for at, (request, position) in enumerate(zip(requests, positions.tolist(), strict=True)):
        if (adjustments := request.adjustments) is None:
            continue
        ids, values = adjustments.biases(position - len(request.prompt), request.generated)
        biases.append((np.full(len(ids), at), ids, values))
        if adjustments.counts is not None:
            ids, values = adjustments.counts.up_to_date(request.generated)
            counts.append((np.full(len(ids), at), ids, values))
    arrays: dict[str, NDArray[Any]] = {}
    for name, parts in (("bias", biases), ("count", counts)):
        empty = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        fields = zip(("at", "id", "value"), zip(empty, *parts, strict=True), strict=True)
        arrays |= {f"{name}_{field}": np.concatenate(part) for field, part in fields}
    return arrays


def _mask_arrays(masks: Sequence[NDArray[np.int32] | None]) -> dict[str, NDArray[Any]]:
    """The masks of rows that have one, one after the other, in whole 8-byte items."""
    at = [place for place, mask in enumerate(masks) if mask is not None]
    words = [np.pad(mask, (0, len(mask) % 2)) for mask in masks if mask is not None]
    joined = np.concatenate(words).view(np.int64) if words else np.empty(0, np.int64)
    return {"mask_at": np.array(at, dtype=np.int64), "mask": joined}


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Arrays of 8-byte integers or reals in one asynchronous copy."""
    sizes = [array.size for array in arrays.values()]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([np.ascontiguousarray(array).view(np.int64) for array in arrays.values()], out=host.numpy())
    parts = torch.split(host.to(device, non_blocking=True), sizes)
    return {
        name: part.view(torch.float64) if array.dtype == np.float64 else part
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


class _Block:
    """Some rows of a step: their arrays on the device by name, reals as columns [R, 1]; and on the host."""

    def __init__(
        self, host: Mapping[str, NDArray[Any]], on_device: Mapping[str, Tensor], first: int, last: int
    ) -> None:
        self._host, self._on_device = host, on_device
        self._first, self._rows = first, slice(first, last)
        self._entries = {
            name: slice(*np.searchsorted(host[name], (first, last))) for name in ("bias_at", "count_at", "mask_at")
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._on_device[name][self._rows]

    def column(self, name: str) -> Tensor:
        return self[name][:, None]

    def entries(self, name: str) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows within the block, token ids and values of ``bias`` or ``count``; None if there are none."""
        part = self._entries[f"{name}_at"]
        if part.start == part.stop:
            return None
        at, ids, values = (self._on_device[f"{name}_{field}"][part] for field in ("at", "id", "value"))
        return at - self._first, ids, values

    def masks(self) -> tuple[Tensor, Tensor] | None:
        """Rows within the block, and their masks as int32 [G, W]; None if there are none."""
        part = self._entries["mask_at"]
        if part.start == part.stop:
            return None
        words = self._on_device["mask"].view(torch.int32).view(len(self._host["mask_at"]), -1)
        return self._on_device["mask_at"][part] - self._first, words[part]

    @property
    def largest_top_k(self) -> float:
        """Most tokens that a row's ``top_k`` keeps; infinite if a row has none."""
        top_k = self._host["top_k"][self._rows]
        return math.inf if (top_k == 0).any() else int(top_k.max())

    def any(self, name: str, unused: float) -> bool:
        """Whether a row's value differs from the one that has no effect."""
        return bool((self._host[name][self._rows] != unused).any())


def _adjusted(logits_RV: Tensor, block: _Block, last_tokens: Tensor) -> Tensor:
    """The logits after biases, masks and penalties, in place."""
    vocabulary = logits_RV.shape[1]
    if (masks := block.masks()) is not None:
        at_G, words_GW = masks
        bits_GWB = (words_GW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words_GW.device)) & 1
        excluded_GV = bits_GWB.view(len(at_G), -1)[:, :vocabulary] == 0
        logits_RV.index_copy_(0, at_G, logits_RV.index_select(0, at_G).masked_fill(excluded_GV, -math.inf))
    if (biases := block.entries("bias")) is not None:
        at_B, id_B, value_B = biases
        logits_RV.view(-1).index_add_(0, at_B * vocabulary + id_B, value_B)
    if any(block.any(name, unused) for name, unused in zip(_REALS[3:], (1, 0, 0), strict=True)):
        _penalise(logits_RV, block, last_tokens)
    return logits_RV


def _penalise(logits_RV: Tensor, block: _Block, last_tokens: Tensor) -> None:
    """Apply the penalties of every row, those without any included: theirs change nothing.

    The token that is still on the device counts like the others. It may be one of the counted tokens or a new one, so
    its logit is written first, as if it were new, and then those of the counted tokens, which include it.
    """
    repetition_R, presence_R, frequency_R = (block[name] for name in _REALS[3:])
    in_flight_R = block["in_flight"] > 0
    last_R = last_tokens.index_select(0, block["slot"])

    def penalised(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return logits - frequency * counts - presence * (counts > 0)

    before_R = logits_RV.gather(1, last_R[:, None])[:, 0]
    new_R = penalised(before_R, torch.ones_like(before_R), repetition_R, presence_R, frequency_R)
    new_R = new_R.where(in_flight_R, before_R)
    counted = block.entries("count")
    if counted is None:
        logits_RV.scatter_(1, last_R[:, None], new_R[:, None])
        return
    at_E, id_E, count_E = counted
    count_E = count_E + (in_flight_R.index_select(0, at_E) & (last_R.index_select(0, at_E) == id_E))
    index_E = at_E * logits_RV.shape[1] + id_E
    options = (one.index_select(0, at_E) for one in (repetition_R, presence_R, frequency_R))
    new_E = penalised(logits_RV.view(-1).index_select(0, index_E), count_E, *options)
    logits_RV.scatter_(1, last_R[:, None], new_R[:, None])
    logits_RV.view(-1).index_copy_(0, index_E, new_E)


def _best(logits_RV: Tensor) -> Tensor:
    """The id of the highest logit of each row, the lowest among equals -> int64 [R]."""
    vocabulary = logits_RV.shape[1]
    ids_RV = torch.arange(vocabulary, device=logits_RV.device).expand_as(logits_RV)
    return ids_RV.masked_fill(logits_RV != logits_RV.amax(-1, keepdim=True), vocabulary).amin(-1)


def _drawn(logits_RV: Tensor, block: _Block) -> Tensor:
    """Inverse of the cumulative distribution in the order of token ids -> int64 [R].

    That order does not depend on the logits, so rounding noise moves a draw only when the uniform number falls within
    the noise of a boundary; in sorted order it would reshuffle all tokens of nearly equal weight.
    """
    temperature_R1 = block.column("temperature")
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)  # then no temperature above 0 overflows
    if block.any("min_p", 0):
        weight_RV = (logits_RV / temperature_R1).exp()  # the best token weighs 1
        logits_RV = logits_RV.masked_fill(weight_RV < block.column("min_p"), -math.inf)
        del weight_RV  # `_kept` needs its room
    if block.any("top_k", 0) or block.any("top_p", 1):
        logits_RV = logits_RV.masked_fill(~_kept(logits_RV, temperature_R1, block), -math.inf)
    weight_RV = (logits_RV / temperature_R1).exp()
    cumulative_RV = weight_RV.cumsum(-1)
    # The best token weighs 1, and 1 - 2^-53 times 1 or more stays below it in float64: the search ends at a token.
    index_R1 = torch.searchsorted(cumulative_RV, block.column("uniform") * cumulative_RV[:, -1:], right=True)
    return index_R1[:, 0]


def _kept(logits_RV: Tensor, temperature_R1: Tensor, block: _Block) -> Tensor:
    """Which tokens are left: the ``top_k`` best, and of these the fewest best that hold ``top_p`` of the weight.

    Among equal logits the lowest id is the best, so a row that keeps one token keeps the greedy choice.
    """
    vocabulary = logits_RV.shape[1]
    top_k_R1, top_p_R1 = block.column("top_k"), block.column("top_p")
    top_k_R1 = top_k_R1.masked_fill(top_k_R1 == 0, vocabulary).clamp(max=vocabulary)
    top_p_R1 = top_p_R1.masked_fill(top_p_R1 == 1, math.inf)
    sorted_RK = logits_RV.topk(int(min(block.largest_top_k, vocabulary))).values
    beyond_RK = torch.arange(sorted_RK.shape[1], device=logits_RV.device) >= top_k_R1
    weight_RK = (sorted_RK / temperature_R1).exp().masked_fill(beyond_RK, 0.0)
    total_RK = weight_RK.cumsum(-1)
    kept_R1 = (total_RK - weight_RK < top_p_R1 * total_RK[:, -1:]).sum(-1, keepdim=True).minimum(top_k_R1)
    kept_R1 = kept_R1.clamp(min=1)  # of logits that are not finite none would be kept
    lowest_R1 = sorted_RK.gather(1, kept_R1 - 1)
    above_RV, equal_RV = logits_RV > lowest_R1, logits_RV == lowest_R1
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= kept_R1 - above_RV.sum(-1, keepdim=True)))
