"""Decoder-only transformer of the Llama, Qwen2 and Qwen3 families.

Layers are unrolled where tokens are decoded (scanning over stacked weights
copies them on every step) and scanned, by default, where gradients are taken.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tlt_jax import base
from tlt_jax.models import layers
from tlt_jax.models.config import ModelConfig


class Block(nnx.Module):
  """Pre-norm attention and feed-forward, each with its residual."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.attention_norm = layers.RMSNorm(config.width, eps=config.norm_eps)
    self.attention = layers.Attention(
      config.width,
      num_heads=config.num_heads,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      qkv_bias=config.qkv_bias,
      output_bias=config.output_bias,
      qk_norm=config.qk_norm,
      norm_eps=config.norm_eps,
      rngs=rngs,
    )
    self.mlp_norm = layers.RMSNorm(config.width, eps=config.norm_eps)
    self.mlp = layers.MLP(config.width, config.mlp_width, rngs=rngs)

  def __call__(self, x, rope, mask):
    x = x + self.attention(self.attention_norm(x), rope, mask)
    return x + self.mlp(self.mlp_norm(x))

  def decode(self, x, rope, mask, cache, slots):
    normed = self.attention_norm(x)
    y, cache = self.attention.decode(normed, rope, mask, cache, slots)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)), cache


