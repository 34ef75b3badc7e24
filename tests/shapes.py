"""The models and chips that what needs no GPU is tested for."""

from __future__ import annotations

from tests.fixtures import config
from triton_mega.device import DeviceInfo
from triton_mega.spec import TINY, TTSSpec

LARGE = TTSSpec.from_config(config("1.7B-CustomVoice"))
SMALL = TTSSpec.from_config(config("0.6B-CustomVoice"))
SPECS = {
    "talker_1p7b": LARGE.talker,
    "talker_0p6b": SMALL.talker,
    "predictor": LARGE.predictor,
    "tiny": TINY.talker,
    "tiny_predictor": TINY.predictor,
}
CHIPS = {
    "sm_80": DeviceInfo.of_chip((8, 0), 108, name="A100"),
    "sm_90": DeviceInfo.of_chip((9, 0), 132, name="H200"),
    "sm_120": DeviceInfo.of_chip((12, 0), 170, name="RTX 5090"),
}
