"""Signatures of the functions that are injected across the library.

The rollout, the losses and the drafters get a network as these functions and
import no model, so other projects can bring their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

Params = Any  # nested dict of arrays
Cache = Any  # pytree of arrays whose first axis is the row

# (params, tokens [B, Q], cache, starts [B], positions [B, Q] | None,
#  block_mask [B, Q, Q] | None) -> (logits [B, Q, V], features [B, Q, D], cache)
TargetFn = Callable[..., tuple[jax.Array, jax.Array, Cache]]

# (params, tokens [B, L]) -> (features [B, L, D], head [V, D]); features[:, t]
# predict token t + 1, and logits are features @ head.T
SequenceFn = Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Network:
  """A causal language model as pure functions.

  Attributes:
    init: key -> params, float32.
    prepare: params -> params for decoding, in the compute dtype; done once per
      rollout and not once per chunk.
    apply_sequence: a `SequenceFn` for training, differentiable.
    init_cache: (rows, slots) -> an empty cache.
    resize_cache: (cache, slots) -> the cache with more slots.
    prefill: (params, tokens [P, L], cache) -> the cache with all L tokens of
      every row written from slot 0 on; the rows' padding is written too and
      masked by whoever reads.
    decode: a `TargetFn`. Writes Q tokens at slots `starts + arange(Q)` of each
      row; slots beyond the cache are dropped. Token q sees the slots below
      `starts`, and of its own block the tokens up to q, or those that
      `block_mask[:, q]` names. `positions` default to the slots.
    vocab_size: V.
  """

  init: Callable[[jax.Array], Params]
  prepare: Callable[[Params], Params]
  apply_sequence: SequenceFn
  init_cache: Callable[[int, int], Cache]
  resize_cache: Callable[[Cache, int], Cache]
  prefill: Callable[[Params, jax.Array, Cache], Cache]
  decode: TargetFn
  vocab_size: int


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
  """The sizes that programs are compiled for, each ascending.

  Attributes:
    rows: slots in flight (B); the last is the most that decode at once.
    slots: cache slots (S); the last holds a prompt and all its new tokens.
    prompts: padded prompt lengths.
    prefill: prompts that are prefilled in one pass.
  """

  rows: tuple[int, ...]
  slots: tuple[int, ...]
  prompts: tuple[int, ...]
  prefill: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RolloutPrograms:
  """The compiled programs of a rollout; `State` is a `DecodeState`.

  Attributes:
    prepare: params -> decoding params.
    prefill: (params, tokens [P, L]) -> cache of L slots.
    empty: (rows, slots) -> State.
    admit: (State, prompt cache, prompt tokens [P, L], prompt_of_slot [B],
      lengths [B], limits [B], keys [B, 2]) -> State.
    take: (State, indices [B']) -> State.
    resize: (State, slots) -> State.
    chunk: (params, State, sampling params, eos_ids [E], min_live,
      max_rounds) -> (State, rounds).
  """

  prepare: Callable[..., Params]
  prefill: Callable[..., Cache]
  empty: Callable[..., Any]
  admit: Callable[..., Any]
  take: Callable[..., Any]
  resize: Callable[..., Any]
  chunk: Callable[..., tuple[Any, jax.Array]]