class Transformer(nnx.Module):
  """Token embedding, blocks, final norm and a tied or untied head."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    table = (config.vocab_size, config.width)
    draw = functools.partial(jax.random.normal, shape=table)
    scale = 1 / math.sqrt(config.width)
    self.embedding = nnx.Param(scale * draw(rngs.params()))
    self.layers = nnx.Dict(
      {str(i): Block(config, rngs=rngs) for i in range(config.num_layers)}
    )
    self.final_norm = layers.RMSNorm(config.width, eps=config.norm_eps)
    tied = config.tie_embeddings
    self.head = None if tied else nnx.Param(scale * draw(rngs.params()))

  def output_head(self) -> jax.Array:
    """The head [V, D]; logits are `features @ head.T`."""
    return self.embedding[...] if self.head is None else self.head[...]


def make_transformer(
  config: ModelConfig, *, dtype: jnp.dtype, scan_layers: bool
) -> base.Network:
  """The network of a configuration as pure functions of its parameters.

  Args:
    config: the architecture.
    dtype: compute dtype of products and cache; norms, softmax, rope and logits
      are float32 always.
    scan_layers: whether `apply_sequence` scans over the blocks (short compile,
      a stacked copy of their parameters) or unrolls them.
  """
  build = functools.partial(Transformer, config)
  graph, _ = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
  merge = functools.partial(_merge, graph)
  bound = functools.partial
  return base.Network(
    init=lambda key: nnx.to_pure_dict(nnx.state(build(rngs=nnx.Rngs(key)))),
    prepare=bound(_cast_matrices, dtype=dtype),
    apply_sequence=bound(
      _apply_sequence, merge, config, dtype=dtype, scan_layers=scan_layers
    ),
    init_cache=bound(_init_cache, config, dtype),
    resize_cache=_resize_cache,
    prefill=bound(_prefill, merge, config, dtype),
    decode=bound(_decode, merge, config, dtype),
    vocab_size=config.vocab_size,
  )


def rope_frequencies(config: ModelConfig) -> np.ndarray:
  """Inverse frequencies float32 [hd // 2], llama3 scaling included.

  Llama 3 stretches wavelengths beyond `original / low_freq_factor` by
  `factor`, keeps those below `original / high_freq_factor`, and interpolates
  in between (Llama 3.1 model card, "rope_scaling").
  """
  exponents = np.arange(0, config.head_dim, 2, dtype=np.float32)
  frequencies = 1 / config.rope_theta ** (exponents / config.head_dim)
  scaling = config.rope_scaling
  if scaling is None:
    return frequencies.astype(np.float32)
  turns = scaling.original_max_positions * frequencies / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = np.clip((turns - low) / (high - low), 0, 1)
  stretched = frequencies / scaling.factor
  return (keep * frequencies + (1 - keep) * stretched).astype(np.float32)


def _merge(graph: nnx.GraphDef, params: base.Params) -> Transformer:
  return nnx.merge(graph, nnx.State(params))


def _cast_matrices(params: base.Params, *, dtype) -> base.Params:
  """Matrices in the compute dtype; norms and biases stay as they are."""
  return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, params)


def _apply_sequence(merge, config, params, tokens, *, dtype, scan_layers):
  """Features [B, L, D] of tokens [B, L], causal, and the head [V, D]."""
  chex.assert_rank(tokens, 2)
  batch, length = tokens.shape
  model = merge(params)
  positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
  rope = layers.rope_angles(positions, rope_frequencies(config))
  mask = jnp.broadcast_to(
    jnp.tril(jnp.ones((length, length), bool)), (batch, length, length)
  )
  blocks = [model.layers[str(i)] for i in range(config.num_layers)]
  graph, _ = nnx.split(blocks[0])

  @jax.checkpoint
  def block(x, weights):
    return nnx.merge(graph, weights)(x, rope, mask), None

  x = model.embedding[...][tokens].astype(dtype)
  weights = [nnx.state(b) for b in blocks]
  if scan_layers:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    x, _ = jax.lax.scan(block, x, stacked)
  else:
    for w in weights:
      x, _ = block(x, w)
  return model.final_norm(x), model.output_head().astype(dtype)


def _init_cache(config, dtype, rows: int, slots: int) -> base.Cache:
  """Per layer (keys, values), each [rows, KV, slots, hd]."""
  shape = (rows, config.num_kv_heads, slots, config.head_dim)
  return tuple(
    (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(config.num_layers)
  )


def _resize_cache(cache: base.Cache, slots: int) -> base.Cache:
  def resize(x):
    more = slots - x.shape[2]
    if more <= 0:
      return x[:, :, :slots]
    return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))

  return jax.tree.map(resize, cache)


def _prefill(merge, config, dtype, params, tokens, cache) -> base.Cache:
  starts = jnp.zeros(tokens.shape[:1], jnp.int32)
  model = merge(params)
  return _run(model, config, dtype, tokens, cache, starts, None, None)[1]


def _decode(
  merge,
  config,
  dtype,
  params,
  tokens,
  cache,
  starts,
  positions=None,
  block_mask=None,
):
  """See `base.Network.decode`; logits are float32."""
  model = merge(params)
  x, cache = _run(
    model, config, dtype, tokens, cache, starts, positions, block_mask
  )
  logits = jnp.einsum(
    "bqd,vd->bqv",
    x,
    model.output_head().astype(dtype),
    preferred_element_type=jnp.float32,
  )
  return logits, x, cache


def _run(model, config, dtype, tokens, cache, starts, positions, block_mask):
  """Features [B, Q, D] of a block of tokens, and the cache with the block."""
  chex.assert_rank(tokens, 2)
  chex.assert_shape(starts, tokens.shape[:1])
  slots = starts[:, None] + jnp.arange(tokens.shape[1])
  positions = slots if positions is None else positions
  rope = layers.rope_angles(positions, rope_frequencies(config))
  mask = _block_mask(slots, cache[0][0].shape[2], block_mask)
  x = model.embedding[...][tokens].astype(dtype)
  written = []
  for i, entry in enumerate(cache):
    block = model.layers[str(i)]
    x, entry = block.decode(x, rope, mask, entry, slots)
    written.append(entry)
  return model.final_norm(x), tuple(written)


def _block_mask(slots, num_slots: int, block_mask) -> jax.Array:
  """bool [B, Q, S]: the context, and of the own block what may be seen.

      slot:        0 .. start-1 | start .. start+Q-1 | later
      query q:     seen         | block_mask[q]      | hidden
  """
  every = jnp.arange(num_slots)
  if block_mask is None:  # a chain: token q sees the block up to itself
    return every <= slots[:, :, None]
  offset = every - slots[:, :1]  # [B, S]
  inside = (offset >= 0) & (offset < slots.shape[1])
  index = jnp.clip(offset, 0, slots.shape[1] - 1)
  own = jnp.take_along_axis(block_mask, index[:, None], axis=2)
  return (offset < 0)[:, None] | (inside[:, None] & own)
