"""Layers of a decoder-only transformer (Llama, Qwen2, Qwen3 families).

Kernels are [out, in], the order of Hugging Face checkpoints; contracting over
the last axis of both operands is also what CPUs like best for few rows.
"""

import math

import chex
import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
  """`x / sqrt(mean(x^2) + eps) * scale`, in float32 (arXiv 1910.07467)."""

  def __init__(self, width: int, *, eps: float):
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


class Linear(nnx.Module):
  """`x @ kernel.T + bias` with kernel [out, in], in the dtype of x."""

  def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs):
    scale = 1 / math.sqrt(inputs)
    kernel = scale * jax.random.normal(rngs.params(), (outputs, inputs))
    self.kernel = nnx.Param(kernel)
    self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    y = jnp.einsum("...i,oi->...o", x, self.kernel[...].astype(x.dtype))
    return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class MLP(nnx.Module):
  """Gated SiLU feed-forward: `down(silu(gate(x)) * up(x))`."""

  def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
    self.gate = Linear(width, hidden, bias=False, rngs=rngs)
    self.up = Linear(width, hidden, bias=False, rngs=rngs)
    self.down = Linear(hidden, width, bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
  """Grouped-query attention over the tokens at hand or over a cache."""

  def __init__(
    self,
    width: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool,
    norm_eps: float,
    rngs: nnx.Rngs,
  ):
    heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
    self.query = Linear(width, heads, bias=qkv_bias, rngs=rngs)
    self.key = Linear(width, kv_heads, bias=qkv_bias, rngs=rngs)
    self.value = Linear(width, kv_heads, bias=qkv_bias, rngs=rngs)
    self.output = Linear(heads, width, bias=output_bias, rngs=rngs)
    self.query_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
    self.key_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
    self.head_dim = head_dim

  def __call__(
    self, x: jax.Array, rope: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """x [B, T, D], rope [B, T, hd // 2, 2], mask [B, T, T] -> [B, T, D]."""
    query, key, value = self._project(x, rope)
    return self._merge(attend(query, key, value, mask))

  def decode(
    self,
    x: jax.Array,
    rope: jax.Array,
    mask: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    slots: jax.Array,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """As `__call__`, writing keys and values [B, KV, S, hd] at slots [B, Q].

    Slots beyond the cache are dropped; mask is [B, Q, S].
    """
    query, key, value = self._project(x, rope)
    cache = write_slots(cache[0], key, slots), write_slots(cache[1], value, slots)
    return self._merge(attend(query, *cache, mask)), cache

  def _project(self, x: jax.Array, rope: jax.Array) -> tuple[jax.Array, ...]:
    """Rotated queries [B, H, T, hd], and keys and values [B, KV, T, hd]."""
    query, key, value = (
      self._split(project(x)) for project in (self.query, self.key, self.value)
    )
    if self.query_norm is not None:
      query, key = self.query_norm(query), self.key_norm(key)
    return rotate(query, rope), rotate(key, rope), value

  def _split(self, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)

  def _merge(self, x: jax.Array) -> jax.Array:
    x = x.swapaxes(1, 2)
    return self.output(x.reshape(*x.shape[:2], -1))


def attend(
  query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
  """Masked softmax attention; float32 scores.

  Args:
    query: [B, H, Q, hd]; H is a multiple of KV.
    key: [B, KV, S, hd].
    value: [B, KV, S, hd].
    mask: bool [B, Q, S], True where query q sees slot s.

  Returns:
    [B, H, Q, hd].
  """
  batch, heads, queries, head_dim = query.shape
  kv_heads, slots = key.shape[1], key.shape[2]
  chex.assert_shape(mask, (batch, queries, slots))
  group = heads // kv_heads
  # Queries that share a key head become rows of one product.
  rows = query.reshape(batch, kv_heads, group * queries, head_dim)
  scores = jnp.einsum(
    "bkrd,bksd->bkrs", rows, key, preferred_element_type=jnp.float32
  )
  scores = scores.reshape(batch, kv_heads, group, queries, slots)
  scores = scores * (1 / math.sqrt(head_dim))
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  weights = weights.reshape(batch, kv_heads, group * queries, slots)
  out = jnp.einsum("bkrs,bksd->bkrd", weights, value)
  return out.reshape(batch, heads, queries, head_dim)


def write_slots(
  cache: jax.Array, new: jax.Array, slots: jax.Array
) -> jax.Array:
  """Writes new [B, KV, Q, hd] at slots [B, Q] of cache [B, KV, S, hd]."""
  batch, kv_heads = cache.shape[:2]
  rows = jnp.arange(batch)[:, None, None]
  heads = jnp.arange(kv_heads)[None, :, None]
  return cache.at[rows, heads, slots[:, None]].set(
    new.astype(cache.dtype), mode="drop"
  )


def rope_angles(positions: jax.Array, frequencies: jax.Array) -> jax.Array:
  """(cos, sin) pairs float32 [B, T, hd // 2, 2] of positions [B, T]."""
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotate(x: jax.Array, rope: jax.Array) -> jax.Array:
  """Rotary embedding of x [B, heads, T, hd] (arXiv 2104.09864).

  Pairs are (i, i + hd // 2), as in Hugging Face checkpoints.
  """
  cos, sin = rope[:, None, ..., 0], rope[:, None, ..., 1]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)
