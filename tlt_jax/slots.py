"""Which row sits in which slot: admission, compaction and growth.

The host's side of the rollout. It moves rows between the buckets that programs
are compiled for; no decision here can change a token.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from tlt_jax import base


@dataclasses.dataclass
class Flight:
  """Rows in flight, as the host sees them.

  Attributes:
    programs: the rollout's compiled programs.
    shapes: the buckets.
    state: the `DecodeState` on the device, B = len(row_of_slot).
    row_of_slot: int [B], -1 in a free slot.
    lengths: int32 [B], as of the last look.
    open_prompts: prompt -> (cache, tokens, index in both), for prompts that
      still have rows waiting.
    device_seconds: time spent waiting for compiled programs.
  """

  programs: base.RolloutPrograms
  shapes: base.RolloutShapes
  state: object
  row_of_slot: np.ndarray
  lengths: np.ndarray
  open_prompts: dict
  device_seconds: float = 0.0


def take_off(
  programs: base.RolloutPrograms,
  shapes: base.RolloutShapes,
  num_rows: int,
  longest_prompt: int,
) -> Flight:
  """Free slots in the smallest bucket that holds all rows, or the largest."""
  rows = _bucket(shapes.rows, min(num_rows, shapes.rows[-1]))
  slots = _bucket(shapes.slots, _bucket(shapes.prompts, longest_prompt))
  return Flight(
    programs=programs,
    shapes=shapes,
    state=programs.empty(rows, slots),
    row_of_slot=np.full(rows, -1),
    lengths=np.zeros(rows, np.int32),
    open_prompts={},
  )


def admit(
  flight: Flight,
  params: base.Params,
  waiting: collections.deque,
  prompts: np.ndarray,
  prompt_lengths: np.ndarray,
  keys: np.ndarray,
  limits: np.ndarray,
  group_size: int,
):
  """Fills free slots with the next waiting rows, prefilling new prompts."""
  free = np.flatnonzero(flight.row_of_slot < 0)
  for slot in free[: len(waiting)]:
    flight.row_of_slot[slot] = waiting.popleft()
  filled = [s for s in free if flight.row_of_slot[s] >= 0]
  wanted = {int(flight.row_of_slot[s]) // group_size for s in filled}
  new = sorted(wanted - flight.open_prompts.keys())
  _prefill(flight, params, prompts, prompt_lengths, new)

  batches = {}  # rows that copy from the same prefilled batch go in together
  for slot in filled:
    cache, tokens, index = flight.open_prompts[
      int(flight.row_of_slot[slot]) // group_size
    ]
    batches.setdefault(id(tokens), (cache, tokens, []))[2].append((slot, index))
  for cache, tokens, placed in batches.values():
    source = np.full(len(flight.row_of_slot), -1, np.int32)
    source[[slot for slot, _ in placed]] = [index for _, index in placed]
    rows = np.maximum(flight.row_of_slot, 0)  # read only where source >= 0
    lengths = np.asarray(prompt_lengths, np.int32)[rows // group_size]
    flight.state = flight.programs.admit(
      flight.state, cache, tokens, source, lengths, limits[rows], keys[rows]
    )
    flight.lengths = np.where(source >= 0, lengths, flight.lengths)
  still = {row // group_size for row in waiting}
  flight.open_prompts = {
    p: entry for p, entry in flight.open_prompts.items() if p in still
  }


def _prefill(flight, params, prompts, prompt_lengths, new: list[int]):
  """Prefills prompts in the largest batches that they fill, padded at most
  once; their caches stay open until the last of their rows is admitted."""
  slots = flight.state.tokens.shape[1]
  while new:
    count = _bucket(flight.shapes.prefill, len(new), largest=True)
    batch, new = new[:count], new[count:]
    longest = int(max(prompt_lengths[p] for p in batch))
    width = _bucket(flight.shapes.prompts, longest)
    while width > slots:
      slots = _resize(flight)
    tokens = np.zeros((count, width), np.int32)
    for i, p in enumerate(batch):
      tokens[i, : prompt_lengths[p]] = prompts[p, : prompt_lengths[p]]
    began = time.perf_counter()
    cache = jax.block_until_ready(flight.programs.prefill(params, tokens))
    flight.device_seconds += time.perf_counter() - began
    for i, p in enumerate(batch):
      flight.open_prompts[p] = (cache, tokens, i)


def compact(flight: Flight):
  """Moves live rows into the smallest bucket that holds them, by halves."""
  live = np.flatnonzero(flight.row_of_slot >= 0)
  for rows in reversed(flight.shapes.rows):
    if rows >= len(flight.row_of_slot) or rows < len(live):
      continue
    others = np.setdiff1d(np.arange(len(flight.row_of_slot)), live)
    keep = np.concatenate([live, others])[:rows].astype(np.int32)
    flight.state = flight.programs.take(flight.state, keep)
    flight.row_of_slot = flight.row_of_slot[keep]
    flight.lengths = flight.lengths[keep]
    live = np.arange(len(live))


def grow(flight: Flight):
  """Gives the longest live row room for a token."""
  longest = flight.lengths[flight.row_of_slot >= 0].max()
  while longest >= flight.state.tokens.shape[1]:
    _resize(flight)


def _resize(flight) -> int:
  """The next larger cache bucket."""
  slots = _bucket(flight.shapes.slots, flight.state.tokens.shape[1] + 1)
  flight.state = flight.programs.resize(flight.state, slots)
  return slots


def min_live(flight: Flight, waiting: bool, refill_rows: int) -> int:
  """Live rows at which a chunk ends: a refill or a smaller bucket is due."""
  rows = len(flight.row_of_slot)
  if waiting:
    return max(rows - refill_rows, 0)
  smaller = [b for b in flight.shapes.rows if b < rows]
  return smaller[-1] if smaller else 0


def _bucket(sizes: Sequence[int], needed: int, largest: bool = False) -> int:
  """The smallest size that holds `needed`; `largest` allows less than that."""
  for size in sizes:
    if size >= needed:
      return size
  if largest:
    return sizes[-1]
  raise ValueError(f"{needed} doesn't fit the largest bucket of {sizes}")
