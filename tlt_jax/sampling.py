"""Sampling with noise keyed by (rollout key, row, position, token).

A token is drawn by an exponential race, `argmax(p / E)`, with E the token's
own Exp(1) variable. The race is won by token v with probability p[v] exactly
(the Gumbel-max trick in the exponential domain), and E depends on nothing but
the row's key, the position and the token id. So a rollout is a function of
(params, prompts, key): batch, slot, step and drafter can't change a token.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the last float32 below one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Traced knobs of the sampling distribution; a new value never recompiles.

  Attributes:
    temperature: float32 scalar; 0 is greedy.
    top_k: int32 scalar; 0 keeps every token.
    top_p: float32 scalar in (0, 1]; 1 keeps every token.
    min_p: float32 scalar in [0, 1); 0 keeps every token.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array


def sampling_params(
  *, temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingParams:
  """Checks the knobs on the host and returns them as traced scalars.

  Raises:
    ValueError: for a value outside its range, with the config key.
  """
  if not (temperature >= 0 and math.isfinite(temperature)):
    raise ValueError(
      f"rollout.temperature = {temperature} must be finite and at least 0"
    )
  if top_k < 0 or int(top_k) != top_k:
    raise ValueError(f"rollout.top_k = {top_k} must be a whole number >= 0")
  if not 0 < top_p <= 1:
    raise ValueError(f"rollout.top_p = {top_p} must be in (0, 1]")
  if not 0 <= min_p < 1:
    raise ValueError(f"rollout.min_p = {min_p} must be in [0, 1)")
  return SamplingParams(
    temperature=jnp.float32(temperature),
    top_k=jnp.int32(top_k),
    top_p=jnp.float32(top_p),
    min_p=jnp.float32(min_p),
  )


def sample(
  logits: jax.Array, noise_keys: jax.Array, params: SamplingParams
) -> tuple[jax.Array, jax.Array]:
  """Draws a token from `softmax(process(logits))` by an exponential race.

  The race and the log-probability share their exponentials. The argmax is a
  maximum followed by the smallest index that reaches it: on CPU a variadic
  reduce costs more than both.

  Args:
    logits: [B, Q, V], any float dtype.
    noise_keys: uint32 [B, Q, 2] from `position_keys`.
    params: the distribution's knobs.

  Returns:
    tokens int32 [B, Q], and their log-probabilities float32 [B, Q] under the
    very distribution that they were drawn from (0 when greedy).
  """
  chex.assert_rank(logits, 3)
  chex.assert_shape(noise_keys, (*logits.shape[:2], 2))
  logits = process(logits, params)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - highest)
  scores = weights / exponential_noise(noise_keys, logits.shape[-1])
  tokens = _first_argmax(scores)
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
  log_probs = chosen - highest - jnp.log(weights.sum(-1, keepdims=True))
  return tokens, log_probs[..., 0]


def process(logits: jax.Array, params: SamplingParams) -> jax.Array:
  """Logits of the distribution that is sampled: float32 [..., V].

  Temperature, then top-k, top-p, min-p, each on what the one before left (the
  order of transformers' logits processors). Tokens that tie with the last one
  kept are kept. Removed tokens are -inf. Temperature 0 keeps the first of the
  largest logits alone. Plain decoding, verification and the recorded
  log-probability all call this one function.
  """
  greedy = params.temperature == 0
  logits = logits.astype(jnp.float32)
  logits = logits / jnp.where(greedy, 1.0, params.temperature)
  logits = jax.lax.cond(
    params.top_k > 0, _keep_top_k, lambda x, _: x, logits, params.top_k
  )
  logits = jax.lax.cond(
    params.top_p < 1, _keep_top_p, lambda x, _: x, logits, params.top_p
  )
  highest = jnp.max(logits, axis=-1, keepdims=True)
  floor = jnp.where(params.min_p > 0, jnp.log(params.min_p), -jnp.inf)
  logits = jnp.where(logits - highest >= floor, logits, -jnp.inf)
  return jax.lax.cond(greedy, _keep_first_largest, lambda x: x, logits)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
  """Key data uint32 [B, 2] of rows [B]; `key` is a typed threefry key.

  Raises:
    ValueError: the key isn't threefry (rbg keys under vmap depend on the
      batch, so they can't name a row).
  """
  if str(jax.random.key_impl(key)) not in ("fry", "threefry2x32"):
    raise ValueError(
      f"key implementation {jax.random.key_impl(key)} can't key noise by "
      "position; use jax.random.key(seed, impl='threefry2x32')"
    )
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
  return jax.random.key_data(keys)


def position_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """Noise keys uint32 [B, Q, 2] of row keys [B, 2] at positions [B, Q]."""
  chex.assert_rank(positions, 2)
  chex.assert_shape(keys, (positions.shape[0], 2))
  typed = jax.random.wrap_key_data(keys, impl="threefry2x32")
  fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
  return jax.random.key_data(fold(typed, positions))


def exponential_noise(noise_keys: jax.Array, vocab_size: int) -> jax.Array:
  """Exp(1) variables float32 [..., V] from uint32 keys [..., 2].

  The token id is hashed under the 64-bit key, and `-log1p(-u)` is taken of all
  32 bits: small values decide the race, so they must not be coarse.
  """
  bits = token_hash(noise_keys, vocab_size)
  uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
  return -jnp.log1p(-jnp.minimum(uniform, _LARGEST_UNIFORM))


def token_hash(noise_keys: jax.Array, vocab_size: int) -> jax.Array:
  """Uniform uint32 [..., V]: a counter hash of the token ids under the keys.

  Two rounds of a 32-bit multiply-xorshift mixer, each after one half of the
  key. The halves enter on either side of a mixer, so the noise of one key is
  no shifted or permuted copy of another's.
  """
  chex.assert_axis_dimension(noise_keys, -1, 2)
  tokens = jax.lax.iota(jnp.uint32, vocab_size)
  first, second = noise_keys[..., :1], noise_keys[..., 1:]
  mixed = _mix(tokens * jnp.uint32(0x9E3779B9) + first)
  return _mix(mixed ^ second)


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of uint32 with low bias (constants of T. Ettinger)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
  x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
  return x ^ (x >> 15)


def _first_argmax(x: jax.Array) -> jax.Array:
  """Smallest index of the largest value along the last axis, int32."""
  indices = jax.lax.iota(jnp.int32, x.shape[-1])
  best = jnp.max(x, axis=-1, keepdims=True)
  return jnp.min(jnp.where(x == best, indices, x.shape[-1] - 1), axis=-1)


def _keep_first_largest(logits: jax.Array) -> jax.Array:
  indices = jax.lax.iota(jnp.int32, logits.shape[-1])
  first = _first_argmax(logits)[..., None]
  return jnp.where(indices == first, logits, -jnp.inf)


def _keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
  ordered = _ordered_bits(logits)
  kept = _largest_threshold(
    lambda t: (ordered >= t).sum(-1, keepdims=True, dtype=jnp.int32),
    jnp.minimum(k, logits.shape[-1]),
    logits.shape[:-1],
  )
  return jnp.where(ordered >= kept, logits, -jnp.inf)


def _keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
  ordered = _ordered_bits(logits)
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  kept = _largest_threshold(
    lambda t: jnp.where(ordered >= t, weights, 0).sum(-1, keepdims=True),
    top_p * weights.sum(-1, keepdims=True),
    logits.shape[:-1],
  )
  return jnp.where(ordered >= kept, logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
  """uint32 in the order of the float32 values (sign-magnitude to biased)."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  negative = bits >> 31 == 1
  return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(measure, goal, batch_shape) -> jax.Array:
  """Largest uint32 t [..., 1] with measure(t) >= goal, bit by bit.

  `measure` falls with t. 32 passes over the logits are exact and cost less
  than a sort of the vocabulary.
  """

  def set_bit(i, threshold):
    higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    return jnp.where(measure(higher) >= goal, higher, threshold)

  start = jnp.zeros((*batch_shape, 1), jnp.uint32)
  return jax.lax.fori_loop(0, 32, set_bit, start)
