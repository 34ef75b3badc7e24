"""Checkpoints that open, and those that must not: each fault is named by tensor, file or id."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fixtures import HERE, config
from triton_mega import checkpoint as module
from triton_mega.checkpoint import INDEX_FILE, SINGLE_FILE, checkpoint_shapes, open_checkpoint
from triton_mega.spec import Role, TTSSpec
from triton_mega.weights import hash_tensor, hash_weights, packed_shapes

ROLES: tuple[Role, ...] = ("talker", "code_predictor")
Q_PROJ = "talker.model.layers.1.self_attn.q_proj.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that opens a connection."""

    def refuse(*_args: Any) -> None:
        pytest.fail("touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """The tiny model's tensors, each its hash weight."""
    shapes = checkpoint_shapes(TTSSpec.from_config(config("tiny")))
    return {name: hash_tensor(name, shape) for name, shape in shapes.items()}


def write(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes a single-file checkpoint of the tiny model."""
    (directory / "config.json").write_text(json.dumps(config("tiny")))
    save_file(dict(tensors), directory / SINGLE_FILE)
    return directory


def write_sharded(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes the same as two shards and their index."""
    (directory / "config.json").write_text(json.dumps(config("tiny")))
    names = list(tensors)
    shards = {FIRST: names[::2], SECOND: names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("layout", [write, write_sharded])
def test_checkpoint_opens_and_packs(
    layout: Any, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    opened = open_checkpoint(layout(tmp_path, tensors))
    assert opened.spec == TTSSpec.from_config(config("tiny"))
    assert opened.names == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(opened.tensor(name), tensor), name
    for role in ROLES:
        spec = opened.spec.decoders[role]
        weights, want = opened.decoder_weights(role), hash_weights(spec)
        weights.check(spec)
        for field in packed_shapes(spec):
            assert torch.equal(getattr(weights, field), getattr(want, field)), field
    with pytest.raises(ValueError, match=r"talker\.nothing: no such tensor in"):
        opened.tensor("talker.nothing")


def test_path_may_be_text(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert open_checkpoint(str(write(tmp_path, tensors))).directory == tmp_path


def test_missing_shard_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    (write_sharded(tmp_path, tensors) / SECOND).unlink()
    held = sorted(list(tensors)[1::2])
    with pytest.raises(ValueError, match=rf"{SECOND}: missing .* {len(held)} tensors .*{held[0]}"):
        open_checkpoint(tmp_path)


def test_index_of_another_download_is_named(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_sharded(tmp_path, tensors)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    where = index["weight_map"].pop(Q_PROJ)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{Q_PROJ}: not listed, but in {where}"):
        open_checkpoint(tmp_path)
    index["weight_map"][Q_PROJ] = FIRST if where == SECOND else SECOND
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{Q_PROJ}: .*listed"):
        open_checkpoint(tmp_path)


def test_every_missing_tensor_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for name in (Q_PROJ, "talker.text_projection.linear_fc2.bias", "talker.codec_head.weight"):
        write(tmp_path, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(ValueError, match=rf"^{name}: missing; config.json \(tiny\)"):
            open_checkpoint(tmp_path)


def test_wrong_shape_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:, :32].clone()
    write(tmp_path, tensors)
    with pytest.raises(
        ValueError, match=rf"^{Q_PROJ}: expected \[128, 64\], got \[128, 32\]; .*another model"
    ):
        open_checkpoint(tmp_path)


def test_small_model_under_the_large_models_config(tmp_path: Path) -> None:
    """0.6B weights next to a 1.7B config; headers only, so the tensors are one value each."""
    small = TTSSpec.from_config(config("0.6B-CustomVoice"))
    headers = {name: Header(shape) for name, shape in checkpoint_shapes(small).items()}
    large = TTSSpec.from_config(config("1.7B-CustomVoice"))
    with pytest.raises(ValueError, match=r"^talker\..*: expected \[.*2048.*\], got .*1b7"):
        module._check_tensors(headers, large)
    module._check_tensors(headers, small)


class Header:
    """Stands for an open file that holds one tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def get_slice(self, _name: str) -> Header:
        return self

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "BF16"


def test_unknown_tensors_are_refused_and_the_speaker_encoder_is_not(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors["speaker_encoder.fc.weight"] = torch.zeros(3, 5)
    opened = open_checkpoint(write(tmp_path, tensors))
    assert "speaker_encoder.fc.weight" in opened.names
    for name in ("talker.model.layers.3.mlp.up_proj.weight", "talker.lora.a", "speaker_encoders"):
        write(tmp_path, tensors | {name: torch.zeros(2)})
        with pytest.raises(ValueError, match=rf"^{name}: not a tensor of this model \(tiny; 1 "):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(("dtype", "tag"), [(torch.float32, "F32"), (torch.float16, "F16")])
def test_other_dtypes_are_refused(
    dtype: torch.dtype, tag: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].to(dtype)
    write(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"^{Q_PROJ}: expected BF16 .*got {tag}; convert"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_a_weight_is_named(
    bad: float, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[Q_PROJ][5, 7] = bad
    opened = open_checkpoint(write(tmp_path, tensors))
    with pytest.raises(ValueError, match=rf"^{Q_PROJ}: holds a NaN or an infinity"):
        opened.decoder_weights("talker")
    opened.decoder_weights("code_predictor")


def test_damaged_file_is_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = write(tmp_path, tensors) / SINGLE_FILE
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3833402552\n"
    for damaged in (whole[:-100], b"", pointer):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^model\.safetensors: not a complete safetensors"):
            open_checkpoint(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("tiny")))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"expected {SINGLE_FILE} or {INDEX_FILE}, found neither"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("path", ["./none", "/none/here", "none", "~/none/at/all", "a/b/c", "../x"])
def test_absent_directory_is_never_looked_up(path: str) -> None:
    with pytest.raises(ValueError, match="no such directory, and not a hub id"):
        open_checkpoint(path)


def test_local_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision: a local directory has none, got 'v1'"):
        open_checkpoint(tmp_path, revision="v1")


def test_hub_id_downloads_what_decoding_needs(
    monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(write(tmp_path, tensors))

    monkeypatch.setattr(module, "snapshot_download", download)
    opened = open_checkpoint("Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", revision="0c0e3051")
    assert opened.directory == tmp_path
    assert asked["repo_id"] == "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
    assert asked["revision"] == "0c0e3051"
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", SINGLE_FILE, FIRST, INDEX_FILE]
    others = ["speech_tokenizer/model.safetensors", "speech_tokenizer/config.json", "README.md"]
    assert (
        list(filter_repo_objects(files + others, allow_patterns=asked["allow_patterns"])) == files
    )


def test_hub_without_network_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"nobody/nothing: no such directory, and the hub .* v3"):
        open_checkpoint("nobody/nothing", revision="v3")


def test_shapes_are_those_of_the_published_files() -> None:
    table = gzip.decompress((HERE / "configs" / "tensors.1.7B-CustomVoice.tsv.gz").read_bytes())
    rows = [line.split("\t") for line in table.decode().splitlines()]
    published = {name: tuple(json.loads(shape)) for name, _dtype, shape, _size in rows}
    assert len(published) == 404
    assert {dtype for _, dtype, *_ in rows} == {"BF16"}
    assert checkpoint_shapes(TTSSpec.from_config(config("1.7B-CustomVoice"))) == published
    for name, count in (("1.7B-VoiceDesign", 404), ("1.7B-Base", 404)):
        assert len(checkpoint_shapes(TTSSpec.from_config(config(name)))) == count
    projection = {name for name in published if "small_to_mtp_projection" in name}
    for name in ("0.6B-CustomVoice", "0.6B-Base"):
        shapes = checkpoint_shapes(TTSSpec.from_config(config(name)))
        assert set(published) - set(shapes) == projection
        assert len(shapes) == 402
        assert shapes["talker.text_projection.linear_fc2.weight"] == (1024, 2048)
        assert shapes["talker.code_predictor.model.codec_embedding.14.weight"] == (2048, 1024)
