"""The torch backends: the contract of all backends, buckets, availability, the official package.

CUDA graphs need a GPU; here their step runs without one, through everything but the capture.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.backend_contract import BackendContract, assert_same, oracle_and_bound, random_rows
from triton_mega.backends import (
    BACKENDS,
    BackendUnavailable,
    DecodeBackend,
    StepOutput,
    hf,
    load_backend,
)
from triton_mega.backends import torch_graph as graph
from triton_mega.backends.torch_common import cache_version
from triton_mega.backends.torch_eager import TorchEager
from triton_mega.reference import CONTRACTS, decode
from triton_mega.spec import TINY, DecoderSpec, Role
from triton_mega.state import KVCache
from triton_mega.testing import assert_close, first_divergence
from triton_mega.weights import DecoderWeights, random_weights

ROLES: tuple[Role, ...] = ("talker", "code_predictor")


class Uncaptured(graph.TorchGraph):
    """The step of ``TorchGraph``, called instead of replayed."""

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        pass

    def _capture(self, step: graph.Replay) -> graph.Replay:
        return step


class UncapturedCompiled(Uncaptured):
    """The step of ``TorchCompileGraph`` traced as it would be, but run without code generation."""

    attention = staticmethod(graph.summed_attention)

    def _prepare(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


class TestTorchEager(BackendContract):
    backend = "torch_eager"


class TestGraphStep(BackendContract):
    def make(
        self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int = 6
    ) -> DecodeBackend:
        return Uncaptured(spec, weights, max_positions=max_positions)


@pytest.mark.gpu
class TestTorchEagerOnAGPU(BackendContract):
    backend, device = "torch_eager", "cuda:0"


@pytest.mark.gpu
class TestTorchGraph(BackendContract):
    backend, device = "torch_graph", "cuda:0"


@pytest.mark.gpu
@pytest.mark.slow
class TestTorchCompileGraph(BackendContract):
    backend, device = "torch_compile", "cuda:0"


@pytest.mark.hf
class TestHFOfficial(BackendContract):
    backend = "hf"


class OffByOneCache(Uncaptured):
    def _step(self, rows: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._position.sub_(1).clamp_(min=0)
        return super()._step(rows, head)


class BlindToHistory(Uncaptured):
    attention = staticmethod(lambda q, k, v, mask: v[:, :1].expand_as(q))


class KeepsPoison(Uncaptured):
    def _zero_unused_rows(self, position: int) -> None:
        pass


class SharesItsCache(Uncaptured):
    caches: ClassVar[dict[int, KVCache]] = {}

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        self.cache = self.caches.setdefault(self.spec.hidden_size, self.cache)
        return super()._run(inputs_embeds, position, head)


class LendsItsOutput(Uncaptured):
    output: ClassVar[dict[int, StepOutput]] = {}

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        new = super()._run(inputs_embeds, position, head)
        lent = self.output.setdefault(self.spec.hidden_size, new)
        lent.hidden.copy_(new.hidden)
        lent.logits.copy_(new.logits)
        return lent


class OneHead(Uncaptured):
    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        return super()._run(inputs_embeds, position, 0)


@pytest.mark.parametrize(
    ("broken", "test", "args"),
    [
        (OffByOneCache, "test_step_is_right", ("talker", 1)),
        (BlindToHistory, "test_step_is_right", ("code_predictor", 5)),
        (BlindToHistory, "test_n_rows_are_n_single_steps", ("talker",)),
        (KeepsPoison, "test_unused_rows_do_not_leak", ("talker",)),
        (SharesItsCache, "test_two_engines_do_not_disturb_each_other", ("talker",)),
        (LendsItsOutput, "test_output_is_the_callers", ("talker",)),
        (OneHead, "test_every_head_is_its_own", ()),
    ],
)
def test_contract_catches_faults(
    broken: type[Uncaptured], test: str, args: tuple[Any, ...]
) -> None:
    class Broken(BackendContract):
        def make(
            self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int = 6
        ) -> DecodeBackend:
            return broken(spec, weights, max_positions=max_positions)

    with pytest.raises(AssertionError):
        getattr(Broken(), test)(*args)


def test_buckets_double_up_to_the_cache() -> None:
    edges = [(0, 256), (255, 256), (256, 512), (511, 512), (512, 1024), (1500, 2048), (2048, 3000)]
    for position, rows in edges:
        assert graph.bucket_rows(position, 3000) == rows
    assert graph.bucket_rows(5, 17) == 17


@pytest.mark.parametrize("kind", [Uncaptured, UncapturedCompiled])
@pytest.mark.parametrize("position", [0, 254, 255, 256, 299])
def test_step_is_right_at_a_buckets_edge(kind: type[Uncaptured], position: int) -> None:
    spec = TINY.talker
    engine = kind(spec, random_weights(spec, 1), max_positions=300)
    engine.cache.fill_random(position, seed=2)
    if position:  # the last row of the history must be seen, and no row after the step
        engine.cache.v[:, :, position - 1] *= 200
    rows = random_rows(spec, min(3, 300 - position))
    _, want, bound = oracle_and_bound(engine, rows, position, 0)
    got = engine.run_steps(rows, position)
    assert_close(got.hidden, want.hidden, bound, "hidden")
    assert_close(got.logits, want.logits, 2 * bound, "logits")


def test_both_attentions_agree_with_torch_in_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, generator=generator).bfloat16() for n in (3, 40, 40))
    mask = torch.zeros(40).masked_fill(torch.arange(40) > 32, float("-inf"))
    want = (q.double() @ k.double().mT * 0.25)[:, :, :33].softmax(-1) @ v.double()[:, :33]
    for attention in (graph.fused_attention, graph.summed_attention):
        assert_close(attention(q, k, v, mask.bfloat16()), want, 6e-3, attention.__name__)


def test_graph_keeps_one_replay_per_bucket_and_head() -> None:
    spec = TINY.predictor
    engine = Uncaptured(spec, random_weights(spec, 1), max_positions=16)
    rows = random_rows(spec, 3)
    engine.run_steps(rows, 0, head=1)
    engine.run_steps(rows, 3, head=4)
    assert set(engine._replays) == {(16, 1), (16, 4)}


def test_three_axis_positions_reach_the_step() -> None:
    spec, rows = TINY.talker, random_rows(TINY.talker, 6)
    axes = torch.stack([torch.arange(6), torch.arange(6) * 3, torch.arange(6) + 9])
    weights = random_weights(spec, 1)
    engine = Uncaptured(spec, weights, max_positions=6, positions=axes)
    _, want, bound = oracle_and_bound(engine, rows, 0, 0)
    got = engine.run_steps(rows, 0)
    assert_close(got.hidden, want.hidden, bound)
    plain = Uncaptured(spec, weights, max_positions=6).run_steps(rows, 0)
    with pytest.raises(AssertionError):
        assert_close(plain.hidden, want.hidden, bound)


def test_eager_trace_is_the_references() -> None:
    spec, weights = TINY.talker, random_weights(TINY.talker, 1)
    engine = TorchEager(spec, weights, max_positions=6)
    engine.cache.fill_random(4, seed=2)
    cache = KVCache.allocate(spec, 6)
    cache.copy_from(engine.cache)
    rows, want = random_rows(spec, 1), {}
    args = (rows, 4, cache, engine.cos, engine.sin, CONTRACTS["hf_bf16"])
    decode(spec, weights, *args, trace=want)
    got = engine.trace_step(rows, 4)
    assert first_divergence(got, want, 0.0) is None
    assert got["down_proj"].shape == (3, 96)
    with pytest.raises(ValueError, match="position"):
        engine.trace_step(rows, 6)
    with pytest.raises(NotImplementedError, match="torch_graph"):
        Uncaptured(spec, weights, max_positions=6).trace_step(rows, 4)


@pytest.mark.parametrize("name", ["torch_graph", "torch_compile"])
def test_graphs_are_unavailable_on_a_cpu(name: str) -> None:
    backend = load_backend(name)
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU") as caught:
        backend.check_available(torch.device("cpu"))
    assert caught.value.backend == name
    assert "torch_eager" in caught.value.hint
    with pytest.raises(BackendUnavailable):
        backend(TINY.talker, random_weights(TINY.talker, 1), max_positions=6)


def test_load_backend_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected one of torch_eager, .*got 'torch'"):
        load_backend("torch")
    monkeypatch.setitem(BACKENDS, "gone", "triton_mega.backends.nothing_here:Gone")
    with pytest.raises(BackendUnavailable, match="nothing_here is not installed"):
        load_backend("gone")


def test_cache_version_sees_every_write_by_others() -> None:
    cache = KVCache.allocate(TINY.talker, 6)
    versions = [cache_version(cache)]
    for write in (
        lambda: cache.fill_random(2, seed=1),
        lambda: cache.copy_from(KVCache.allocate(TINY.talker, 6)),
        lambda: cache.v[:, :, 3].zero_(),
    ):
        write()
        versions.append(cache_version(cache))
    with torch.inference_mode():
        cache.k[0] = 1.0
    versions.append(cache_version(cache))
    assert len(set(versions)) == len(versions)
    with torch.inference_mode():
        cache = KVCache.allocate(TINY.talker, 6)
    with pytest.raises(ValueError, match="inference_mode"):
        cache_version(cache)


@pytest.mark.hf
@pytest.mark.parametrize("role", ROLES)
def test_official_modules_read_our_weights_and_positions(role: Role) -> None:
    spec = TINY.decoders[role]
    weights = random_weights(spec, 1)
    axes = None
    if role == "talker":
        axes = torch.stack([torch.arange(6), torch.arange(6) * 3, torch.arange(6) + 9])
    engine = load_backend("hf")(spec, weights, max_positions=6, positions=axes)
    names = dict(hf.official_names(spec, weights))
    for name, parameter in engine._model.named_parameters():
        assert parameter.data_ptr() == names[name].data_ptr(), f"{name} was copied"
    rows = random_rows(spec, 6)
    _, want, bound = oracle_and_bound(engine, rows, 0, 0)
    assert_close(engine.run_steps(rows, 0).hidden, want.hidden, bound)


@pytest.mark.hf
def test_official_cache_follows_ours() -> None:
    spec = TINY.talker
    engine = load_backend("hf")(spec, random_weights(spec, 1), max_positions=6)
    rows = random_rows(spec, 2)
    engine.cache.fill_random(3, seed=1)
    first = engine.run_steps(rows, 3)
    past = engine._past
    assert_same(engine.run_steps(rows, 3), first)
    assert engine._past is past  # cut back, not built again
    engine.cache.fill_random(3, seed=2)
    assert not torch.equal(engine.run_steps(rows, 3).hidden, first.hidden)
    engine.cache.fill_random(3, seed=1)
    assert_same(engine.run_steps(rows, 3), first)


@pytest.mark.hf
def test_stand_ins_are_gone_after_the_import() -> None:
    code = (
        "import sys, importlib.util\n"
        "from triton_mega.backends import hf\n"
        "here = {n for n in hf.STAND_INS if importlib.util.find_spec(n)}\n"
        "hf.import_official()\n"
        "left = {n.split('.')[0] for n in sys.modules} & set(hf.STAND_INS)\n"
        "assert left <= here, left\n"
        "assert 'qwen_tts' in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_missing_official_package_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "qwen_tts"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "qwen_tts", None)
    with pytest.raises(BackendUnavailable, match="make hf") as caught:
        load_backend("hf").check_available(torch.device("cpu"))
    assert "qwen_tts" in caught.value.reason
