"""The on-device decode loop: rounds of one target pass until rows end.

Rows advance unevenly, so everything is per row. The cache holds the tokens
`[:length - 1]`; the newest token is *pending* and is the next pass's first:

    slot:     0   1   2   3   4
    tokens:   p   p   p   a   .     length 4, prompt of 3
    cache:    k   k   k   .   .     a is pending

A finished or free slot goes through the pass with the rest; nothing that it
computes is kept.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from tlt_jax import base, sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Rows in flight; every leaf's first axis is the slot B.

  Attributes:
    tokens: int32 [B, S], prompt and completion from slot 0 on.
    log_probs: float32 [B, S]; entry t belongs to token t, 0 in the prompt.
    lengths: int32 [B], tokens known; 0 in a slot never used.
    limits: int32 [B], the length at which a row ends without an EOS.
    live: bool [B].
    keys: uint32 [B, 2], the rows' noise keys (`sampling.row_keys`).
    cache: the target's cache with S slots.
  """

  tokens: jax.Array
  log_probs: jax.Array
  lengths: jax.Array
  limits: jax.Array
  live: jax.Array
  keys: jax.Array
  cache: base.Cache


def decode_chunk(
  target_fn: base.TargetFn,
  params: base.Params,
  state: DecodeState,
  sampling_params: sampling.SamplingParams,
  eos_ids: jax.Array,
  min_live: jax.Array,
  max_rounds: jax.Array,
) -> tuple[DecodeState, jax.Array]:
  """Runs rounds until few rows live, the cache is full or rounds are spent.

  Args:
    target_fn: the target's decode pass (`base.Network.decode`).
    params: its parameters.
    state: rows in flight.
    sampling_params: traced knobs of the distribution.
    eos_ids: int32 [E]; any of them ends a row and belongs to its completion.
    min_live: int32 scalar; the loop ends once so few rows live.
    max_rounds: int32 scalar.

  Returns:
    The state, and the number of rounds that ran, int32 scalar.
  """
  chex.assert_rank([state.tokens, eos_ids], [2, 1])
  slots = state.tokens.shape[1]

  def goes_on(carry):
    state, rounds = carry
    longest = jnp.max(jnp.where(state.live, state.lengths, 0))
    enough = jnp.sum(state.live) > min_live
    return enough & (rounds < max_rounds) & (longest < slots)

  def advance(carry):
    state, rounds = carry
    state = decode_round(target_fn, params, state, sampling_params, eos_ids)
    return state, rounds + 1

  return jax.lax.while_loop(goes_on, advance, (state, jnp.int32(0)))


def decode_round(
  target_fn: base.TargetFn,
  params: base.Params,
  state: DecodeState,
  sampling_params: sampling.SamplingParams,
  eos_ids: jax.Array,
) -> DecodeState:
  """One target pass over the pending tokens; each live row gains a token."""
  last = jnp.maximum(state.lengths - 1, 0)  # a free slot has no token
  pending = jnp.take_along_axis(state.tokens, last[:, None], axis=1)
  logits, _, cache = target_fn(params, pending, state.cache, last)
  keys = sampling.position_keys(state.keys, state.lengths[:, None])
  drawn, log_probs = sampling.sample(logits, keys, sampling_params)
  state = dataclasses.replace(state, cache=cache)
  return _commit(state, drawn[:, 0], log_probs[:, 0], eos_ids)


def empty_state(init_cache, rows: int, slots: int) -> DecodeState:
  """A state of free slots: B = rows, S = slots."""
  return DecodeState(
    tokens=jnp.zeros((rows, slots), jnp.int32),
    log_probs=jnp.zeros((rows, slots), jnp.float32),
    lengths=jnp.zeros((rows,), jnp.int32),
    limits=jnp.zeros((rows,), jnp.int32),
    live=jnp.zeros((rows,), bool),
    keys=jnp.zeros((rows, 2), jnp.uint32),
    cache=init_cache(rows, slots),
  )


def admit_rows(
  resize_cache,
  state: DecodeState,
  prompt_cache: base.Cache,
  prompt_tokens: jax.Array,
  prompt_of_slot: jax.Array,
  lengths: jax.Array,
  limits: jax.Array,
  keys: jax.Array,
) -> DecodeState:
  """Puts new rows into slots, each with a copy of its prompt's cache.

  Args:
    resize_cache: `base.Network.resize_cache`.
    state: rows in flight.
    prompt_cache: cache of P prompts of at most L tokens, L <= S.
    prompt_tokens: int32 [P, L], right padded.
    prompt_of_slot: int32 [B], index into P, or -1 where the slot stays as it
      is. The three below are read only where it isn't.
    lengths: int32 [B], prompt lengths.
    limits: int32 [B], lengths at which the rows end at the latest.
    keys: uint32 [B, 2].
  """
  chex.assert_equal_shape([prompt_of_slot, lengths, limits, state.lengths])
  slots = state.tokens.shape[1]
  fresh = prompt_of_slot >= 0
  source = jnp.maximum(prompt_of_slot, 0)
  room = slots - prompt_tokens.shape[1]

  def place(new, old):
    mask = fresh.reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(mask, new.astype(old.dtype), old)

  cache = resize_cache(jax.tree.map(lambda x: x[source], prompt_cache), slots)
  return DecodeState(
    tokens=place(
      jnp.pad(prompt_tokens, ((0, 0), (0, room)))[source], state.tokens
    ),
    log_probs=place(jnp.zeros_like(state.log_probs), state.log_probs),
    lengths=place(lengths, state.lengths),
    limits=place(limits, state.limits),
    live=state.live | fresh,
    keys=place(keys, state.keys),
    cache=jax.tree.map(place, cache, state.cache),
  )


def take_rows(state: DecodeState, indices: jax.Array) -> DecodeState:
  """The rows at indices [B'], in that order: compaction of live rows."""
  return jax.tree.map(lambda x: jnp.take(x, indices, axis=0), state)


def resize_slots(resize_cache, state: DecodeState, slots: int) -> DecodeState:
  """The same rows with more cache and token slots."""
  more = ((0, 0), (0, slots - state.tokens.shape[1]))
  return dataclasses.replace(
    state,
    tokens=jnp.pad(state.tokens, more),
    log_probs=jnp.pad(state.log_probs, more),
    cache=resize_cache(state.cache, slots),
  )


def _commit(state, drawn, log_probs, eos_ids) -> DecodeState:
  """Appends each live row's token [B]; ends rows at an EOS or their limit."""
  slots = state.tokens.shape[1]
  rows = jnp.arange(drawn.shape[0])
  at = jnp.where(state.live, state.lengths, slots)  # beyond: dropped
  lengths = state.lengths + state.live
  ended = jnp.any(drawn[:, None] == eos_ids, axis=1)
  ended |= lengths >= state.limits
  return dataclasses.replace(
    state,
    tokens=state.tokens.at[rows, at].set(drawn, mode="drop"),
    log_probs=state.log_probs.at[rows, at].set(log_probs, mode="drop"),
    lengths=lengths,
    live=state.live & ~ended,
  )
