"""The rollout: a pure function of (params, prompts, key).

The host loop admits waiting rows into free slots, compacts live rows into
smaller buckets, grows the cache, and runs chunks of rounds on the device; it
reads three small arrays a chunk. None of this can change a token.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import base, sampling, slots


@dataclasses.dataclass(frozen=True)
class Chunk:
  """One look of the host: live rows of B, S slots, tokens and seconds."""

  live_rows: int
  rows: int
  slots: int
  rounds: int
  tokens: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Responses of R = P * G rows, row = prompt * G + sample.

  Attributes:
    tokens: int32 [R, S], prompt and completion, zeros beyond.
    prompt_lengths: int32 [R].
    lengths: int32 [R], prompt and completion, an EOS included.
    log_probs: float32 [R, S]; entry t is the log-probability of token t under
      the distribution it was sampled from, 0 outside the completion.
    ended: bool [R], True where the response ended with an EOS.
    chunks: the timeline.
    seconds: wall time of the rollout.
    device_seconds: what of it the host spent waiting for compiled programs.
  """

  tokens: np.ndarray
  prompt_lengths: np.ndarray
  lengths: np.ndarray
  log_probs: np.ndarray
  ended: np.ndarray
  chunks: tuple[Chunk, ...]
  seconds: float
  device_seconds: float

  def completion(self, row: int) -> np.ndarray:
    """The completion's tokens, an EOS included."""
    return self.tokens[row, self.prompt_lengths[row] : self.lengths[row]]


def rollout(
  programs: base.RolloutPrograms,
  params: base.Params,
  prompts: np.ndarray,
  prompt_lengths: np.ndarray,
  key: jax.Array,
  *,
  group_size: int,
  max_new_tokens: int | Sequence[int],
  sampling_params: sampling.SamplingParams,
  eos_ids: Sequence[int],
  shapes: base.RolloutShapes,
  chunk_rounds: int,
  refill_rows: int,
  prompt_ids: Sequence[int] | None = None,
  on_finished: Callable[[int, np.ndarray], None] | None = None,
  on_chunk: Callable[[Chunk], None] | None = None,
) -> Rollout:
  """Samples `group_size` responses to every prompt.

  Row (prompt p, sample g) draws with noise keyed by
  (key, prompt_ids[p] * group_size + g, position, token), so its tokens depend
  on no batch-mate, slot, bucket, chunk length or order of prompts.

  Args:
    programs: compiled programs (`build.rollout_programs`).
    params: the policy's parameters.
    prompts: int32 [P, L], right padded.
    prompt_lengths: int32 [P].
    key: a typed threefry key; the caller folds the RL step into it.
    group_size: G.
    max_new_tokens: tokens a row may add, one number or one for each of R rows.
    sampling_params: the distribution (`sampling.sampling_params`).
    eos_ids: tokens that end a response and belong to it.
    shapes: the buckets.
    chunk_rounds: rounds between two looks of the host, at most.
    refill_rows: free slots that make it worth while to admit waiting rows.
    prompt_ids: names of the prompts for the noise, [P]; 0..P-1 by default.
    on_finished: called with (row, completion tokens) as rows finish, so that
      scoring overlaps the rollout.
    on_chunk: called with each chunk's record.

  Raises:
    ValueError: sizes that don't fit the shapes, with the config key.
  """
  began = time.perf_counter()
  limits = _check(
    prompts, prompt_lengths, group_size, max_new_tokens, eos_ids, shapes
  )
  if chunk_rounds < 1 or refill_rows < 1:
    raise ValueError(
      f"rollout.chunk_rounds = {chunk_rounds} and rollout.refill_rows = "
      f"{refill_rows} must be at least 1"
    )
  ids = np.arange(len(prompts)) if prompt_ids is None else np.array(prompt_ids)
  row_ids = (ids[:, None] * group_size + np.arange(group_size)).reshape(-1)
  keys = np.asarray(sampling.row_keys(key, jnp.asarray(row_ids, jnp.uint32)))
  eos = jnp.asarray(eos_ids, jnp.int32)
  out = _Results(limits, np.repeat(prompt_lengths, group_size), eos_ids)

  params = programs.prepare(params)
  waiting = collections.deque(range(len(limits)))
  flight = slots.take_off(programs, shapes, len(limits), int(max(prompt_lengths)))
  chunks = []
  while waiting or (flight.row_of_slot >= 0).any():
    if waiting:
      slots.admit(
        flight, params, waiting, prompts, prompt_lengths, keys, limits,
        group_size,
      )  # fmt: skip
    else:
      slots.compact(flight)
    slots.grow(flight)
    min_live = slots.min_live(flight, bool(waiting), refill_rows)
    chunk, live = _run_chunk(
      flight, params, sampling_params, eos, min_live, chunk_rounds
    )
    chunks.append(chunk)
    _collect(flight, live, out, on_finished)
    if on_chunk is not None:
      on_chunk(chunk)
  seconds = time.perf_counter() - began
  return out.rollout(tuple(chunks), seconds, flight.device_seconds)


