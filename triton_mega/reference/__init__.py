"""Plain torch reference of a decoder step under every rounding contract. Imports no kernel."""

from triton_mega.reference.contract import CONTRACTS, Contract
from triton_mega.reference.decoder import DecoderOutput, decode

__all__ = ["CONTRACTS", "Contract", "DecoderOutput", "decode"]
