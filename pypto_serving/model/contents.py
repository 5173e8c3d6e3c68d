"""Contents of a checkpoint: from file headers, else from its index, else from config.json. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import (
    SINGLE_FILE,
    Checkpoint,
    StoredTensor,
    read_index,
    same_shape,
    weight_files,
)
from pypto_serving.model.folder import what_it_is
from pypto_serving.model.inventory import Inventory, StoredBytes
from pypto_serving.model.stored_names import names_in_index
from pypto_serving.types.model import Contents, IndexFacts, Source, StoredForm, TensorTotals


def read_contents(
    model_dir: str | Path, take_inventory: Callable[[Mapping[str, StoredTensor]], Inventory], dtype: str
) -> Contents:
    """Read the best available source, and compare all sources with the inventory, one line per difference.

    `take_inventory` makes the inventory, from headers if present. Without headers, dtypes and shapes come from the
    inventory and `dtype`. Draft layers count if the source lists them; config.json alone lists all that it names.
    """
    index, listed = _read_index(Path(model_dir))
    headers, error = read_headers(Path(model_dir))
    names = names_in_index(listed, headers)
    inventory = take_inventory(headers)
    required, whole = inventory.stored(dtype, False), inventory.stored(dtype, True)
    verdicts = [f"files: {error}"] if error else []
    found: Mapping[str, StoredBytes | StoredTensor] = headers
    source: Source = "files" if headers else "index" if index else "config.json"
    if index is not None:
        verdicts += _differences("index", names, required, whole, inventory)
    if source == "files":
        verdicts += [*_differences("files", headers, required, whole, inventory), *_shapes(headers, required)]
    else:
        found = {name: whole[name] for name in names if name in whole} if index else whole
    if index is not None:
        verdicts.append(_compare_size(index, sum(tensor.num_bytes for tensor in found.values())))
    drafts = [tensor for name, tensor in found.items() if name in whole and name not in required]
    return Contents(
        source=source,
        tensors=_count(found.values()),
        forms=_forms(inventory, found),
        draft_tensors=len(drafts),
        draft_bytes=sum(tensor.num_bytes for tensor in drafts),
        num_parameters=inventory.num_parameters(False),
        num_parameters_with_drafts=inventory.num_parameters(bool(drafts)),
        index=index,
        verdicts=tuple(verdicts),
        obstacle=error or _obstacle(Path(model_dir), headers, inventory),
    )


def _read_index(directory: Path) -> tuple[IndexFacts | None, Collection[str]]:
    """Read the index: its facts, None without an index, and its tensor names. Raises ModelError if it is damaged."""
    found = read_index(directory)
    if found is None:
        return None, ()
    names, size = found
    files = set(names.values())
    here = sum((directory / file).is_file() for file in files)
    return IndexFacts(num_tensors=len(names), num_files=len(files), files_here=here, total_size=size), names.keys()


def read_headers(directory: Path) -> tuple[Mapping[str, StoredTensor], str]:
    """Return the tensors in the files, and the error found in them; both empty unless all files are present."""
    try:
        if all(file.is_file() for file in weight_files(directory)):
            return Checkpoint.open(directory).tensors, ""
    except ModelError as error:
        return {}, str(error)
    except OSError as error:
        return {}, f"{error.filename or directory} cannot be read: {error.strerror}"
    return {}, ""


def _differences(
    source: str, names: Collection[str], required: Collection[str], whole: Collection[str], inventory: Inventory
) -> Iterator[str]:
    """Yield one line each for missing tensors, for tensors that the model lacks, and for ignored ones."""
    surplus = sorted(name for name in names if name not in whole)
    for verdict, odd in (
        ("missing", sorted(name for name in required if name not in names)),
        ("not part of this model", [name for name in surplus if not inventory.ignores(name)]),
        ("left alone", [name for name in surplus if inventory.ignores(name)]),
    ):
        if odd:
            yield f"{source}: {odd[0]}{f' and {len(odd) - 1} more' if len(odd) > 1 else ''}: {verdict}"


def _obstacle(directory: Path, headers: Mapping[str, StoredTensor], inventory: Inventory) -> str:
    """Return the error that loading these files would raise before reading any weight, or "".

    Without files there is none, unless the folder holds something else.
    """
    if not headers:
        hint = "" if read_index(directory) else what_it_is(directory)
        return hint and f"{directory} is not a complete checkpoint: it has no {SINGLE_FILE}; {hint}"
    try:
        Checkpoint(directory, weight_files(directory), headers).require(inventory.expected(), inventory.ignores)
    except ModelError as error:
        return str(error)
    return ""


def _shapes(found: Mapping[str, StoredTensor], required: Mapping[str, StoredBytes]) -> Iterator[str]:
    """Yield a line for the first tensor whose shape differs from that in config.json."""
    for name, tensor in required.items():
        if name in found and not same_shape(found[name].shape, tensor.shape):
            yield f"files: {name} has shape {list(found[name].shape)}, but config.json makes it {list(tensor.shape)}"
            return


def _compare_size(index: IndexFacts, num_bytes: int) -> str:
    if index.total_size is None:
        return "index: it has no total_size"
    if index.total_size == num_bytes:
        return "index: its total_size is what these tensors take"
    difference = index.total_size - num_bytes
    odd = f"{abs(difference)} bytes {'more' if difference > 0 else 'less'}"
    return f"index: its total_size is {odd} than these tensors take"


def _count(tensors: Collection[StoredBytes | StoredTensor]) -> tuple[TensorTotals, ...]:
    """Count the tensors and bytes of each dtype, most bytes first."""
    counts, sizes = Counter(tensor.dtype for tensor in tensors), Counter[str]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.num_bytes
    return tuple(TensorTotals(dtype=dtype, count=counts[dtype], num_bytes=size) for dtype, size in sizes.most_common())


def _forms(inventory: Inventory, found: Mapping[str, StoredBytes | StoredTensor]) -> tuple[StoredForm, ...]:
    """Count the matrices, weights and bytes of each storage scheme."""
    counts, weights, sizes = Counter[str](), Counter[str](), Counter[str]()
    for matrix in inventory.matrices():
        held = [found[name] for name in matrix.tensors if name in found]
        if held:
            name = matrix.scheme or held[0].dtype.lower()
            counts[name] += 1
            weights[name] += matrix.num_parameters
            sizes[name] += sum(tensor.num_bytes for tensor in held)
    return tuple(
        StoredForm(name=name, matrices=counts[name], num_parameters=weights[name], num_bytes=size)
        for name, size in sizes.most_common()
    )