def warm_up(
  programs: base.RolloutPrograms,
  params: base.Params,
  sampling_params: sampling.SamplingParams,
  *,
  num_eos_ids: int,
  shapes: base.RolloutShapes,
) -> int:
  """Compiles every program that a rollout of these shapes can need.

  Each runs once on empty rows and no rounds. Returns the number of programs.
  """
  params = programs.prepare(params)
  eos = jnp.zeros((num_eos_ids,), jnp.int32)
  caches = [
    (programs.prefill(params, tokens), tokens)
    for tokens in (
      np.zeros((count, length), np.int32)
      for count in shapes.prefill
      for length in shapes.prompts
    )
  ]
  compiled = 1 + len(caches)
  larger = (*shapes.slots[1:], None)
  for num_slots, more in zip(shapes.slots, larger, strict=True):
    for rows, fewer in zip(shapes.rows, (None, *shapes.rows), strict=False):
      state = programs.empty(rows, num_slots)
      none = np.full(rows, -1, np.int32)
      zeros, keys = np.zeros(rows, np.int32), np.zeros((rows, 2), np.uint32)
      for cache, tokens in caches:
        if tokens.shape[1] <= num_slots:
          state = programs.admit(
            state, cache, tokens, none, zeros, zeros, keys
          )
          compiled += 1
      state, _ = programs.chunk(
        params, state, sampling_params, eos, np.int32(0), np.int32(0)
      )
      if fewer is not None:
        programs.take(state, np.zeros(fewer, np.int32))
      if more is not None:
        programs.resize(state, more)
      compiled += 2 + (fewer is not None) + (more is not None)
  return compiled


class _Results:
  """Finished rows, gathered on the host."""

  def __init__(self, limits, prompt_lengths, eos_ids):
    shape = (len(limits), int(max(limits)))
    self.tokens = np.zeros(shape, np.int32)
    self.log_probs = np.zeros(shape, np.float32)
    self.lengths = np.zeros(len(limits), np.int32)
    self.prompt_lengths = np.asarray(prompt_lengths, np.int32)
    self.eos_ids = np.asarray(eos_ids)

  def add(self, row, tokens, log_probs, length):
    self.tokens[row, :length] = tokens[:length]
    self.log_probs[row, :length] = log_probs[:length]
    self.lengths[row] = length

  def completion(self, row) -> np.ndarray:
    return self.tokens[row, self.prompt_lengths[row] : self.lengths[row]]

  def rollout(self, chunks, seconds, device_seconds) -> Rollout:
    last = self.tokens[np.arange(len(self.lengths)), self.lengths - 1]
    return Rollout(
      tokens=self.tokens,
      prompt_lengths=self.prompt_lengths,
      lengths=self.lengths,
      log_probs=self.log_probs,
      ended=np.isin(last, self.eos_ids),
      chunks=chunks,
      seconds=seconds,
      device_seconds=device_seconds,
    )


def _check(
  prompts, prompt_lengths, group_size, max_new_tokens, eos_ids, shapes
) -> np.ndarray:
  """The rows' length limits [R]; raises where something doesn't fit."""
  if np.ndim(prompts) != 2 or np.shape(prompt_lengths) != prompts.shape[:1]:
    raise ValueError(
      f"prompts {np.shape(prompts)} must be [P, L] and prompt_lengths "
      f"{np.shape(prompt_lengths)} [P]"
    )
  if not len(prompts):
    raise ValueError("a rollout needs at least one prompt")
  if min(prompt_lengths) < 1 or max(prompt_lengths) > prompts.shape[1]:
    raise ValueError(
      f"prompt lengths {min(prompt_lengths)}..{max(prompt_lengths)} must be "
      f"in 1..{prompts.shape[1]}, the width of prompts"
    )
  longest = int(max(prompt_lengths))
  if longest > shapes.prompts[-1]:
    raise ValueError(
      f"the longest prompt has {longest} tokens, rollout.max_prompt_tokens is "
      f"{shapes.prompts[-1]}"
    )
  if group_size < 1:
    raise ValueError(f"rollout.group_size = {group_size} must be at least 1")
  if not len(eos_ids):
    raise ValueError("eos_ids is empty: no response could end")
  rows = len(prompts) * group_size
  new = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (rows,))
  limits = np.repeat(np.asarray(prompt_lengths, np.int32), group_size) + new
  if new.min() < 1 or limits.max() > shapes.slots[-1]:
    raise ValueError(
      f"rollout.max_new_tokens {new.min()}..{new.max()} must be at least 1, "
      f"and with its prompt at most {shapes.slots[-1]} tokens, the last of "
      "rollout.cache_buckets"
    )
  return limits


def _run_chunk(
  flight, params, sampling_params, eos, min_live: int, max_rounds: int
) -> tuple[Chunk, np.ndarray]:
  """A chunk's record, and which slots are live after it."""
  began = time.perf_counter()
  flight.state, rounds = flight.programs.chunk(
    params, flight.state, sampling_params, eos,
    np.int32(min_live), np.int32(max_rounds),
  )  # fmt: skip
  state = flight.state
  lengths, live, rounds = jax.device_get((state.lengths, state.live, rounds))
  seconds = time.perf_counter() - began
  flight.device_seconds += seconds
  taken = flight.row_of_slot >= 0
  chunk = Chunk(
    live_rows=int(taken.sum()),
    rows=len(taken),
    slots=state.tokens.shape[1],
    rounds=int(rounds),
    tokens=int((lengths - flight.lengths)[taken].sum()),
    seconds=seconds,
  )
  flight.lengths = np.array(lengths)
  return chunk, live


def _collect(flight, live: np.ndarray, out: _Results, on_finished):
  """Copies finished rows to the host and frees their slots."""
  finished = np.flatnonzero((flight.row_of_slot >= 0) & ~live)
  if not len(finished):
    return
  began = time.perf_counter()
  tokens, log_probs = jax.device_get(
    (flight.state.tokens, flight.state.log_probs)
  )
  flight.device_seconds += time.perf_counter() - began
  for slot in finished:
    row = int(flight.row_of_slot[slot])
    out.add(row, tokens[slot], log_probs[slot], flight.lengths[slot])
    flight.row_of_slot[slot] = -1
    if on_finished is not None:
      on_finished(row, out.completion(row))
