"""From a configuration to functions that are jitted, sharded and donating."""

import functools

import jax
from jax.sharding import Mesh

from tlt_jax import base, sharding
from tlt_jax.speculative import decoding


def rollout_programs(
  network: base.Network, mesh: Mesh
) -> base.RolloutPrograms:
  """Jits the rollout's programs: rows over `data`, caches donated."""
  rows = sharding.row_sharding(mesh)
  whole = sharding.replicated(mesh)
  jit = functools.partial(jax.jit, out_shardings=rows)
  resize = network.resize_cache

  def prefill(params, tokens):
    return network.prefill(params, tokens, network.init_cache(*tokens.shape))

  return base.RolloutPrograms(
    prepare=jax.jit(network.prepare),
    prefill=jit(prefill),
    empty=jit(
      functools.partial(decoding.empty_state, network.init_cache),
      static_argnums=(0, 1),
    ),
    admit=jit(
      functools.partial(decoding.admit_rows, resize), donate_argnums=(0,)
    ),
    take=jit(decoding.take_rows),
    resize=jit(
      functools.partial(decoding.resize_slots, resize), static_argnums=(1,)
    ),
    chunk=jax.jit(
      functools.partial(decoding.decode_chunk, network.decode),
      donate_argnums=(1,),
      out_shardings=(rows, whole),
    ),
  )
