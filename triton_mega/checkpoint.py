"""Opens a released checkpoint: ``config.json`` and safetensors, from a directory or the hub.

Opening reads headers only and checks every name, shape and dtype against the config, so that a
wrong file fails in milliseconds and by name. Tensors are read when asked for. Pickled weights are
never read. Knows nothing about kernels, the codec (``speech_tokenizer/``) or the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from triton_mega.spec import Role, TTSSpec
from triton_mega.weights import DecoderWeights, decoder_shapes, pack

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
UNUSED_PREFIXES = ("speaker_encoder.",)
"""Tensors that belong to a checkpoint but not to decoding; their shapes are not checked."""

HUB_PATTERNS = ["config.json", "model*.safetensors", INDEX_FILE]


def checkpoint_shapes(spec: TTSSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape of every tensor of the talker and the code predictor."""
    hidden, text = spec.talker.hidden_size, spec.text_hidden_size
    predictor = "talker.code_predictor"
    shapes: dict[str, tuple[int, ...]] = {}
    for decoder in spec.decoders.values():
        shapes |= decoder_shapes(decoder)
    shapes |= {
        "talker.model.codec_embedding.weight": (spec.talker.vocab_size, hidden),
        "talker.model.text_embedding.weight": (spec.text_vocab_size, text),
        "talker.text_projection.linear_fc1.weight": (text, text),
        "talker.text_projection.linear_fc1.bias": (text,),
        "talker.text_projection.linear_fc2.weight": (hidden, text),
        "talker.text_projection.linear_fc2.bias": (hidden,),
    }
    for j in range(spec.num_code_groups - 1):
        name = f"{predictor}.model.codec_embedding.{j}.weight"
        shapes[name] = (spec.predictor.vocab_size, hidden)
    if spec.has_projection:
        projection = f"{predictor}.small_to_mtp_projection"
        shapes[f"{projection}.weight"] = (spec.predictor.hidden_size, hidden)
        shapes[f"{projection}.bias"] = (spec.predictor.hidden_size,)
    return shapes


class Checkpoint:
    """A checked checkpoint directory; made by ``open_checkpoint``.

    Attributes:
        directory: where the files are.
        spec: what ``config.json`` says.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec = TTSSpec.from_json(directory)
        self._files: dict[str, Any] = _open_tensors(directory)
        _check_tensors(self._files, self.spec)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the files, sorted."""
        return tuple(sorted(self._files))

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns one tensor by its checkpoint name, in the file's dtype.

        Raises:
            ValueError: the checkpoint has no such tensor, or it holds a NaN or an infinity.
        """
        if name not in self._files:
            raise ValueError(f"{name}: no such tensor in {self.directory}")
        tensor: torch.Tensor = self._files[name].get_tensor(name).to(device)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: holds a NaN or an infinity; a damaged or bad checkpoint?")
        return tensor

    def decoder_weights(self, role: Role, device: torch.device | str = "cpu") -> DecoderWeights:
        """Returns the packed weights of the talker or of the code predictor on ``device``.

        Raises:
            ValueError: a tensor holds a NaN or an infinity; names it.
        """
        spec = self.spec.decoders[role]
        return pack(lambda name, shape: self.tensor(name, device), spec, device)


def open_checkpoint(path_or_hub_id: str | Path, revision: str | None = None) -> Checkpoint:
    """Returns the checkpoint in a local directory, or the one a hub id names.

    A directory that exists is never looked up on the network. A hub id (``owner/name``) is
    downloaded to the hub's cache, without the codec.

    Args:
        revision: branch, tag or commit on the hub; not for a directory.

    Raises:
        ValueError: neither a directory nor a reachable hub id; or the files do not fit the config.
            Names the tensor or the file.
    """
    directory = Path(path_or_hub_id).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(f"revision: a local directory has none, got {revision!r}")
        return Checkpoint(directory)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path_or_hub_id)):
        raise ValueError(f"{path_or_hub_id}: no such directory, and not a hub id (owner/name)")
    try:
        found = snapshot_download(
            str(path_or_hub_id), revision=revision, allow_patterns=HUB_PATTERNS
        )
    except OSError as error:  # what the hub client raises offline, on no access, on no such id
        raise ValueError(
            f"{path_or_hub_id}: no such directory, and the hub did not give revision "
            f"{revision or 'main'}: {error}"
        ) from error
    return Checkpoint(Path(found))


def _open_tensors(directory: Path) -> dict[str, Any]:
    """Tensor name to the open safetensors file that holds it."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        file = _open_file(single)
        return dict.fromkeys(file.keys(), file)
    if not index.is_file():
        raise ValueError(f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither")
    with index.open(encoding="utf-8") as text:
        weight_map: Mapping[str, str] = json.load(text)["weight_map"]
    files: dict[str, Any] = {}
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, where in weight_map.items() if where == shard}
        if not (directory / shard).is_file():
            raise ValueError(
                f"{shard}: missing from {directory}; {INDEX_FILE} puts {len(listed)} tensors "
                f"there, {min(listed)} for one"
            )
        file = _open_file(directory / shard)
        for name in sorted(listed ^ set(file.keys())):
            where = "listed for" if name in listed else "not listed, but in"
            raise ValueError(f"{name}: {where} {shard}: {INDEX_FILE} is of another download?")
        files |= dict.fromkeys(listed, file)
    return files


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{path.name}: not a complete safetensors file ({error}); "
            "an interrupted download, or a Git LFS pointer?"
        ) from error


def _check_tensors(files: Mapping[str, Any], spec: TTSSpec) -> None:
    expected = checkpoint_shapes(spec)
    for name, shape in expected.items():
        if name not in files:
            raise ValueError(f"{name}: missing; config.json ({spec.model_size}) needs it")
        header = files[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise ValueError(
                f"{name}: expected {list(shape)}, got {header.get_shape()}; "
                f"weights of another model than this config.json ({spec.model_size})?"
            )
        if header.get_dtype() != "BF16":
            raise ValueError(
                f"{name}: expected BF16 as released, got {header.get_dtype()}; "
                "convert the checkpoint to bfloat16 first"
            )
    unknown = [name for name in files if name not in expected]
    unknown = sorted(name for name in unknown if not name.startswith(UNUSED_PREFIXES))
    if unknown:
        raise ValueError(
            f"{unknown[0]}: not a tensor of this model ({spec.model_size}; "
            f"{len(unknown)} such names); config.json of another model?"
        )
