"""The device mesh and where every array lies on it."""

import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Path pattern -> split of the parameter. Kernels are [out, in]. The first
# match counts; a leaf that matches none is an error, so that a new parameter
# can't end up replicated by accident.
PARAMETER_RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r"(embedding|head)$", PartitionSpec("model", None)),
  (r"attention/(query|key|value)/kernel$", PartitionSpec("model", None)),
  (r"attention/(query|key|value)/bias$", PartitionSpec("model")),
  (r"mlp/(gate|up)/kernel$", PartitionSpec("model", None)),
  (r"(attention/output|mlp/down)/kernel$", PartitionSpec(None, "model")),
  (r"attention/output/bias$", PartitionSpec()),
  (r"norm/scale$", PartitionSpec()),
)


def make_mesh(*, data: int, model: int) -> Mesh:
  """A mesh with axes `data` and `model` over all devices.

  Raises:
    ValueError: the axes don't multiply to the number of devices.
  """
  count = jax.device_count()
  if data < 1 or model < 1 or data * model != count:
    raise ValueError(
      f"mesh.data * mesh.model = {data} * {model} must be the number of "
      f"devices, {count}"
    )
  return jax.make_mesh(
    (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )


def parameter_shardings(mesh: Mesh, params, rules=PARAMETER_RULES):
  """A pytree of `NamedSharding` like params (arrays or their shapes).

  Raises:
    ValueError: a leaf matches no rule, or an axis can't be split evenly.
  """

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = _matching_spec(name, rules)
    for size, axis in zip(leaf.shape, spec, strict=False):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
          f"parameter {name} of shape {leaf.shape} can't be split over "
          f"mesh.{axis} = {mesh.shape[axis]}"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(place, params)


def row_sharding(mesh: Mesh) -> NamedSharding:
  """The first axis (rows of a batch) split over `data`."""
  return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def _matching_spec(name: str, rules) -> PartitionSpec:
  for pattern, spec in rules:
    if re.search(pattern, name):
      return spec
  raise ValueError(f"no sharding rule matches parameter {name}")
